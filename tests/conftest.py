"""A real Prefect server for the whole session, and a worker for those who ask; each starts when first needed."""

import contextlib
import csv
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")  # other work may share the machine

ROOT = Path(__file__).resolve().parents[1]
START_S = 240  # the first start of a Prefect home migrates its database; a busy machine takes its time
QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_CLIENT_MAX_RETRIES": "10",
    "DO_NOT_TRACK": "1",
}
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "planted/aws+secret",
    "HF_TOKEN": "hf_planted_token",
    "WANDB_API_KEY": "planted0wandb0key",
}
"""Made up, in the environment of all that the worker starts; a test looks for them everywhere."""


CAMPAIGNS = ROOT / "docs/campaigns/results.csv"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write what a long proof showed into docs/campaigns, one line a test, the last result of each."""
    if "campaign" not in report.keywords or report.when != "call" or hasattr(report, "node"):
        return  # `node`: a worker's report, which its controller gets as well
    rows = {}
    if CAMPAIGNS.is_file():
        with CAMPAIGNS.open(newline="", encoding="utf-8") as f:
            rows = {r["test"]: r for r in csv.DictReader(f)}
    rows[report.nodeid] = {
        "test": report.nodeid,
        "outcome": report.outcome,
        "seconds": f"{report.duration:.0f}",
        "figures": "; ".join(str(value) for _, value in report.user_properties),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    with CAMPAIGNS.open("w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, ["test", "outcome", "seconds", "figures", "date"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[k] for k in sorted(rows))


@pytest.fixture(autouse=True)
def nothing_is_stopping():
    """A command that ended with an error leaves its process stopping: there is one command a process, but for tests."""
    yield
    if "tasks.launch" in sys.modules:
        sys.modules["tasks.launch"].STOPPING.clear()


@dataclass(frozen=True)
class Server:
    """A running Prefect server."""

    url: str
    env: dict[str, str]
    """Environment of commands that talk to it."""

    def run(self, *argv: str, timeout: float = 300, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a Python module as a command against this server: `run("prefect", "version")`."""
        return subprocess.run(
            [sys.executable, "-m", *argv],
            cwd=ROOT,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def start(self, *argv: str, log: Path, **env: str) -> "subprocess.Popen[bytes]":
        """Start a Python module that leads its own session."""
        with log.open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", *argv],
                cwd=ROOT,
                env={**self.env, **env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a process that leads its own session, and whatever it started there."""
    for what, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, what)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def _wait_for(look: Callable[[], Any], seconds: float, what: str, every: float = 0.1) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(every)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


@pytest.fixture(scope="session")
def wait_for() -> Callable[..., Any]:
    """`wait_for(look, seconds, what)`: return the first true thing that `look` finds, or fail."""
    return _wait_for


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Prefect server on a free port, with a home and database of its own."""
    home = tmp_path_factory.mktemp("prefect")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "ABLATION_"))}
    url = f"http://127.0.0.1:{port}/api"
    server = Server(url, {**clean, **QUIET, "PREFECT_HOME": str(home), "PREFECT_API_URL": url})
    argv = ("prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-ui")
    process = server.start(*argv, log=home / "server.log")
    try:
        _wait_for(lambda: _answers(url) or process.poll() is not None, START_S, "the server's first answer", 0.5)
        assert process.poll() is None, (home / "server.log").read_text()
        yield server
    finally:
        end_group(process)


@pytest.fixture(scope="session")
def deployed(prefect_server: Server) -> Server:
    """The server, with everything on it that `make deploy` puts there."""
    done = prefect_server.run("flows.deploy")
    assert done.returncode == 0, done.stderr
    return prefect_server


@pytest.fixture(scope="session")
def control_worker(deployed: Server) -> Iterator[Server]:
    """The server, with a worker in the pool `control` that takes runs at once; its log is beside the server's."""
    log = Path(deployed.env["PREFECT_HOME"]) / "worker.log"
    argv = ("prefect", "worker", "start", "--pool", "control", "--name", "tests")
    process = deployed.start(*argv, log=log, PREFECT_WORKER_QUERY_SECONDS="1", **SECRETS)
    try:
        yield deployed
    finally:
        end_group(process)


@pytest.fixture
def make_work(tmp_path: Path) -> Callable[..., Any]:
    """`make_work(**changes)`: the work of `micro`, or a change of it, in this test's folders; no problem is real."""
    from evaluation.contamination import Contamination
    from evaluation.problems import Prepared
    from evaluation.prompts import PromptSpec
    from evaluation.splits import Ids, build_split
    from flows.experiments import EXPERIMENTS
    from tasks.models import ModelFiles
    from tasks.work import Work
    from training.store import open_store

    def make(**changes: Any) -> Work:
        spec = EXPERIMENTS["micro"].replace(**changes)
        split = build_split(Ids(train=(1,), plus=(2,), test=()), num_canonical_test=0, sources={})
        prepared = Prepared(
            split=split,
            split_sha256=split.identity,
            train=str(tmp_path / "train.jsonl"),
            benchmarks={"toy_plus": str(tmp_path / "toy_plus.jsonl")},
            revisions={"toy": "x"},
            contamination=Contamination(touched={}, clean={}, constant_passable=(), overlaps=()),
        )
        files = ModelFiles(path="nowhere", revision=None, identity="sha256:0", prompt_dir="")
        prompt = PromptSpec(name="toy/1", rendering="plain", extraction="whole/1", stop_ids=(1,))
        return Work(spec, spec.cells(), tmp_path / "runs", open_store(str(tmp_path / "store")), prepared, files, prompt)

    return make
