"""`ablation report` on a whole simulated ladder: 14 cells, 17 checkpoints, 378 + 276 problems, n = 160; time and bytes.

python benchmarks/report_at_scale.py STORE [--mbpp FILE --mbpp-plus FILE]

Writes the store that such an experiment would leave (no weights; every score, and the samples of the base and of the
last checkpoints, which are all that a report reads), then makes the report of it. Some programs are hostile to pages.
Exit 1 past 60 s or 5 MB. The store takes about half a gigabyte.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from simulated import LADDER, load_ladder, score_of

from evaluation.files import write_json, write_jsonl
from evaluation.manifests import Provenance, write_manifest
from evaluation.problems import prepare
from evaluation.protocol import Protocol
from evaluation.scores import estimate_pass_at_ks
from flows.experiments import EXPERIMENTS
from tasks.registration import NAME, Registered
from training.cell import Cell
from training.folder import Result

MOST_SECONDS, MOST_BYTES = 60.0, 5_000_000
KINDS = ("stable", "stable", "stable", "degraded", "collapsed", "collapsed", "diverged")
"""Of the control arm by rung; the other arm breaks one rung higher."""
HOSTILE = "</pre><script>document.title = 'owned'</script><img src=x onerror=alert(1)>\x1b[31m\u202e"


def write_score(
    folder: Path, passing: np.ndarray, protocol: Protocol, ids: Sequence[str], where: Provenance, programs: bool
) -> None:
    """Write a score folder as `evaluation.run` does."""
    plus = protocol.benchmark == "mbpp_plus"
    judged = [(protocol.n, int(c)) for c in passing]
    found = {str(k): e for k, e in estimate_pass_at_ks(judged, protocol.reported_ks).items()}
    score = score_of(passing.tolist(), protocol.n, ids, plus).replace(
        label=folder.name, cell=where.cell, global_step=where.global_step, benchmark=protocol.benchmark,
        pass_at_k={"base": found, "plus": found if plus else None}, protocol_sha256=protocol.sha256, protocol=protocol,
    )  # fmt: skip
    write_json(folder / "score.json", score)
    if programs and plus:
        rows = [(p, i, i < c) for p, c in zip(ids, passing.tolist(), strict=True) for i in range(protocol.n)]
        write_jsonl(folder / "samples.jsonl", (sample(*row) for row in rows))
        write_jsonl(folder / "verdicts.jsonl", (verdict(*row) for row in rows))
    write_manifest(folder, "score", where)


def sample(problem: str, index: int, passed: bool) -> dict[str, Any]:
    """Return a row of samples.jsonl."""
    body = f"    total = {index}\n    for value in values:\n        total += value\n    return total\n"
    source = f"def solve_{problem.rpartition('/')[2]}(values):\n{body}" + (HOSTILE if index % 3 == 0 else "")
    return {"task_id": problem, "index": index, "completion": source, "solution": source, "finish_reason": "stop",
            "num_tokens": 60}  # fmt: skip


def verdict(problem: str, index: int, passed: bool) -> dict[str, Any]:
    """Return a row of verdicts.jsonl."""
    word = "pass" if passed else "fail"
    return {"task_id": problem, "index": index, "base": word, "plus": word, "tests_passed": 108 if passed else 3,
            "tests_total": 108, "seconds": 0.002}  # fmt: skip


def write_cell(store: Path, cell: Cell, run: Any, ladder: Any, protocols: Any, ids: Any) -> None:
    """Write logs and scores of one cell."""
    name, end = cell.name, cell.steps if run.finite else run.onset + 1
    logs = store / name / "logs"
    rng = np.random.default_rng([cell.seed, len(name)])
    rows = [
        {"global_step": t, "reward": float(r) if np.isfinite(r) else "NaN", "loss": 0.1,
         "grad_norm": float(rng.gamma(2, 0.1)), "entropy": float(0.4 / (1 + t / 200)),
         "mean_tokens": float(300 + 0.5 * t), "truncated_fraction": 0.02, "replay": None, "seconds": 140.0}
        for t, r in enumerate(run.reward[:end], start=1)
    ]  # fmt: skip
    write_jsonl(logs / "steps.jsonl", rows)
    result = Result(end="finished" if run.finite else "diverged", last_step=end, onset_step=None if run.finite else end)
    write_json(logs / "result.json", result)
    identity = {"cell": name, "fingerprint": "simulated", "cell_config": cell.model_dump(mode="json")}
    write_manifest(logs, "logs", Provenance(**identity))
    steps = [s for s in cell.checkpoints if s < end or run.finite]
    for protocol in protocols:
        for step in steps:
            passing = run.correct[ladder.CHECKPOINTS.index(step)][: len(ids[protocol.benchmark])]
            folder = store / name / "scores" / protocol.folder / f"global_step_{step}"
            where = Provenance(**identity, global_step=step)
            write_score(folder, passing, protocol, ids[protocol.benchmark], where, step == steps[-1])


def write_store(store: Path, ladder: Any, mbpp: str | None, mbpp_plus: str | None) -> None:
    """Write what the experiment `ladder` with one seed would leave."""
    experiment = EXPERIMENTS["ladder"]
    cells, protocols = experiment.cells(num_seeds=1), experiment.protocols
    ids = {"mbpp_plus": [f"Mbpp/{i}" for i in range(378)], "mbpp_test276": [f"Mbpp/{i}" for i in range(378, 654)]}
    if mbpp and mbpp_plus:
        found = prepare("mbpp", 0, list(ids), store.parent / "problems", mbpp, mbpp_plus)
        ids = {b: [f"Mbpp/{i}" for i in part] for b, part in
               (("mbpp_plus", found.split.ids.plus), ("mbpp_test276", found.split.ids.test))}  # fmt: skip
        for name in ("split.json", "contamination.json"):
            raw = (Path(found.train).parent / name).read_text(encoding="utf-8")
            write_json(store / "reports" / experiment.name / name, json.loads(raw))
    declared = Registered(
        experiment=experiment.model_dump(mode="json"), sha256=experiment.sha256, cells=tuple(c.name for c in cells),
        begun=(), registered_at="2026-01-01T00:00:00+00:00",
    )  # fmt: skip
    write_json(store / "reports" / experiment.name / NAME, declared)
    where = Provenance(fingerprint=experiment.sha256)
    write_manifest(store / "reports" / experiment.name, "report", where)
    rng = np.random.default_rng(7)
    ability = ladder.abilities(rng)
    rungs = sorted(experiment.lrs)
    for cell in cells:
        rung = rungs.index(cell.lr) - (0 if cell.arm == experiment.arms[0] else 1)
        run = ladder.run(rng, ability, cell.arm, cell.lr, cell.seed, KINDS[max(0, rung)])
        write_cell(store, cell, run, ladder, protocols, ids)
    base = ladder.run(rng, ability).correct[0]
    for protocol in protocols:
        folder = store / cells[0].model / "scores" / protocol.folder / "global_step_0"
        names = ids[protocol.benchmark]
        write_score(folder, base[: len(names)], protocol, names, Provenance(global_step=0), True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--ladder", type=Path, default=LADDER)
    parser.add_argument("--mbpp")
    parser.add_argument("--mbpp-plus")
    args = parser.parse_args()
    if args.store.exists():
        parser.error(f"store={args.store}: exists; name a new folder")
    write_store(args.store, load_ladder(args.ladder), args.mbpp, args.mbpp_plus)
    print("store written", flush=True)
    started = time.monotonic()
    command = [sys.executable, "-m", "flows.cli", "report", str(args.store), "--experiment", "ladder"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - started
    page = args.store / "reports" / "ladder" / "report.html"
    if done.returncode not in {0, 1} or not page.is_file():
        print(done.stdout[-2000:], done.stderr[-2000:], f"exit {done.returncode}")
        return 1
    size = page.stat().st_size
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"processor: {used.ru_utime + used.ru_stime:.1f} s")
    print(f"{seconds:.1f} s (at most {MOST_SECONDS:g}), page {size / 1e6:.2f} MB (at most {MOST_BYTES / 1e6:g})")
    return 0 if seconds < MOST_SECONDS and size < MOST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
