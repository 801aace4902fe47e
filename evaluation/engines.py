"""Sampling engines: transformers anywhere, vLLM on GPUs. Same prompts, seeds, stop ids and stop strings for both."""

import logging
from collections.abc import Sequence
from typing import Any
from typing import Protocol as Interface

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import logging as transformers_logging

from evaluation.errors import IncompleteError, InputError, MachineError
from evaluation.generation import Completion, NonFiniteLogits, row_seed, sample
from evaluation.prompts import PromptSpec, check, stopped
from evaluation.protocol import Protocol
from evaluation.request import Request, Unit

logger = logging.getLogger(__name__)


class Engine(Interface):
    """Draws samples from one checkpoint at a time."""

    tokenizer: Any

    def load(self, unit: Unit, spec: PromptSpec) -> None:
        """Make the unit's checkpoint the one that is drawn from."""
        ...

    def draw(
        self, protocol: Protocol, problem_ids: Sequence[str], prompts: Sequence[Sequence[int]]
    ) -> list[list[Completion]]:
        """Return n completions of each prompt; sample i of a problem has the same seed in every checkpoint."""
        ...


def open_engine(request: Request) -> Engine:
    """Return the engine that the request asks for.

    Raises:
        MachineError: its package or device is not here.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(request.num_threads)
    if request.device.startswith("cuda") and not torch.cuda.is_available():
        raise MachineError("device", request.device, "no CUDA device", "use a GPU host, or device cpu")
    if request.engine == "vllm":
        from evaluation.vllm_engine import VllmEngine

        return VllmEngine(request.device)
    return TransformersEngine(request.device)


def seeds_of(protocol: Protocol, problem_ids: Sequence[str]) -> list[list[int]]:
    """Return the row seeds of each problem's n samples: the same for every checkpoint, so that scores are paired."""
    return [[row_seed(protocol.seed, "eval", p, i) for i in range(protocol.n)] for p in problem_ids]


def load_tokenizer(unit: Unit) -> Any:
    """Load the checkpoint's tokenizer, padding on the left."""
    tokenizer = AutoTokenizer.from_pretrained(unit.model_path, padding_side="left", **_where(unit))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _where(unit: Unit) -> dict[str, str]:
    named = {"revision": unit.model_revision, "subfolder": unit.model_subfolder}
    return {k: v for k, v in named.items() if v is not None}


class TransformersEngine:
    """Any causal LM; fp32 on a CPU, the stored dtype on a GPU."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.tokenizer: Any = None
        self.model: Any = None
        self.spec: PromptSpec | None = None
        self.loaded: str | None = None

    def load(self, unit: Unit, spec: PromptSpec) -> None:
        """Load weights and tokenizer; the prompt specification must be the model's own.

        Raises:
            InputError: weights are missing, or stop ids or template differ.
        """
        if self.loaded == unit.label:
            return
        dtype = torch.float32 if self.device == "cpu" else "auto"
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                unit.model_path, dtype=dtype, output_loading_info=True, **_where(unit)
            )
        except (OSError, ValueError) as e:
            raise InputError("model", unit.model_path, " ".join(str(e).split())[:200], "name a model folder") from e
        model, info = loaded
        if info["missing_keys"] or info["mismatched_keys"]:
            lacking = ", ".join(sorted(info["missing_keys"])[:3])
            raise InputError("model", unit.model_path, f"weights are missing ({lacking})", "use a complete folder")
        self.tokenizer = load_tokenizer(unit)
        check(spec, self.tokenizer, model.config, model.generation_config)
        self.model, self.spec, self.loaded = model.to(self.device).eval(), spec, unit.label

    def draw(
        self, protocol: Protocol, problem_ids: Sequence[str], prompts: Sequence[Sequence[int]]
    ) -> list[list[Completion]]:
        """Draw with our own sampler.

        Raises:
            IncompleteError: the checkpoint's weights are not finite.
        """
        assert self.spec is not None
        spec, tokenizer = self.spec, self.tokenizer
        stop_text = (lambda ids: stopped(spec, tokenizer.decode(ids))) if spec.stop_strings else None
        try:
            return sample(
                self.model,
                prompts,
                seeds_of(protocol, problem_ids),
                max_new_tokens=protocol.max_new_tokens,
                temperature=protocol.temperature,
                top_p=protocol.top_p,
                stop_ids=spec.stop_ids,
                pad_id=tokenizer.pad_token_id,
                stop_text=stop_text,
            )
        except NonFiniteLogits as e:
            raise IncompleteError(f"model={self.loaded}: {e}; the checkpoint cannot be sampled") from e
