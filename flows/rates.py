"""How fast one slot works, by model: every number with its unit and where it comes from. Estimates say so."""

from pydantic import Field

from evaluation.records import Record


class Assumption(Record):
    """A number that the plan rests on."""

    value: float
    unit: str
    source: str


class Rates(Record):
    """What the plan multiplies and divides by: `rates["mfu"]` is the number of `assumptions["mfu"]`."""

    assumptions: dict[str, Assumption] = Field(min_length=1)

    def __getitem__(self, name: str) -> float:
        """Return an assumed number."""
        return self.assumptions[name].value

    @property
    def training_tokens_per_s(self) -> float:
        """Forward and backward: given, or peak_flops x mfu / (flops_per_parameter_token x num_parameters)."""
        if "training_tokens_per_s" in self.assumptions:
            return self["training_tokens_per_s"]
        return self["peak_flops"] * self["mfu"] / (self["flops_per_parameter_token"] * self["num_parameters"])

    @property
    def sample_bytes(self) -> float:
        """One sample and its verdict on disk: completion and program, and the fields around them."""
        return 2 * self["completion_tokens"] * self["bytes_per_token"] + self["row_bytes"]


_ESTIMATE = "estimate, never measured by us; `make gpu-check` measures it"
_ROWS = {
    "bytes_per_token": (4, "bytes", "English and code in a large vocabulary, about 4 characters a token"),
    "row_bytes": (260, "bytes", "ids, finish_reason and the verdict's row of the contracts"),
}


def _rates(**numbers: tuple[float, str, str]) -> Rates:
    return Rates(
        assumptions={k: Assumption(value=v, unit=u, source=s) for k, (v, u, s) in {**numbers, **_ROWS}.items()}
    )


_MBPP = {
    "prompt_tokens": (150, "tokens", "MBPP's text, one assert and the chat template: estimate"),
    "completion_tokens": (
        300,
        "tokens",
        "estimate: public runs of Qwen3-1.7B-Base on MBPP at 512 tokens truncate under 3 %; a run that rambles to "
        "the limit of 3,072 costs up to ten times as much",
    ),
}


def _on_h100(num_parameters: int, sampling: float, **lengths: tuple[float, str, str]) -> Rates:
    return _rates(
        **(lengths or _MBPP),
        sampling_tokens_per_s=(sampling, "tokens/s per GPU", f"vLLM, bf16, one H100, 512 at a time: {_ESTIMATE}"),
        scoring_tokens_per_s=(sampling, "tokens/s per GPU", f"as in training: {_ESTIMATE}"),
        decode_step_s=(0.008, "s", f"one decode step of a nearly empty batch: {_ESTIMATE}"),
        num_parameters=(num_parameters, "parameters", "the model's registry entry"),
        flops_per_parameter_token=(6, "FLOP", "2 forward and 4 backward (Kaplan et al. 2020, arXiv 2001.08361)"),
        peak_flops=(989e12, "FLOP/s", "NVIDIA H100 SXM data sheet, dense bf16"),
        mfu=(0.3, "fraction of peak", f"short sequences, one GPU: {_ESTIMATE}"),
        overhead_s=(4, "s per step", f"optimizer, weights to the sampler, judging its completions: {_ESTIMATE}"),
        start_s=(180, "s per cell", f"imports, weights, vLLM's start: {_ESTIMATE}"),
    )


_GSM8K = {
    "prompt_tokens": (150, "tokens", "GSM8K's question, the instruction and the chat template: estimate"),
    "completion_tokens": (200, "tokens", "estimate: worked solutions of a small chat model, limit 512"),
}

_DEMO = "facts of the demo, one core of a 2.0 GHz Xeon, 40 steps x 64 rollouts"

RATES: dict[str, Rates] = {
    "qwen3_1p7b_base": _on_h100(1_720_574_976, 20_000),
    "q25_3b": _on_h100(3_085_938_688, 14_000),
    "qwen35_0p8b": _on_h100(752_393_024, 25_000, **_GSM8K),
    "toy": _rates(
        prompt_tokens=(26, "tokens", "measured on the generated problems"),
        completion_tokens=(32, "tokens", "measured on the generated problems"),
        sampling_tokens_per_s=(4_800, "tokens/s per core", f"17.0 CPU-s of sampling: {_DEMO}"),
        training_tokens_per_s=(6_700, "tokens/s per core", f"22.1 CPU-s of forward, loss and backward: {_DEMO}"),
        scoring_tokens_per_s=(5_200, "tokens/s per core", f"6.3 CPU-s per 1,024 samples: {_DEMO}"),
        decode_step_s=(0, "s", "counted in the sampling rate"),
        overhead_s=(0.13, "s per step", f"replay and judge, 5.1 CPU-s: {_DEMO}"),
        start_s=(12, "s per cell", f"imports 10.2 and start 1.9 CPU-s: {_DEMO}"),
    ),
    "sums": _rates(
        prompt_tokens=(23, "tokens", "measured on the generated problems"),
        completion_tokens=(16, "tokens", "measured on the generated problems"),
        sampling_tokens_per_s=(4_800, "tokens/s per core", "as the first shipped model, which is of the same size"),
        training_tokens_per_s=(6_700, "tokens/s per core", "as the first shipped model"),
        scoring_tokens_per_s=(5_200, "tokens/s per core", "as the first shipped model"),
        decode_step_s=(0, "s", "counted in the sampling rate"),
        overhead_s=(0.05, "s per step", "no program runs: estimate"),
        start_s=(12, "s per cell", "as the first shipped model"),
    ),
    "smollm2_135m": _rates(
        prompt_tokens=(150, "tokens", "docstring prompts of MBPP: estimate"),
        completion_tokens=(100, "tokens", "most completions reach the limit of 112"),
        sampling_tokens_per_s=(45, "tokens/s per core", "measured: 24 at a batch of 8, 69 at 32 (fp32, one thread)"),
        training_tokens_per_s=(45, "tokens/s per core", "measured: 8 x 389 tokens in 63 CPU-s, 4 x 160 in 15.2"),
        scoring_tokens_per_s=(69, "tokens/s per core", "measured at a batch of 32"),
        decode_step_s=(0, "s", "counted in the sampling rate"),
        overhead_s=(2, "s per step", "optimizer of 135M fp32 parameters: estimate"),
        start_s=(30, "s per cell", "imports and weights: estimate"),
    ),
}
"""By the model's registry token."""
