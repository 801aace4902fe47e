"""Fails when TRL or transformers change beneath training/trainer.py: each pin says what to look at again.

To renew a pin after looking: copy the new hash from the failure's message.
"""

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import trl
from accelerate.data_loader import DataLoaderShard
from transformers import Trainer
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer
from trl.trainer.utils import RepeatSampler, add_fused_lm_head

from training.order import EpochSampler
from training.trainer import CellTrainer

PINS: list[tuple[Callable[..., Any], str, str]] = [
    (
        GRPOTrainer._get_train_sampler,
        "36497afb4d311dc9a80d914d27893fe075c5bbc7edde8586edfa60125e980799",
        "that EpochSampler is built from every field of TRL's sampler, and that prompts a step stay what the cell says",
    ),
    (
        RepeatSampler.__init__,
        "7898b11a3b9e9e07f4d43240092d839191ee2a7be2997704b3b0326a12fe65ff",
        "the arguments of EpochSampler, and that `generator` is the only source of its order",
    ),
    (
        RepeatSampler.__iter__,
        "d80412d80424bd645f7d74cdb8bdc1994c789d8ba03111ffe6eea20f789dea58",
        "that EpochSampler's seeding of `generator` fixes the order of an epoch, and that a group's rows are adjacent",
    ),
    (
        GRPOTrainer._generate_and_score_completions,
        "1fa48922792dcd5c72da155cfe99db477771a7c61cde15519fe8c86d0cdc0b65",
        "that its advantages come back in input order, this process's own (_record zips them), that old log-probs are "
        "skipped on policy, and that num_items_in_batch counts the tokens of all rollouts of all processes (drop_zero)",
    ),
    (
        GRPOTrainer._generate,
        "2a27fdf8f5e6f3562508eec3efb9e9dade2e0bf810de5031cdfab429d0a048f2",
        "what rollout_func is called with and must return",
    ),
    (
        VLLMGeneration._iter_named_params,
        "baab615d5c7bc3e126cec1430f29213c984b275285b08a269cbfbf0adc2617b8",
        "that a PEFT model is merged here and nowhere else, and which names it yields (lora.sync_out_of_place)",
    ),
    (
        VLLMGeneration.sync_weights,
        "63d669fb32304ff5e275443abc5e4a2c1e6974ba196d30074bc0f2519f98644c",
        "that the engine gets its weights from _iter_named_params alone (lora.sync_out_of_place replaces it)",
    ),
    (
        GRPOTrainer._calculate_rewards,
        "736ae29b083840b5da2638b55ad1258659c644589991fe6a494131354952efef",
        "what the reward function is called with",
    ),
    (
        GRPOTrainer.get_train_dataloader,
        "2bffe5a57c539e17dafbdec15ca8fce48aaee94599bc7900fbbf5618ba1c7bb5",
        "that its batches are lists of rows of text, which no device holds",
    ),
    (
        DataLoaderShard.__iter__,
        "77b896b76f3c73e9fb1126bdf1645577a4fe398e59324bec768ce1e8db3ad354",
        "that `device` is where batches are sent, and nothing else",
    ),
    (
        GRPOTrainer._prepare_inputs,
        "f824e7fb0714795697c9b4d574de1e139dd5f4404c2554e92cf1db7f60fa6c96",
        "that rollouts are drawn when _step is at a multiple of the accumulation steps (restore() sets _step), and "
        "that a new _buffered_inputs is a new list of the step's micro-batches (they are arranged anew then)",
    ),
    (
        grpo_trainer.shuffle_sequence_dict,
        "bab038755e57ed2b537885296273850223db4d14c728fc2f6e4b1216eb5a9f30",
        "that it draws from torch's global generator alone, which _generate_and_score_completions seeds",
    ),
    (
        GRPOTrainer.training_step,
        "9e18632f7dd8e8d8f0ebbdcc4431feb1a9e3c037a02cf8c3aec38aa68ee58814",
        "that _step is advanced here, and that replay's backward after it joins the same optimizer step",
    ),
    (
        Trainer.training_step,
        "e9760c8ee10308d5c1b90f667725374a18e3faf7019a65964319b29204003442",
        "that the loss is not divided by the accumulation steps again: replay's gradient is added unscaled",
    ),
    (
        GRPOTrainer.compute_loss,
        "a2d6ef8bd29c3e26be8d8b25fa03a298a7a7fa4a3abb851a52845bc16c0e54ce",
        "that _compute_loss is what training uses",
    ),
    (
        GRPOTrainer._compute_loss,
        "80295546bbdbf6f711acce7f6e69b0100ab40aa8f23ed8052cc564ff024e3e40",
        "that the loss is a sum over rows, each proportional to its advantage, and the normaliser is "
        "num_items_in_batch (buckets.arrange moves rows between micro-batches and leaves some out) over the number of "
        "processes (training_step takes the mean of the losses); that only figures a row are gathered (so that "
        "all processes need equally many rows: buckets.filled_up); and that the policy-gradient form, which replaces "
        "it, has the same normaliser and mask",
    ),
    (
        GRPOTrainer._get_per_token_logps_and_entropies,
        "ea73c3909275851d0cd664b1e7694905fdcd9c285e848ae923d7402234f2edce",
        "its three results, and that the log-probs are of the last `logits_to_keep` tokens (_replay_backward)",
    ),
    (
        add_fused_lm_head,
        "422d009f04b66659982f9545a90d560bdcc27fde3268de203d0c5c6d1449d211",
        "that the backbone is called as a module, once a pass, and that its last hidden state, shifted by one, is what "
        "the head is given, with temperature as the only change of the logits (centering.hidden_states)",
    ),
    (
        grpo_trainer.split_tensor_dict,
        "b61a5760a03e95dbceddcc1e8e78c3db6d9303f01c0b1ced19b745271e56d079",
        "that tensors of any rank are cut by rows (the sampler's head has three axes)",
    ),
    (
        Trainer._save_checkpoint,
        "a9111e30faa9933986e022e56b5af81fd990356db64d727b4c320c852283bf3b",
        "that it writes output_dir/checkpoint-N with weights, optimizer, scheduler, random states and trainer state",
    ),
    (
        Trainer._load_rng_state,
        "d5ebdfc0a0884c4b853236b4974bbae38b5c2b7d90c91d87a5621a261240b5dd",
        "that random states come back on a resume",
    ),
]


def test_the_version_is_the_one_that_was_read() -> None:
    assert trl.__version__ == "1.16.0", (
        f"trl {trl.__version__}: go through every pin below and run tests/training before changing pyproject.toml"
    )


@pytest.mark.parametrize(("method", "pin", "look_at"), PINS, ids=[m.__qualname__ for m, _, _ in PINS])
def test_the_source_is_the_one_that_was_read(method: Callable[..., Any], pin: str, look_at: str) -> None:
    found = hashlib.sha256(inspect.getsource(method).encode()).hexdigest()
    assert found == pin, f"{method.__qualname__} has changed ({found}); check {look_at}"


def test_every_override_is_pinned() -> None:
    """A new override of a TRL or transformers method needs a pin of what it overrides."""
    pinned = {m.__name__ for m, _, _ in PINS} | {"__init__"}
    for ours, base in ((CellTrainer, GRPOTrainer), (EpochSampler, RepeatSampler)):
        overrides = {n for n, v in vars(ours).items() if callable(v) and hasattr(base, n)} - {"__class__"}
        assert overrides <= pinned, f"not pinned: {sorted(overrides - pinned)}"
