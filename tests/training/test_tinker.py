"""A cell trained through the unmodified Tinker SDK against a small service of ours, and against the local trainer."""

import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("tinker")

from peft import set_peft_model_state_dict
from tinker_server import TinkerServer
from trl.trainer.utils import RepeatSampler

from evaluation.errors import InputError, Stopped
from evaluation.judge import Judge
from evaluation.manifests import is_complete
from evaluation.problems import read_problems
from training.cell import MODELS, Cell
from training.folder import RunFolder
from training.grpo import Grpo
from training.order import EpochSampler, step_order
from training.run import main, read_folder
from training.tinker_run import ServiceCell
from training.tinker_service import Service, Update

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "training" / "toy_model"
PG = Grpo(
    prompts_per_step=4,
    rollouts_per_prompt=4,
    max_new_tokens=48,
    compute_dtype="float32",
    importance="tis2",
    scale_rewards="none",
    adam_eps=1e-12,
    weight_decay=0.0,
)
CELL = {"lora_rank": 4, "grpo": PG, "lr": 5e-3, "steps": 4, "backend": "tinker"}
Make = Callable[..., RunFolder]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TinkerServer]:
    cell = Cell(model="toy", benchmark="toy", arm="plain", stride=2, **CELL)
    with TinkerServer(MODEL, cell, MODELS["toy"].source) as served:
        served.scratch = str(tmp_path)
        for name, value in environment(served).items():
            monkeypatch.setenv(name, value)
        yield served


def environment(server: TinkerServer) -> dict[str, str]:
    return {
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": "tml-test",
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def never() -> None:
    return None


@pytest.fixture(scope="module")
def judge(make_run: Make, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    _, runtime = read_folder(make_run(tmp_path_factory.mktemp("judged") / "run"))
    with Judge(read_problems(Path(runtime.problems_path)), suites="reward", workers=1) as judge:
        yield judge


def local_batch(trainer: Any, updates: list[Update], advantages: list[float]) -> dict[str, torch.Tensor]:
    """Return the same completions as TRL hands them to the loss."""
    prompts = [u.prompt_ids for u in updates]
    tokens = [u.completion.token_ids for u in updates]
    width, length = max(map(len, prompts)), max(map(len, tokens))
    batch: dict[str, Any] = {
        "prompt_ids": torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts]),
        "prompt_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
        "completion_ids": torch.tensor([t + [0] * (length - len(t)) for t in tokens]),
        "completion_mask": torch.tensor([[1] * len(t) + [0] * (length - len(t)) for t in tokens]),
        "advantages": torch.tensor(advantages),
        "num_items_in_batch": torch.tensor(sum(map(len, tokens))),
    }
    return batch | trainer.policy_gradient.tensors([u.completion for u in updates], length, torch.device("cpu"))


@pytest.mark.parametrize("arm", ["plain", "center"])
def test_three_steps_have_the_local_trainer_s_loss_and_gradient(
    make_run: Make, make_trainer: Callable[..., Any], judge: Judge, server: TinkerServer, tmp_path: Path, arm: str
) -> None:
    cell_file, runtime = read_folder(make_run(tmp_path / "far", arm=arm, **CELL))
    trainer = make_trainer(make_run(tmp_path / "near", arm=arm, **{**CELL, "backend": "local"}), judge)
    far = ServiceCell(
        RunFolder(tmp_path / "far"), cell_file, runtime, read_problems(Path(runtime.problems_path)), judge
    )
    with Service(cell_file.cell, 60, never) as service, contextlib.closing(far.rewards):
        far.service = service
        service.begin(None)
        [run] = server.runs.values()
        for step in range(3):
            set_peft_model_state_dict(trainer.model, run.adapters())
            prompts = [trainer.prompt_tokens[p.problem_id] for p in far.problems[:4]]
            drawn = service.draw(PG, cell_file.prompt.stop_ids, prompts, [11 * step + i for i in range(4)])
            updates = [Update(p, c) for p, group in zip(prompts, drawn, strict=True) for c in group]
            advantages = [[0.75, -0.25, 0.0, -0.5][(i + i // 4) % 4] for i in range(16)]
            loss, norm = far.learn(updates, advantages)
            trainer.model.zero_grad()
            expected = trainer._compute_loss(trainer.model, local_batch(trainer, updates, advantages))
            expected.backward()
            mine = {n: p.grad for n, p in trainer.model.named_parameters() if p.requires_grad and p.grad is not None}
            theirs = run.gradients[step]
            assert mine.keys() == theirs.keys() and len(mine) > 20
            apart = sum(float((mine[n] - g).square().sum()) for n, g in theirs.items()) ** 0.5
            size = sum(float(g.square().sum()) for g in mine.values()) ** 0.5
            assert loss == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
            assert norm == pytest.approx(size, rel=1e-4) and size > 0
            assert apart <= 1e-4 * size
        assert all((c.head is not None) == (arm == "center") for group in drawn for c in group)
    assert [*server.ends.values()] == ["success"]


def start(folder: RunFolder, server: TinkerServer) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "training.run", str(folder.root)],
        cwd=ROOT,
        env={**os.environ, **environment(server)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def rows(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.steps_jsonl.read_text().splitlines()]


def test_a_killed_cell_goes_on_from_the_service_s_state_and_ends_whole(
    make_run: Make, server: TinkerServer, tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "run", arm="center", **CELL)
    child, end = start(folder, server), time.monotonic() + 200
    while not folder.rollout(3).exists():
        assert child.poll() is None, child.communicate()[1][-3000:]
        assert time.monotonic() < end
        time.sleep(0.002)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    assert folder.resumes() == folder.checkpoints() == [2]
    before = rows(folder)[:2]
    server.faults += [("/optim_step", 503), ("/asample", 429)]  # the SDK tries again
    child = start(folder, server)
    assert child.wait(200) == 0, child.communicate()[1][-3000:]
    found = rows(folder)
    assert [r["global_step"] for r in found] == [1, 2, 3, 4]
    assert found[:2] == before
    assert sum(r["grad_norm"] > 0 for r in found) >= 2
    assert all(0.9 < r["sampler"]["head_mass"] < 1.001 for r in found)
    assert all(r["sampler"]["logprob_gap"] > 1e-5 for r in found if r["varied_groups"])
    assert json.loads(folder.result_json.read_text())["end"] == "finished"
    for step in (2, 4):
        assert is_complete(folder.checkpoint(step)) and is_complete(folder.resume(step))
    assert is_complete(folder.logs) and is_complete(folder.rollouts)
    assert not list(folder.root.glob("*.partial"))
    first, second = list(server.runs.values())
    assert [len(first.gradients), len(second.gradients)] == [3, 2] or len(first.gradients) == 2
    published = load_file(folder.checkpoint(4) / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    layer = second.model.get_base_model().model.layers[0].mlp.down_proj
    torch.testing.assert_close(published[name], layer.weight + layer.get_delta_weight("default").detach())
    assert not torch.equal(published[name], load_file(folder.checkpoint(2) / "model.safetensors")[name])


@pytest.fixture
def handlers() -> Iterator[None]:
    """Put back what a cell trained in this process does to signals."""
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_stopped_cell_has_saved_its_last_whole_step_and_goes_on_from_it(
    make_run: Make, judge: Judge, server: TinkerServer, handlers: None, tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "run", arm="plain", **CELL)
    cell_file, runtime = read_folder(folder)
    problems = read_problems(Path(runtime.problems_path))
    stopped = ServiceCell(folder, cell_file, runtime, problems, judge)
    log = stopped._log

    def log_and_ask_to_stop(*args: Any) -> None:
        log(*args)
        os.kill(os.getpid(), signal.SIGTERM)

    stopped._log = log_and_ask_to_stop
    with pytest.raises(Stopped, match="signal=TERM: stopped after step 1 of 4"):
        stopped.train(None)
    assert folder.resumes() == [1] and folder.checkpoints() == []
    first = rows(folder)
    ServiceCell(folder, cell_file, runtime, problems, judge).train(1)
    assert [r["global_step"] for r in rows(folder)] == [1, 2, 3, 4] and rows(folder)[:1] == first
    assert folder.checkpoints() == [2, 4]
    moments = [s["moments"][0]["step"].item() for s in server.states.values()]
    assert moments == [1, 2, 4]  # the optimizer went on, too


def test_a_loss_that_is_not_finite_ends_the_cell_as_diverged(
    make_run: Make, server: TinkerServer, handlers: None, tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "run", arm="plain", **CELL)
    stock = server.save_weights_for_sampler

    def spoil(data: Any) -> Any:
        """Let the learner's weights be lost after the sampler has taken its copy."""
        done = stock(data)
        with torch.no_grad():
            server.runs[data["model_id"]].parameters[0].fill_(float("nan"))
        return done

    server.save_weights_for_sampler = spoil
    assert main([str(folder.root)]) == 0
    found = json.loads(folder.result_json.read_text())
    assert (found["end"], found["onset_step"]) == ("diverged", 1)
    assert [(r["loss"], r["grad_norm"]) for r in rows(folder)] == [("NaN", None)] and folder.checkpoints() == []
    assert not [r for r in server.requests if r.endswith("/optim_step")]


def run_to(folder: RunFolder, server: TinkerServer) -> tuple[int, str]:
    child = start(folder, server)
    code = child.wait(100)
    return code, child.communicate()[1]


@pytest.mark.parametrize(
    ("there", "expected", "line"),
    [(True, 3, "error: TINKER_API_KEY="), (False, 75, "error: service=tinker: waited 3 s for a session; run the same")],
)
def test_a_service_that_refuses_the_key_or_is_not_there_ends_with_one_line(
    make_run: Make, server: TinkerServer, tmp_path: Path, there: bool, expected: int, line: str
) -> None:
    folder = make_run(tmp_path / "run", arm="plain", runtime={"service_timeout_s": 60 if there else 3}, **CELL)
    server.faults.append(("/create_session", "always 401"))
    server.url = server.url if there else "http://127.0.0.1:9"
    code, said = run_to(folder, server)
    assert code == expected, said
    assert said.splitlines()[-1].startswith(line) and "Traceback" not in said


def test_what_the_service_does_not_have_is_wrong_input(server: TinkerServer) -> None:
    cell = server.cell.replace(arm="center", terms=center())
    with pytest.raises(InputError, match="asked for a training client"), Service(cell, 60, never) as service:
        service.begin("tinker://nobody/weights/none")
    server.top_k = False
    with pytest.raises(InputError, match="topk_sample_logprobs"), Service(cell, 60, never) as service:
        service.begin(None)
        service.draw(PG, (0,), [[5, 6, 7]], [1])
    assert [*server.ends.values()] == ["errored"] * 2


def center() -> Any:
    from training.arms import ARMS

    return ARMS["center"].terms


def test_a_silent_service_and_a_signal_end_in_time_and_can_go_on(server: TinkerServer) -> None:
    reasons: list[str] = []
    with pytest.raises(Stopped), Service(server.cell, 60, lambda: reasons[0] if reasons else None) as service:
        service.begin(None)
        service.patience_s = 1.0
        server.faults.append(("/asample", 20.0))
        began = time.monotonic()
        with pytest.raises(Stopped, match="waited 1 s for samples; run the same command again"):
            service.draw(PG, (0,), [[5, 6, 7]], [1])
        service.patience_s = 60.0
        server.faults.append(("/asample", 20.0))
        reasons.append("signal=TERM")
        try:
            service.draw(PG, (0,), [[5, 6, 7]], [1])
        finally:
            assert time.monotonic() - began < 15
    assert [*server.ends.values()] == ["interrupted"]


def test_a_session_that_was_ended_is_not_kept_alive(server: TinkerServer) -> None:
    with Service(server.cell, 60, never) as service:
        service.begin(None)
        holder = service.client.holder
        assert not holder._session_heartbeat_task.done()
    assert holder._session_heartbeat_task.done()


def test_the_full_experiment_has_the_sdk_s_own_optimizer_and_rank(server: TinkerServer) -> None:
    """Its document's command names the rate and the rank, and leaves the rest to the SDK."""
    import tinker

    from flows.experiments import SCORE_CENTERING

    grpo, theirs = SCORE_CENTERING.grpo, tinker.AdamParams(learning_rate=1e-4)
    assert (grpo.adam_beta1, grpo.adam_beta2, grpo.adam_eps) == (theirs.beta1, theirs.beta2, theirs.eps)
    assert grpo.weight_decay == theirs.weight_decay == 0 and SCORE_CENTERING.lrs == (theirs.learning_rate,)
    assert theirs.grad_clip_norm == 0 and grpo.max_grad_norm == 1e6  # neither clips
    rank = inspect.signature(tinker.ServiceClient.create_lora_training_client).parameters["rank"].default
    assert rank == SCORE_CENTERING.lora_rank == 32
    with Service(server.cell, 60, never) as service:
        service.begin(None)
        service.optimize()
    assert server.adams == [
        {"learning_rate": 5e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 1.0}
    ]


@pytest.mark.parametrize(
    ("spoilt", "error", "line"),
    [
        ("half", Stopped, r"asked for adapter_model.safetensors: \d+ bytes of \d+ came; run the same"),
        ("cut", InputError, "backend=tinker: the service's export has no adapter_config.json; use another service"),
    ],
)
def test_an_export_that_is_not_whole_is_never_published(
    make_run: Make,
    judge: Judge,
    server: TinkerServer,
    handlers: None,
    tmp_path: Path,
    spoilt: str,
    error: type[Exception],
    line: str,
) -> None:
    folder = make_run(tmp_path / "run", arm="plain", **CELL)
    cell_file, runtime = read_folder(folder)
    problems = read_problems(Path(runtime.problems_path))
    if spoilt == "half":
        server.faults.append(("/adapter_model.safetensors", "half"))
    else:
        urls = server.urls
        server.urls = lambda name: {
            **urls(name),
            "urls": {k: v for k, v in urls(name)["urls"].items() if "config" not in k},
        }
    with pytest.raises(error, match=line):
        ServiceCell(folder, cell_file, runtime, problems, judge).train(None)
    assert folder.resumes() == [2] and folder.checkpoints() == []


def test_a_cell_whose_time_is_over_saves_and_says_so(make_run: Make, server: TinkerServer, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", arm="plain", runtime={"end_by": 1.0}, **CELL)
    code, said = run_to(folder, server)
    told = "error: end_by=reached: stopped after step 0 of 4; with time left, the same command goes on"
    assert code == 75 and said.splitlines()[-1] == told


@pytest.mark.parametrize("seed", [0, 3])
def test_the_order_of_the_problems_is_the_local_trainer_s(seed: int) -> None:
    data = [{"a": i} for i in range(11)]
    stock = RepeatSampler(data, 4, 3, 1, True, seed)
    mine = [step_order(11, 3, seed, step) for step in range(9)]
    for epoch in range(3):
        sampler = EpochSampler(stock.data_source, 4, 3, 1, True, seed)
        sampler.set_epoch(epoch)
        dealt = list(sampler)[::4]
        assert [dealt[i : i + 3] for i in range(0, 9, 3)] == mine[3 * epoch : 3 * epoch + 3]
