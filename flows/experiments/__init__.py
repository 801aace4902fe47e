"""The experiments, as data: one explicit dict, no registration on import."""

from flows.experiments.lr_ablation import CONTROLS, FULL, LADDER, MICRO, SMOKE, SMOL
from flows.experiments.score_centering import SCORE_CENTERING, SCORE_CENTERING_CONTROLS, SCORE_CENTERING_SMOKE
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
        SCORE_CENTERING,
        SCORE_CENTERING_CONTROLS,
        SCORE_CENTERING_SMOKE,
    )
}

FLOWS = {"boundary": "lr-ablation", "drop": "score-centering"}
"""The flow that runs an experiment, by the rule of its criterion."""
