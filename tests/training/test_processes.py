"""Two processes train the cell that one trains: the same data, completions and figures; they stop and fail as one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from accelerate.commands.config.config_args import ClusterConfig
from safetensors.torch import load_file

from evaluation.errors import InputError, MachineError
from evaluation.files import write_json
from evaluation.manifests import MANIFEST, is_complete
from flows.experiments import EXPERIMENTS
from training.config import grpo_config
from training.folder import RunFolder, Runtime
from training.grpo import Grpo
from training.launch import accelerate_config, as_one, check_devices
from training.processes import Processes
from training.run import main, read_folder
from training.started import newest_resume

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
ARM = "hardcd_lam0p1"
TWO = {"num_processes": 2, "micro_batch": 4, "resume_every": 1}
STOCK = {"bucket": False, "drop_zero": False, "lean_head": False}
LORA = {"arm": ARM, "lora_rank": 4, "lr": 5e-3, "steps": 4}
STALE = {"arm": "center_stale4", "steps": 4, "lr": 3e-3}
STALE["grpo"] = Grpo(
    prompts_per_step=4,
    rollouts_per_prompt=4,
    max_new_tokens=48,
    compute_dtype="float32",
    importance="tis2",
    scale_rewards="none",
)
BURSTING = Grpo(prompts_per_step=4, rollouts_per_prompt=4, max_new_tokens=48, compute_dtype="float32", weight_decay=1e7)
END_S = 240
Make = Callable[..., RunFolder]


def start(*argv: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, argv)],
        cwd=ROOT,
        env=ENV,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def launch(folder: RunFolder) -> "subprocess.Popen[str]":
    return start("training.launch", folder.root)


def finish(launcher: "subprocess.Popen[str]") -> str:
    try:
        return launcher.communicate(timeout=END_S)[1]
    finally:
        launcher.kill()


def children(parent: int) -> list[int]:
    """Return the living children of a process, by age."""
    listed = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(p) for p in listed.read_text().split()] if listed.exists() else []


def wait_until(seen: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + END_S
    while not seen():
        assert time.monotonic() < end, what
        time.sleep(0.002)


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def steps(folder: RunFolder) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in folder.steps_jsonl.read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def rollouts(folder: RunFolder) -> dict[str, pd.DataFrame]:
    return {p.name: pd.read_parquet(p) for p in sorted(folder.rollouts.glob("*.parquet"))}


def weights(folder: RunFolder, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder.checkpoint(step) / "model.safetensors")


def assert_same(mine: RunFolder, theirs: RunFolder) -> None:
    """Both sampled the same and learnt the same, to float rounding."""
    ours, others = steps(mine), steps(theirs)
    assert len(ours) == len(others)
    assert any(row["grad_norm"] > 0 for row in others)
    for a, b in zip(ours, others, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert [a[k] for k in ("reward", "mean_tokens")] == [b[k] for k in ("reward", "mean_tokens")]
        assert a.get("sampler") == (b.get("sampler") and pytest.approx(b["sampler"], rel=1e-3, abs=1e-5))
    last = max(theirs.checkpoints())
    before, found, expected = weights(theirs, 2), weights(mine, last), weights(theirs, last)
    moved = sum(float((before[k] - v).square().sum()) for k, v in expected.items())
    apart = sum(float((found[k] - v).square().sum()) for k, v in expected.items())
    assert apart < 1e-6 * moved  # by their norms: where a gradient is all but 0, AdamW makes much of its rounding
    for name, table in rollouts(mine).items():
        assert table["token_ids"].map(list).tolist() == rollouts(theirs)[name]["token_ids"].map(list).tolist()


def unfinished(folder: RunFolder, root: Path, **runtime: Any) -> RunFolder:
    """Return a copy that was killed in the middle of its last epoch: after step 5 of 6."""
    copy = RunFolder(Path(shutil.copytree(folder.root, root)))
    for path in (copy.resume(6), copy.checkpoint(6)):
        shutil.rmtree(path)
    for path in (copy.result_json, copy.logs / MANIFEST, copy.rollouts / MANIFEST):
        path.unlink()
    write_json(copy.runtime_json, read_folder(copy)[1].replace(**runtime))
    assert newest_resume(copy) == 5
    return copy


@pytest.fixture(scope="module")
def one(make_run: Make, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunFolder]:
    """The cell, trained by this process alone: 6 steps, 2 an epoch, with replay."""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    threads = torch.get_num_threads()
    folder = make_run(tmp_path_factory.mktemp("one") / "run", arm=ARM, runtime={"resume_every": 1})
    assert main([str(folder.root)]) == 0
    yield folder
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_num_threads(threads)


EACH = """
import sys
from pathlib import Path
from training.folder import RunFolder
from training.processes import Processes
from training.run import train

leave, Processes.leave = Processes.leave, lambda self: None
for root in sys.argv[1:]:
    train(RunFolder(Path(root)))
leave(Processes(2))
"""


@pytest.fixture(scope="module")
def pairs(make_run: Make, one: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    """Cells trained by two, one after the other in the same two processes: starting them is what costs time."""
    root = tmp_path_factory.mktemp("pairs")
    made = {
        "two": make_run(root / "two", arm=ARM, runtime=TWO),
        "plain": make_run(root / "plain", steps=4, runtime=TWO | STOCK),
        "buckets": make_run(root / "buckets", steps=4, runtime=TWO | {"drop_zero": False}),
        "lora": make_run(root / "lora", runtime=TWO, **LORA),
        "stale": make_run(root / "stale", runtime=TWO, **STALE),
        "taken over": unfinished(one, root / "over", **TWO),
        "diverged": make_run(root / "diverged", grpo=BURSTING, lr=0.9, runtime=TWO),
    }
    script, config = root / "each.py", root / "accelerate.yaml"
    script.write_text(EACH)
    config.write_text(accelerate_config(*read_folder(made["two"])))
    launcher = start(
        "accelerate.commands.launch", "--config_file", config, script, *(folder.root for folder in made.values())
    )
    said = finish(launcher)
    assert launcher.returncode == 0, said[-3000:]
    return made


@pytest.fixture(scope="module")
def two(pairs: dict[str, RunFolder]) -> RunFolder:
    """The cell of `one`, trained by two."""
    return pairs["two"]


def test_two_sample_what_one_samples_in_the_same_order(one: RunFolder, two: RunFolder) -> None:
    mine, theirs = rollouts(two), rollouts(one)
    assert list(mine) == list(theirs)
    assert len(mine) == 6
    for name, table in mine.items():
        exact = [c for c in table.columns if c not in {"logprobs", "advantage"}]
        pd.testing.assert_frame_equal(table[exact], theirs[name][exact])
        assert table["advantage"].tolist() == pytest.approx(theirs[name]["advantage"].tolist(), abs=1e-6)
        for a, b in zip(table["logprobs"], theirs[name]["logprobs"], strict=True):
            assert a.tolist() == pytest.approx(b.tolist(), abs=1e-4)


def test_two_log_the_figures_of_one(one: RunFolder, two: RunFolder) -> None:
    """Replay's mean is over the tokens of all drawn completions; an odd number of them leaves one process idle."""
    mine, theirs = steps(two), steps(one)
    drawn = [row["replay"]["drawn"] for row in theirs]
    assert sum(drawn) > 8
    for a, b in zip(mine, theirs, strict=True):
        for k, expected in b["replay"].items():
            near = expected  # counts, and what nothing can be said of
            if k == "nll" and expected is not None:
                near = pytest.approx(expected, abs=1e-5)
            elif isinstance(expected, float):
                near = pytest.approx(expected, rel=1e-4, abs=1e-5)
            assert a["replay"][k] == near
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert a["entropy"] == pytest.approx(b["entropy"], rel=1e-4)
        exact = ("global_step", "reward", "mean_tokens", "truncated_fraction")
        assert [a[k] for k in exact] == [b[k] for k in exact]


def test_two_end_with_the_weights_of_one_and_every_file_once(one: RunFolder, two: RunFolder) -> None:
    assert two.checkpoints() == one.checkpoints() == [2, 4, 6]
    assert_same(two, one)
    for part in (two.logs, two.rollouts, *(two.checkpoint(s) for s in two.checkpoints())):
        assert is_complete(part)
    assert two.resumes() == one.resumes()
    assert {p.name for p in two.resume(6).glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}


@pytest.mark.parametrize(
    ("name", "cell", "runtime"),
    [("plain", {"steps": 4}, STOCK), ("buckets", {"steps": 4}, STOCK), ("lora", LORA, {}), ("stale", STALE, {})],
)
def test_two_train_as_one_does(
    make_run: Make, pairs: dict[str, RunFolder], tmp_path: Path, name: str, cell: Any, runtime: Any
) -> None:
    """`pairs` puts this process's settings back at the end. Two with buckets equal one that is stock TRL."""
    alone = make_run(tmp_path / "alone", runtime=runtime, **cell)
    assert main([str(alone.root)]) == 0
    assert_same(pairs[name], alone)


def test_a_cell_may_go_on_in_another_number_of_processes(
    one: RunFolder, two: RunFolder, pairs: dict[str, RunFolder], tmp_path: Path
) -> None:
    """In the middle of an epoch, with a filled replay buffer."""
    assert_same(pairs["taken over"], one)
    left = unfinished(two, tmp_path / "left", num_processes=1)
    assert main([str(left.root)]) == 0
    assert_same(left, one)


@pytest.mark.campaign
def test_killed_and_stopped_two_go_on_to_the_same_bytes(make_run: Make, two: RunFolder, tmp_path: Path) -> None:
    """One process is killed in the middle of an epoch, then the launcher gets SIGTERM; nobody stays behind."""
    folder = make_run(tmp_path / "run", arm=ARM, runtime=TWO)
    launcher = launch(folder)
    wait_until(lambda: folder.rollout(4).exists() or launcher.poll() is not None, "no fourth step")
    workers = children(launcher.pid)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    said = finish(launcher)
    assert launcher.returncode == 128 + signal.SIGKILL, said[-3000:]
    assert said.splitlines()[-1] == "error: process=1: ended by SIGKILL; run the same command again"
    wait_until(lambda: not any(map(alive, workers)), "a process outlived the launcher")
    assert 3 in folder.resumes()
    assert not folder.result_json.exists()

    launcher = launch(folder)
    wait_until(lambda: folder.rollout(5).exists() or launcher.poll() is not None, "no fifth step")
    workers = children(launcher.pid)
    os.killpg(launcher.pid, signal.SIGTERM)
    said = finish(launcher)
    assert launcher.returncode == 75, said[-3000:]
    assert said.splitlines()[-1] == "error: signal=TERM: stopped; run the same command again"
    assert not any(map(alive, workers))
    assert max(folder.resumes()) >= 5
    assert steps(folder) == steps(two)[: max(folder.resumes())]

    launcher = launch(folder)
    said = finish(launcher)
    assert launcher.returncode == 0, said[-3000:]
    assert "going on from step" in said
    assert steps(folder) == steps(two)
    for name, table in rollouts(folder).items():
        pd.testing.assert_frame_equal(table, rollouts(two)[name])
    for step in (2, 4, 6):
        ours, theirs = folder.checkpoint(step), two.checkpoint(step)
        assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()


def test_two_diverge_together_and_that_is_a_result(pairs: dict[str, RunFolder]) -> None:
    """The weights grow ten-millionfold a step: usable at the checkpoint of step 2, past float32 before step 7."""
    folder = pairs["diverged"]
    result = json.loads(folder.result_json.read_text())
    onset = result["onset_step"]  # which step it is may be rounding's choice
    assert 3 <= onset <= 6
    assert (result["end"], result["last_step"]) == ("diverged", onset)
    assert [row["global_step"] for row in steps(folder)] == list(range(1, onset + 1))
    assert folder.checkpoints() == [s for s in (2, 4) if s < onset]
    assert is_complete(folder.logs)


MEETING = """
import errno, json, sys
import torch.distributed as dist
from evaluation.errors import InputError
from training.processes import Processes
from training.reward import HarnessFailed

index = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=index, world_size=2)
us, heard = Processes(2, index), []

def fails(kind, *where):
    def action():
        if index in where:
            raise kind
        return index
    try:
        heard.append(us.together(action))
    except Exception as e:
        heard.append([type(e).__name__, str(e), getattr(e, "exit_code", None)])

heard.append(us.gather([index, 10 * index]))
heard.append([us.any(index == 1), us.any(False), us.total(0.1 + index), us.mean(float(index))])
heard.append([us.share("abcde"), us.share("a")])
fails(ValueError("nobody"))
fails(HarnessFailed("judge=x: no verdict; again"), 1)
fails(InputError("lr", 7, "too much", "use less"), 1)
fails(ValueError("both"), 0, 1)
fails(OSError(errno.ENOSPC, "No space left on device", "/out"), 0)
us.on_main(lambda: heard.append("main"))
print(json.dumps(heard))
"""


def test_what_one_meets_with_all_meet_with(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", MEETING]
    both = [
        subprocess.Popen([*argv, str(i), str(tmp_path / "meet")], cwd=ROOT, env=ENV, stdout=subprocess.PIPE, text=True)
        for i in (0, 1)
    ]
    first, second = (json.loads(p.communicate(timeout=END_S)[0]) for p in both)
    assert first[0] == second[0] == [0, 0, 1, 10]
    assert first[1] == second[1] == [True, False, 0.1 + 1.1, 0.5]
    assert first[2] == [[["a", "c", "e"], True], [["a"], True]]
    assert second[2] == [[["b", "d"], True], [["a"], False]]
    assert (first[3], second[3]) == (0, 1)
    assert first[4] == second[4] == ["HarnessFailed", "judge=x: no verdict; again", 1]
    assert first[5] == second[5] == ["InputError", "lr=7: too much; use less", 2]
    assert first[6] == second[6] == ["ValueError", "both", None]
    assert first[7][0] == "OSError"
    assert second[7] == [
        "MachineError",
        "path=/out: No space left on device; free space, or choose another place",
        3,
    ]
    assert first[8:] == ["main"]
    assert second[8:] == []


def test_alone_nobody_is_waited_for() -> None:
    alone = Processes()
    assert alone.main
    assert alone.gather("ab") == ["a", "b"]
    assert (alone.any(False), alone.total(0.1), alone.mean(0.1)) == (False, 0.1, 0.1)
    assert alone.share([1, 2, 3]) == ([1, 2, 3], True)
    with pytest.raises(KeyError):
        alone.together(lambda: {}["x"])


@pytest.mark.parametrize(("processes", "micro", "got"), [(1, 8, 8), (2, 8, 8), (4, 128, 128), (8, 48, 32), (64, 99, 8)])
def test_the_step_is_dealt_out_exactly(tmp_path: Path, processes: int, micro: int, got: int) -> None:
    cell = EXPERIMENTS["full"].cells()[0]
    runtime = Runtime(model_path="m", problems_path="p", micro_batch=micro, num_processes=processes)
    args = grpo_config(cell, runtime, tmp_path)
    assert args.per_device_train_batch_size == got
    assert got * args.gradient_accumulation_steps * processes == 512


def test_a_step_that_cannot_be_dealt_out_is_refused_before_anything_starts(
    make_run: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "run", runtime={"num_processes": 3})
    line = "num_processes=3: does not divide the 4 prompts of a step; use 1, 2"
    with pytest.raises(InputError) as caught:
        read_folder(folder)
    assert str(caught.value) == line
    folder = make_run(tmp_path / "run", runtime=TWO)
    before = signal.getsignal(signal.SIGTERM)
    assert main([str(folder.root)]) == 2
    signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: num_processes=2: but this is a process of its own; start it with `python -m training.launch FOLDER`"
    )


def test_accelerate_reads_the_configuration(make_run: Make, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", runtime=TWO)
    cell_file, runtime = read_folder(folder)
    folder.accelerate_yaml.write_text(accelerate_config(cell_file, runtime))
    found = ClusterConfig.from_yaml_file(str(folder.accelerate_yaml))
    assert (found.num_processes, found.use_cpu, found.mixed_precision) == (2, True, "no")
    full = cell_file.model_copy(update={"cell": EXPERIMENTS["full"].cells()[0]})
    folder.accelerate_yaml.write_text(accelerate_config(full, runtime.replace(device="cuda", num_processes=4)))
    found = ClusterConfig.from_yaml_file(str(folder.accelerate_yaml))
    assert (found.num_processes, found.use_cpu, found.mixed_precision) == (4, False, "bf16")


def test_two_processes_never_share_a_gpu() -> None:
    """This test's machine may have some: never as many as that."""
    runtime = Runtime(model_path="m", problems_path="p", device="cuda", num_processes=64)
    with pytest.raises(MachineError, match=r"num_processes=64: [0-9]+ GPUs are visible here; train on a host with"):
        check_devices(runtime)
    check_devices(runtime.replace(device="cpu"))


def failure(rank: int, code: int, line: str | None = None) -> SimpleNamespace:
    message = {"message": f"Told: {line}"} if line else "no file"
    return SimpleNamespace(local_rank=rank, exitcode=code, message=message, signal_name=lambda: "SIGKILL")


@pytest.mark.parametrize(
    ("failures", "code", "line"),
    [
        ([(0, 70, "internal=RuntimeError: closed"), (1, 2, "lr=7: no; use 6")], 2, "lr=7: no; use 6"),
        ([(0, 70, "internal=RuntimeError: closed"), (1, -9, None)], 137, "process=1: ended by SIGKILL"),
        ([(0, -15, None), (1, -9, None)], 137, "process=1: ended by SIGKILL"),
        ([(0, -6, None), (1, 75, "signal=TERM: stopped")], 75, "signal=TERM: stopped"),
        ([(0, -15, None), (1, 1, "judge=x: no verdict")], 1, "judge=x: no verdict"),
        ([(0, 75, "signal=TERM: stopped"), (1, 70, "internal=RuntimeError: closed")], 75, "signal=TERM: stopped"),
        ([(1, 70, None)], 70, "process=1: failed; see its output above"),
    ],
)
def test_the_failure_that_explains_the_others_is_told(failures: list[Any], code: int, line: str) -> None:
    found = as_one([failure(*f) for f in failures])
    assert found.exit_code == code
    assert str(found).startswith(line)
