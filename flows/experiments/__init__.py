"""The experiments, as data: one explicit dict, no registration on import."""

from flows.experiments.lr_ablation import (
    CONTROLS,
    FULL,
    LADDER,
    MICRO,
    SMOKE,
    SMOL,
)
from training.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    e.name: e
    for e in (
        FULL,
        LADDER,
        SMOKE,
        MICRO,
        CONTROLS,
        SMOL,
    )
}
