"""The flow parameters: the same words in the Prefect form, in `ablation run` and in `ablation plan`.

The form's types are here, its words in the docstring of each flow (Prefect reads them there). It is flat on purpose: a
word is a flag of the command line and a `-p` of a deployment. Names are a plain string with the registry's list beside
it, so that what is added to a registry is in the form.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from evaluation.errors import InputError
from evaluation.records import Record
from flows.experiments import EXPERIMENTS
from training.cell import MODELS, Cell
from training.experiment import Experiment

MAX_SEEDS = 1000
"""More is a slip of the finger: a grid of tens of thousands of cells."""

FILES = {"mbpp": ("mbpp", "mbpp_plus"), "gsm8k": ("gsm8k",)}
"""The parameters that name local files of each benchmark; others generate their problems."""

Text = Annotated[str, Field(min_length=1)]


def _names(*rules: str) -> dict[str, Any]:
    """Return what a form offers: the experiments that answer by these rules."""
    return {"enum": [n for n, e in EXPERIMENTS.items() if e.criterion.rule in rules]}


ExperimentName = Annotated[str, Field(json_schema_extra=_names("boundary", "drop"))]
LadderName = Annotated[str, Field(json_schema_extra=_names("boundary"))]
CenteringName = Annotated[str, Field(json_schema_extra=_names("drop"))]
ModelName = Annotated[str, Field(json_schema_extra={"enum": [*MODELS]})]
Seeds = Annotated[int, Field(ge=1, le=MAX_SEEDS)]
AtLeastOne = Annotated[int, Field(ge=1)]
Backend = Literal["local", "tinker"]


class Parameters(Record):
    """What a person may choose about one execution of an experiment (contracts: Flow parameters)."""

    experiment: str
    store: Text | None = None
    """URL; None is `file://<runs>/store`."""
    runs: Text | None = None
    """Local run directories, one a cell; None is `./runs/<experiment>`."""
    model: Text | None = None
    seeds: Seeds | None = None
    """How many: 0 .. n-1; None is the experiment's own."""
    cells: tuple[str, ...] | None = None
    """Cell names; None is all of them."""
    max_parallel_cells: AtLeastOne | None = None
    """Cells training at a time; None is what the machine serves."""
    mbpp: Text | None = None
    mbpp_plus: Text | None = None
    gsm8k: Text | None = None
    """Folder of GSM8K's files; None is the hub's."""
    backend: Backend = "local"
    """Who trains the cells of a policy-gradient experiment: this machine, or Tinker's service."""
    end_by: float | None = None
    """Unix time at which the experiment's budget is spent: the flow's own word to other hosts."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.experiment not in EXPERIMENTS:
            raise InputError(
                "experiment", self.experiment, "unknown experiment", f"use one of {', '.join(sorted(EXPERIMENTS))}"
            )
        _ = self.grid
        for field in {"mbpp", "mbpp_plus", "gsm8k"} - set(FILES.get(self.spec.benchmark, ())):
            if (given := getattr(self, field)) is not None:
                generates = self.spec.benchmark not in FILES
                reason = "generates its problems" if generates else f"trains on {self.spec.benchmark}"
                raise InputError(field, given, f"{self.experiment} {reason}", "leave it out")
        return self

    @property
    def folder(self) -> str:
        """Name of the default folder of run directories."""
        return self.experiment if self.backend == "local" else f"{self.experiment}_{self.backend}"

    @property
    def spec(self) -> Experiment:
        """The experiment as registered."""
        return EXPERIMENTS[self.experiment]

    @property
    def grid(self) -> tuple[Cell, ...]:
        """The planned cells."""
        return self.spec.cells(self.model, self.seeds, self.cells, self.backend)
