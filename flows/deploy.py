"""`make deploy`: put the work pools, deployments and automations on the server of the active Prefect profile.

Everything is made if absent and brought up to date if not; running it twice changes nothing.
"""

import logging
import subprocess
import sys
from pathlib import Path

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.workers.process import ProcessWorker

from evaluation.errors import IncompleteError, MachineError
from evaluation.program import run_program
from tasks.server import probe
from tasks.settings import prefect_environment, settings

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).resolve().parent.parent / "deployments"
POOLS = {
    "control": "the flows themselves; light",
    "gpu": "cells in training; one slot a GPU",
    "eval": "scores of checkpoints",
}


def main() -> int:
    """Deploy, and return the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logger.setLevel(logging.INFO)
    return run_program(deploy)


def deploy() -> int:
    """Deploy to the active server.

    Raises:
        MachineError: no server is named, or it does not answer.
    """
    url = named_server()
    with get_client(sync_client=True) as client:
        for name, description in POOLS.items():
            make_pool(client, name, description)
        register()
        for file in ("automations.yaml", "restart.yaml"):
            install(client, FOLDER / file)
    logger.info("deployed to %s", url)
    return 0


def named_server() -> str:
    """Return the server's URL once it has answered (Prefect's own commands end in a long traceback without one).

    Raises:
        MachineError: no server is named, or it does not answer.
    """
    url = PREFECT_API_URL.value()
    if not url:
        action = "run `prefect server start`, then `prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api`"
        raise MachineError("PREFECT_API_URL", "", "the active Prefect profile names no server", action)
    return probe(url)


def make_pool(client: SyncPrefectClient, name: str, description: str) -> None:
    """Create a process work pool unless there is one of this name, of whatever type."""
    try:
        client.read_work_pool(name)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(
            WorkPoolCreate(name=name, type="process", description=description, base_job_template=template)
        )
        logger.info("work pool %s: created", name)


def register() -> None:
    """Create or update every deployment of prefect.yaml.

    Raises:
        IncompleteError: Prefect refused one; its own words are on stderr.
    """
    home = settings().home or str(FOLDER.parent)
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    done = subprocess.run(
        [*command, "--prefect-file", str(FOLDER / "prefect.yaml")],
        cwd=FOLDER.parent,
        env=prefect_environment(ABLATION_HOME=home),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        raise IncompleteError(f"deploy={done.returncode}: prefect refused deployments/prefect.yaml; read above")
    logger.info("deployments: registered, at home in %s", home)


def install(client: SyncPrefectClient, path: Path) -> None:
    """Create a file's automations, or bring those of the same name up to date: Prefect would make a second one."""
    for raw in yaml.safe_load(path.read_text(encoding="utf-8"))["automations"]:
        automation = AutomationCore.model_validate(raw)
        found = client.read_automations_by_name(automation.name)
        if found:
            client.update_automation(found[0].id, automation)
        else:
            client.create_automation(automation)
            logger.info("automation %s: installed", automation.name)


if __name__ == "__main__":
    sys.exit(main())
