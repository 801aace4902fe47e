"""A Prefect server for one run, on a leash: where no server is configured, `ablation run` needs none to be started.

Prefect would start one itself, but leaves it behind when the flow is killed; ours ends with its starter.
"""

import atexit
import logging
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import httpx
import prefect
from prefect.context import refresh_global_settings_context
from prefect.settings import PREFECT_API_URL

from evaluation.errors import MachineError
from tasks.settings import point_prefect_at, prefect_environment

logger = logging.getLogger(__name__)

START_S = 240.0
"""The first start of a Prefect home migrates its database."""
STOP_S = 10.0


def ensure_server() -> str:
    """Return the URL of the configured server, or of one started now that lives as long as this process.

    Raises:
        MachineError: the configured one does not answer, or ours did not start.
    """
    if url := PREFECT_API_URL.value():
        return probe(url)
    port = _free_port()
    url = f"http://127.0.0.1:{port}/api"
    server = subprocess.Popen(
        [sys.executable, "-m", "tasks.leash", *_command(port)],
        env=prefect_environment(PREFECT_UI_ENABLED="0", PREFECT__SERVER_EPHEMERAL="1", PREFECT__SERVER_FINAL="1"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for us: the flow still has its end to report
    )
    atexit.register(_stop, server)  # before Prefect's own, so that it runs after they have sent their last events
    _wait(server, url)
    point_prefect_at(url)
    refresh_global_settings_context()
    return url


def probe(url: str) -> str:
    """Return the URL of a server once it has answered, whatever it says; Prefect's client would try for an hour.

    Raises:
        MachineError: it does not answer.
    """
    try:
        httpx.get(f"{url}/health", timeout=10)
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        reason = f"does not answer ({type(e).__name__})"
        raise MachineError("PREFECT_API_URL", url, reason, "start the server, or name another") from e
    return url


def _command(port: int) -> list[str]:
    app = ["--app-dir", str(prefect.__module_path__.parent), "--factory", "prefect.server.api.server:create_app"]
    where = ["--host", "127.0.0.1", "--port", str(port)]
    return [sys.executable, "-m", "uvicorn", *app, *where, "--log-level", "critical", "--lifespan", "on"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(server: "subprocess.Popen[bytes]", url: str) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    _stop(server)
    raise MachineError(
        "prefect",
        url,
        "its temporary server did not start",
        "free some memory, or start one with `prefect server start`",
    )


def _stop(server: "subprocess.Popen[bytes]") -> None:
    server.terminate()
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
