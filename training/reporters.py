"""Who may be told a run's figures beside its own logs: names, and whether their packages are here. Nothing heavy."""

import importlib.util
from collections.abc import Sequence
from typing import Any, Literal, get_args

from evaluation.errors import MachineError
from training.cell import Identity

Reporter = Literal["tensorboard", "wandb", "trackio"]
"""As TRL's `report_to` calls them; each is the name of its package too."""
REPORTERS: tuple[str, ...] = get_args(Reporter)
PROJECT = "rl-ablation"
"""Where W&B and trackio put the runs, unless their own environment says otherwise."""


def refuse_absent(reporters: Sequence[str]) -> None:
    """Refuse reporters that are not installed, before anything trains.

    Raises:
        MachineError: with the first that is not.
    """
    for name in reporters:
        if importlib.util.find_spec(name) is None:
            fix = f"install the extra `watch`, or leave {name} out of ABLATION_REPORT_TO"
            raise MachineError("report_to", name, "the package is not installed", fix)


def run_id(identity: Identity) -> str:
    """Return a cell's id at W&B: the same for every attempt, so that a resumed cell continues its curve."""
    return identity.fingerprint[:16]


def wandb_run(identity: Identity, experiment: str) -> dict[str, Any]:
    """Return what names a cell's run at W&B; its project comes from the environment."""
    assert identity.cell_config is not None
    return {
        "id": run_id(identity),
        "resume": "allow",
        "name": identity.cell_config.name,
        "group": experiment or None,
        "config": {"cell": identity.cell_config.model_dump(mode="json"), "fingerprint": identity.fingerprint},
    }
