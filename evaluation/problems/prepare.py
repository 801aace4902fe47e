"""From a benchmark's name to files of problems, the split and the contamination report: same input, same bytes."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from evaluation.contamination import Contamination, find_contamination
from evaluation.errors import InputError
from evaluation.files import write_text
from evaluation.problems import sums
from evaluation.problems.gsm8k import NUM_TRAIN, load_gsm8k
from evaluation.problems.humaneval import load_humaneval_plus
from evaluation.problems.mbpp import Loaded, load_mbpp, load_mbpp_plus
from evaluation.problems.toy import generate
from evaluation.program import explain
from evaluation.protocol import Protocol
from evaluation.records import Problem, Record
from evaluation.splits import Ids, Source, Split, build_split, split_mbpp


class Benchmark(Record):
    """What a checkpoint can be scored on."""

    name: str
    training: Literal["mbpp", "toy", "gsm8k", "sums", ""]
    """Training benchmark whose split holds it out; empty: it is scored only."""
    num_problems: int
    has_plus: bool = False
    """Whether it has a second, larger suite."""


BENCHMARKS: dict[str, Benchmark] = {
    b.name: b
    for b in (
        Benchmark(name="mbpp_plus", training="mbpp", num_problems=378, has_plus=True),
        Benchmark(name="mbpp_test276", training="mbpp", num_problems=276),
        Benchmark(name="humaneval_plus", training="", num_problems=164, has_plus=True),
        Benchmark(name="toy_plus", training="toy", num_problems=128, has_plus=True),
        Benchmark(name="gsm8k", training="gsm8k", num_problems=1319),
        Benchmark(name="sums", training="sums", num_problems=sums.NUM_HELD_OUT),
    )
}


def num_samples(protocol: Protocol) -> int:
    """Return how many samples of a checkpoint a protocol draws."""
    known = BENCHMARKS[protocol.benchmark].num_problems
    return min(known, protocol.num_problems or known) * protocol.n


class Prepared(Record):
    """Where the problems of one training benchmark lie, and what they are."""

    split: Split
    split_sha256: str
    """`Split.identity`."""
    train: str
    """Path of train.jsonl."""
    benchmarks: dict[str, str]
    """Path of each benchmark's problems, by name."""
    revisions: dict[str, str]
    """By source: commit, release, or `sha256:<hex>` of a local file."""
    contamination: Contamination


class _Parts(Record):
    train: tuple[Problem, ...]
    benchmarks: dict[str, tuple[Problem, ...]]
    split: Split
    contamination: Contamination
    revisions: dict[str, str]


def prepare(
    experiment_benchmark: str,
    data_seed: int,
    benchmarks: Sequence[str],
    out: Path,
    mbpp: str | None = None,
    mbpp_plus: str | None = None,
    gsm8k: str | None = None,
) -> Prepared:
    """Write train.jsonl, a file for each benchmark, split.json and contamination.json to `out`.

    A file that already has its content is not touched; every benchmark of the split is written, so that the split's
    identity does not depend on which are asked for.

    Args:
        experiment_benchmark: `mbpp`, `toy`, `gsm8k` or `sums`.
        data_seed: seed of generated problems; the others ignore it.
        benchmarks: those the caller will score, for the check that the split has them.
        out: folder, made if absent.
        mbpp: local copy of MBPP, or None for the hub.
        mbpp_plus: local copy of MBPP+, or None for EvalPlus's download.
        gsm8k: local folder of GSM8K's files, or None for the hub.

    Raises:
        InputError: an unknown benchmark, or a file that is missing or wrong.
        MachineError: a source that cannot be reached.
    """
    for name in benchmarks:
        if name not in BENCHMARKS or BENCHMARKS[name].training != experiment_benchmark:
            known = [b.name for b in BENCHMARKS.values() if b.training == experiment_benchmark]
            raise InputError(
                "benchmark", name, f"the split of {experiment_benchmark} has no such part", f"use one of {known}"
            )
    parts = _load_parts(experiment_benchmark, data_seed, mbpp, mbpp_plus, gsm8k)
    texts = {"train": _jsonl(parts.train)} | {n: _jsonl(ps) for n, ps in parts.benchmarks.items()}
    split = parts.split.replace(problems={n: hashlib.sha256(t.encode()).hexdigest() for n, t in texts.items()})
    for name, text in texts.items():
        _write_if_changed(out / f"{name}.jsonl", text)
    for name, record in (("split", split), ("contamination", parts.contamination)):
        text = json.dumps(record.model_dump(mode="json", by_alias=True), indent=1, ensure_ascii=False) + "\n"
        _write_if_changed(out / f"{name}.json", text)
    return Prepared(
        split=split,
        split_sha256=split.identity,
        train=str(out / "train.jsonl"),
        benchmarks={n: str(out / f"{n}.jsonl") for n in parts.benchmarks},
        revisions=parts.revisions,
        contamination=parts.contamination,
    )


def load_benchmark(
    name: str,
    mbpp: str | None = None,
    mbpp_plus: str | None = None,
    data_seed: int = 0,
    humaneval_plus: str | None = None,
    gsm8k: str | None = None,
) -> list[Problem]:
    """Return a benchmark's problems, ascending by number, without writing anything.

    Raises:
        InputError: no such benchmark, or a file that is missing or wrong.
        MachineError: a source that cannot be reached.
    """
    if name not in BENCHMARKS:
        raise InputError("benchmark", name, "unknown", f"use one of {', '.join(BENCHMARKS)}")
    if name == "mbpp_plus":
        return list(load_mbpp_plus(mbpp_plus).problems)
    training = BENCHMARKS[name].training
    if not training:
        return list(load_humaneval_plus(humaneval_plus).problems)
    return list(_load_parts(training, data_seed, mbpp, mbpp_plus, gsm8k).benchmarks[name])


def load_split(mbpp: str | None = None, mbpp_plus: str | None = None) -> Split:
    """Return MBPP's partition (`ablation split`)."""
    return _split(load_mbpp(mbpp), load_mbpp_plus(mbpp_plus))


def read_problems(path: Path | str) -> list[Problem]:
    """Read a file of problems that `write_problems` or `prepare` wrote.

    Raises:
        InputError: the file is missing, or a line is not a problem.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError("problems", path, "no such file", "run the split first")
    with path.open(encoding="utf-8") as f:
        try:
            found = [Problem.model_validate(json.loads(line)) for line in f if line.strip()]
        except ValueError as error:
            why = explain(error) if isinstance(error, ValidationError) else error
            reason = " ".join(f"not a file of problems ({why})".split())
            raise InputError("problems", path, reason, "run the split again") from error
    twice = [p for p, n in Counter(p.problem_id for p in found).items() if n > 1]
    if twice:
        raise InputError("problems", path, f"has {twice[0]} more than once", "make it again by the split")
    return found


def write_problems(path: Path, problems: Sequence[Problem]) -> None:
    """Write problems one a line; inputs are kept as stored, infinities included."""
    _write_if_changed(path, _jsonl(problems))


def _load_parts(benchmark: str, data_seed: int, mbpp: str | None, mbpp_plus: str | None, gsm8k: str | None) -> _Parts:
    if benchmark == "mbpp":
        return _load_mbpp(load_mbpp(mbpp), load_mbpp_plus(mbpp_plus))
    if benchmark == "gsm8k":
        return _load_gsm8k(*load_gsm8k(gsm8k))
    if benchmark == "toy":
        made = generate(data_seed)
        return _load_generated("toy", "toy_plus", data_seed, made.train, made.held_out)
    if benchmark == "sums":
        found = sums.generate(data_seed)
        return _load_generated("sums", "sums", data_seed, found.train, found.held_out)
    raise InputError("benchmark", benchmark, "unknown training benchmark", "use mbpp, toy, gsm8k or sums")


def _split(mbpp: Loaded, plus: Loaded) -> Split:
    sources = {n: Source(sha256=s.sha256, rows=len(s.problems)) for n, s in (("mbpp", mbpp), ("mbpp_plus", plus))}
    return split_mbpp(mbpp.problems, plus.problems, sources)


def _load_mbpp(mbpp: Loaded, plus: Loaded) -> _Parts:
    split = _split(mbpp, plus)
    by_number = {p.number: p for p in mbpp.problems}
    train, plus_originals, test = (
        tuple(by_number[i] for i in ids) for ids in (split.ids.train, split.ids.plus, split.ids.test)
    )
    return _Parts(
        train=train,
        benchmarks={"mbpp_plus": plus.problems, "mbpp_test276": test},
        split=split,
        contamination=find_contamination(train, {"mbpp_plus": plus_originals, "mbpp_test276": test}),
        revisions={"mbpp": mbpp.revision, "mbpp_plus": plus.revision},
    )


def _load_gsm8k(everything: Loaded, test: Loaded) -> _Parts:
    train = everything.problems[:NUM_TRAIN]
    ids = Ids(train=tuple(p.number for p in train), plus=(), test=tuple(p.number for p in test.problems))
    sources = {
        f"gsm8k_{name}": Source(sha256=part.sha256, rows=len(part.problems))
        for name, part in (("train", everything), ("test", test))
    }
    return _Parts(
        train=train,
        benchmarks={"gsm8k": test.problems},
        split=build_split(ids, num_canonical_test=len(test.problems), sources=sources),
        contamination=find_contamination(train, {"gsm8k": test.problems}),
        revisions={"gsm8k_train": everything.revision, "gsm8k_test": test.revision},
    )


def _load_generated(
    name: str, scored: str, data_seed: int, train: tuple[Problem, ...], held_out: tuple[Problem, ...]
) -> _Parts:
    ids = Ids(train=tuple(p.number for p in train), plus=tuple(p.number for p in held_out), test=())
    content = hashlib.sha256(_jsonl((*train, *held_out)).encode()).hexdigest()
    sources = {name: Source(sha256=content, rows=len(train) + len(held_out))}
    return _Parts(
        train=train,
        benchmarks={scored: held_out},
        split=build_split(ids, num_canonical_test=0, sources=sources),
        contamination=find_contamination(train, {scored: held_out}, drawn=True),
        revisions={name: f"seed {data_seed} sha256:{content}"},
    )


def _jsonl(problems: Sequence[Problem]) -> str:
    # Infinities of 404's inputs rule out strict JSON; Python reads them back.
    return "".join(json.dumps(p.model_dump(), ensure_ascii=False) + "\n" for p in problems)


def _write_if_changed(path: Path, text: str) -> None:
    if not (path.is_file() and path.read_text(encoding="utf-8") == text):
        write_text(path, text)
