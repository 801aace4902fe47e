"""Both halves of an evaluation, as real children on the small model: they overlap, and either may die alone."""

import contextlib
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import pids_of

from evaluation.errors import AblationError, MachineError
from evaluation.files import read_jsonl
from evaluation.judging import Judger
from evaluation.manifests import Provenance, Revisions, is_complete
from evaluation.problems import prepare
from evaluation.request import DRAWN, Request, Unit
from flows.experiments import EXPERIMENTS
from tasks.evaluator import Evaluator
from tasks.models import locate_model, prompt_of
from tasks.settings import Settings
from training.cell import MODELS

EXPERIMENT = EXPERIMENTS["micro"]
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def request_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Request]:
    """`request_of(folder, steps)`: so many checkpoints of the same model, each under a protocol of its own seed."""
    root = tmp_path_factory.mktemp("data")
    (protocol,) = EXPERIMENT.protocols
    prepared = prepare(EXPERIMENT.benchmark, EXPERIMENT.data_seed, [protocol.benchmark], root, None, None)
    model = MODELS[EXPERIMENT.model]
    files = locate_model(model, root)
    prompt = prompt_of(model, files, EXPERIMENT.benchmark)
    revisions = Revisions(model=files.identity, datasets={})
    provenance = Provenance(revisions=revisions, split_sha256="0" * 64)

    def make(folder: Path, steps: int = 1) -> Request:
        units = [
            Unit(
                label=f"toy/global_step_{step}", cell=None, global_step=step, model_path=files.path,
                protocol=protocol.replace(seed=step), provenance=provenance, out=str(folder / f"step_{step}"),
            )
            for step in range(steps)
        ]  # fmt: skip
        return Request(
            prompt=prompt, problems=prepared.benchmarks, units=tuple(units), cache=str(folder / "cache"),
            closed=False, batch_size=4,
        )  # fmt: skip

    return make


@pytest.fixture(scope="module")
def undisturbed(request_of: Callable[..., Request], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    request = request_of(folder, 2)
    with Evaluator(folder / "evaluation", request.replace(units=())) as evaluator:
        evaluator.score(list(request.units))
    return list(map(found, request.units))


def found(unit: Unit) -> dict[str, Any]:
    out = Path(unit.out)
    assert is_complete(out) and not (out / DRAWN).exists()
    return {
        "samples": read_jsonl(out / "samples.jsonl"),
        "verdicts": [{k: v for k, v in r.items() if k != "seconds"} for r in read_jsonl(out / "verdicts.jsonl")],
        "score": json.loads((out / "score.json").read_text()),
    }


def wait_for(look: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if seen := look():
            return seen
        time.sleep(0.005)
    raise AssertionError(f"no {what} in {PATIENCE_S:g} s")


def child(part: str, folder: Path) -> int | None:
    """The process of a half, once it is there."""
    return next(iter(pids_of(part, folder)), None)


@contextlib.contextmanager
def scoring(evaluator: Evaluator, units: tuple[Unit, ...]) -> Iterator[list[BaseException]]:
    """Score in a thread each, as the flow's tasks do; at the end all have ended, with the errors in the list."""
    errors: list[BaseException] = []

    def score(unit: Unit) -> None:
        try:
            evaluator.score([unit])
        except AblationError as e:
            errors.append(e)

    with evaluator:
        threads = [threading.Thread(target=score, args=(u,)) for u in units]
        for t in threads:
            t.start()
        yield errors
        for t in threads:
            t.join()


def gpu_is_free(locks: Path) -> bool:
    with (locks / "gpu0.lock").open("a") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_half_a_file_is_judged_before_the_rest_is_drawn(
    request_of: Callable[..., Request], undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    request = request_of(tmp_path)
    (unit,) = request.units
    out = Path(unit.out)
    out.mkdir()
    lines = [json.dumps(r).encode() + b"\n" for r in undisturbed[0]["samples"]]
    judger = Judger()
    try:
        assert not judger.step(request, unit)
        (out / "samples.jsonl").write_bytes(b"".join(lines[:9]) + lines[9][:20])
        assert judger.step(request, unit)
        assert [v.model_dump()["base"] for v in judger.parts[unit.out].verdicts.values()] == [
            v["base"] for v in undisturbed[0]["verdicts"][:9]
        ]
        assert not judger.step(request, unit)
        with (out / "samples.jsonl").open("ab") as f:
            f.write(lines[9][20:] + b"".join(lines[10:]))
        assert judger.step(request, unit)
    finally:
        judger.close()
    assert found(unit) == undisturbed[0]


def test_the_next_checkpoint_is_drawn_while_one_is_judged_and_then_the_gpu_is_free(
    request_of: Callable[..., Request],
    undisturbed: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locks = tmp_path / "locks"
    monkeypatch.setattr("tasks.launch.settings", lambda: Settings(gpus=("0",), locks=locks))
    request = request_of(tmp_path, 2)
    folder = tmp_path / "evaluation"
    evaluator = Evaluator(folder, request.replace(units=(), linger_s=0.0), needs_gpu=True)
    with scoring(evaluator, request.units) as errors:
        judge = wait_for(lambda: child("judge", folder), "judge")
        os.kill(judge, signal.SIGSTOP)
        wait_for(lambda: child("draw", folder), "drawer")
        assert not gpu_is_free(locks)
        wait_for(lambda: all((Path(u.out) / DRAWN).exists() for u in request.units), "samples of both")
        assert not any(is_complete(Path(u.out)) for u in request.units)
        wait_for(lambda: gpu_is_free(locks), "free GPU")
        os.kill(judge, signal.SIGCONT)
    assert errors == []
    assert list(map(found, request.units)) == undisturbed


def test_without_a_gpu_what_is_drawn_is_judged_and_the_rest_is_refused(
    request_of: Callable[..., Request],
    undisturbed: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tasks.launch.settings", lambda: Settings(gpus=(), locks=tmp_path / "locks"))
    request = request_of(tmp_path, 2)
    drawn, other = request.units
    out = Path(drawn.out)
    out.mkdir()
    (out / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in undisturbed[0]["samples"]))
    (out / DRAWN).touch()
    with Evaluator(tmp_path / "evaluation", request.replace(units=()), needs_gpu=True) as evaluator:
        evaluator.score([drawn])
        assert not (tmp_path / "evaluation" / "draw.log").exists()
        with pytest.raises(MachineError, match="no GPU"):
            evaluator.score([other])
    assert found(drawn) == undisturbed[0]


def test_a_mark_of_drawn_samples_that_are_not_there_heals(
    request_of: Callable[..., Request], undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    request = request_of(tmp_path)
    out = Path(request.units[0].out)
    out.mkdir()
    (out / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in undisturbed[0]["samples"][:5]))
    (out / DRAWN).touch()
    with Evaluator(tmp_path / "evaluation", request.replace(units=())) as evaluator:
        evaluator.score(list(request.units))
    assert found(request.units[0]) == undisturbed[0]


@pytest.mark.parametrize("victim", ["draw", "judge"])
def test_either_half_killed_alone_changes_nothing(
    request_of: Callable[..., Request], undisturbed: list[dict[str, Any]], tmp_path: Path, victim: str
) -> None:
    request = request_of(tmp_path, 2)
    folder = tmp_path / "evaluation"
    evaluator = Evaluator(folder, request.replace(units=()))
    with scoring(evaluator, request.units) as errors:
        pid = wait_for(lambda: child(victim, folder), victim)
        wait_for(lambda: list(tmp_path.glob("step_*/samples.jsonl")), "samples")
        assert not (Path(request.units[1].out) / DRAWN).exists()
        os.kill(pid, signal.SIGKILL)
    assert errors == []
    assert list(map(found, request.units)) == undisturbed


def test_a_half_that_dies_again_and_again_is_given_up_and_the_other_one_ends(
    request_of: Callable[..., Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(tmp_path)
    folder = tmp_path / "evaluation"
    evaluator = Evaluator(folder, request.replace(units=()))
    with scoring(evaluator, request.units) as errors:
        while not errors:
            if pid := child("draw", folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
    assert [type(e).__name__ for e in errors] == ["ChildDied"]
    assert child("judge", folder) is None
