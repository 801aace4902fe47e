"""Training that samples with TRL's colocated vLLM, executed on vLLM's CPU build (`make test-vllm`)."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

import torch  # noqa: E402
import vllm.model_executor.layers.utils as layers  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from trl.generation import vllm_generation  # noqa: E402

from evaluation.files import read_jsonl  # noqa: E402
from training.folder import RunFolder  # noqa: E402
from training.grpo import Grpo  # noqa: E402
from training.run import main, read_folder  # noqa: E402

ON_CPU = {"dtype": "float32", "enforce_eager": True, "enable_chunked_prefill": False, "max_num_batched_tokens": 32768}
MODEL = Path(__file__).resolve().parents[2] / "training" / "toy_model"


def keep_unpacked(layer: Any, remove_weight: bool = False) -> None:
    layer.cpu_linear = torch.nn.functional.linear


class CpuEngine(vllm_generation.LLM):
    """TRL's engine with what the CPU build needs: no chunked prefill beside seeds, and weights that can be replaced."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, **ON_CPU})


def train(folder: RunFolder) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "dispatch_cpu_unquantized_gemm", keep_unpacked)
        patch.setattr(vllm_generation, "LLM", CpuEngine)
        assert main([str(folder.root), "--debug"]) == 0


def make_cell(make_run: Callable[..., RunFolder], root: Path) -> RunFolder:
    """A cell of three steps at a rate that moves the weights; replay, like lengths and no idle rows are on."""
    runtime = {"sampler": "vllm", "resume_every": 1}
    return make_run(root, arm="hardcd_lam0p1", steps=3, stride=3, lr=2e-3, runtime=runtime)


@pytest.fixture(scope="module")
def folder(make_run: Callable[..., RunFolder], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = make_cell(make_run, tmp_path_factory.mktemp("vllm") / "run")
    train(folder)
    return folder


@pytest.fixture(scope="module")
def lora(make_run: Callable[..., RunFolder], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The same with adapters; a checkpoint a step shows the weights of each."""
    folder = make_run(
        tmp_path_factory.mktemp("vllm_lora") / "run",
        arm="hardcd_lam0p1",
        steps=3,
        stride=1,
        lr=2e-2,
        lora_rank=8,
        runtime={"sampler": "vllm"},
    )
    train(folder)
    return folder


def test_a_centred_cell_gets_its_head_from_the_engine_and_measures_the_gap(
    make_run: Callable[..., RunFolder], tmp_path: Path
) -> None:
    """TRL's engine allows 20 log-probs a token; the head has 32."""
    pg = Grpo(
        prompts_per_step=4,
        rollouts_per_prompt=4,
        max_new_tokens=48,
        compute_dtype="float32",
        importance="tis2",
        scale_rewards="none",
    )
    folder = make_run(tmp_path / "run", arm="center", grpo=pg, steps=3, stride=3, lr=2e-3, runtime={"sampler": "vllm"})
    train(folder)
    figures = [r["sampler"] for r in read_jsonl(folder.steps_jsonl)]
    gaps = [f["logprob_gap"] for f in figures if f["logprob_gap"] is not None]
    assert gaps and all(0 < gap < 1e-3 for gap in gaps)
    assert all(0.99 < f["head_mass"] <= 1.0001 for f in figures)


@functools.cache
def learner(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def gap(folder: RunFolder, step: int, weights: Path) -> float:
    """Mean |sampler - learner log-prob| over the tokens that `step` drew, if the learner had these weights."""
    tokenizer, gaps = AutoTokenizer.from_pretrained(MODEL), []
    for _, row in pd.read_parquet(folder.rollout(step)).iterrows():
        prompt, completion = tokenizer(row["prompt"])["input_ids"], torch.tensor(list(row["token_ids"]))
        with torch.no_grad():
            logits = learner(weights)(input_ids=torch.tensor([[*prompt, *completion.tolist()]])).logits
        mine = logits[0, len(prompt) - 1 : -1].log_softmax(-1).gather(1, completion[:, None])[:, 0]
        gaps.append((mine - torch.tensor(list(row["logprobs"]))).abs())
    return float(torch.cat(gaps).mean())


def test_it_ends_with_every_step_logged(folder: RunFolder) -> None:
    rows = read_jsonl(folder.steps_jsonl)
    assert [r["global_step"] for r in rows] == [1, 2, 3]
    assert all(r["grad_norm"] > 0 and r["entropy"] > 0 for r in rows)
    assert folder.checkpoints() == [3]


def test_the_first_step_draws_from_the_base_and_every_rollout_has_its_own_seed(folder: RunFolder) -> None:
    assert gap(folder, 1, MODEL) < 1e-5
    table = pd.read_parquet(folder.rollout(1))
    assert table["completion"].nunique() > len(table) // 2
    assert set(table["finish_reason"]) <= {"stop", "length"}
    cell_file, _ = read_folder(folder)
    ended = table.loc[table["finish_reason"] == "stop", "token_ids"]
    assert len(ended) and all(ids[-1] in cell_file.prompt.stop_ids for ids in ended)


def test_the_engine_gets_the_weights_of_every_step(folder: RunFolder) -> None:
    fresh, stale = gap(folder, 3, folder.resume(2)), gap(folder, 3, MODEL)
    assert fresh < 0.05 * stale


def same_rollouts(one: RunFolder, other: RunFolder) -> bool:
    tables = [[pd.read_parquet(f.rollout(step)) for step in (1, 2, 3)] for f in (one, other)]
    return all(a.equals(b) for a, b in zip(*tables, strict=True))


def test_the_same_seeds_give_the_same_rollouts_and_replay_was_at_work(
    folder: RunFolder, make_run: Callable[..., RunFolder], tmp_path: Path
) -> None:
    again = make_cell(make_run, tmp_path / "again")
    train(again)
    assert same_rollouts(folder, again)
    replayed = [r["replay"]["drawn"] for r in read_jsonl(folder.steps_jsonl)]
    assert replayed[0] == 0 and max(replayed) > 0


def test_a_run_that_goes_on_from_a_resume_state_draws_the_same_rollouts(folder: RunFolder, tmp_path: Path) -> None:
    """As after a kill in step 3: the states of steps 1 and 2 are there, a fresh engine gets the weights of step 2."""
    torn = RunFolder(tmp_path / "torn")
    shutil.copytree(folder.root, torn.root)
    shutil.rmtree(torn.resume(3))
    shutil.rmtree(torn.checkpoint(3))
    for path in (torn.result_json, torn.rollout(3), torn.logs / "MANIFEST.json", torn.rollouts / "MANIFEST.json"):
        path.unlink()
    train(torn)
    assert same_rollouts(folder, torn)
    weights = [(f.checkpoint(3) / "model.safetensors").read_bytes() for f in (folder, torn)]
    assert weights[0] == weights[1]


def test_the_engine_gets_the_merged_weights_of_a_lora_cell_at_every_step(lora: RunFolder) -> None:
    assert gap(lora, 1, MODEL) < 1e-5
    fresh, stale = gap(lora, 3, lora.checkpoint(2)), gap(lora, 3, MODEL)
    assert fresh < 0.05 * stale
