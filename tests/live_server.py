"""A Prefect server and a worker of one's own, to be killed and started again on the same database."""

import contextlib
import json
import os
import signal
import socket
import sqlite3
import time
import urllib.error
import urllib.request
from pathlib import Path

from conftest import QUIET, START_S, Server, end_group

FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


class Live:
    """Server, deployments and a `control` worker; every part can be killed."""

    def __init__(self, home):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "ABLATION_"))}
        url = f"http://127.0.0.1:{self.port}/api"
        self.home = home
        self.server = Server(url, {**clean, **QUIET, "PREFECT_HOME": str(home), "PREFECT_API_URL": url})
        self.start_server()
        done = self.server.run("flows.deploy")
        assert done.returncode == 0, done.stderr
        self.start_worker()

    def start_server(self):
        """Start the server on its port and database, and wait for its first answer."""
        argv = ("prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self.port), "--no-ui")
        self.server_process = self.server.start(*argv, log=self.home / "server.log")
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"{self.server.url}/health", timeout=5)
                return
            time.sleep(0.2)
        raise AssertionError((self.home / "server.log").read_text()[-2000:])

    def start_worker(self):
        """Start a worker that takes runs at once."""
        argv = ("prefect", "worker", "start", "--pool", "control", "--name", "live")
        self.worker_process = self.server.start(*argv, log=self.home / "worker.log", PREFECT_WORKER_QUERY_SECONDS="1")

    def kill_server(self):
        """kill -9, services included."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.server_process.pid, signal.SIGKILL)
        self.server_process.wait()

    def kill_worker(self):
        """kill -9 of the worker alone: what it started goes on."""
        self.worker_process.kill()
        self.worker_process.wait()

    @contextlib.contextmanager
    def locked_database(self):
        """Hold the server's SQLite file as a stuck backup would."""
        held = sqlite3.connect(self.home / "prefect.db", timeout=60, isolation_level=None)
        held.execute("BEGIN EXCLUSIVE")
        try:
            yield
        finally:
            held.execute("ROLLBACK")
            held.close()

    def close(self):
        """End both."""
        end_group(self.worker_process)
        end_group(self.server_process)

    def ask(self, path, body=None):
        """Ask the API; what passes by itself is asked again."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.server.url}{path}", data, {"Content-Type": "application/json"})
        for _ in range(60):
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as e:
                if e.code < 500:
                    raise
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(2)
        raise AssertionError(f"{path}: no answer")

    def start_run(self, **parameters):
        """Start `lr-ablation/micro`; return its id."""
        micro = next(d for d in self.ask("/deployments/filter", {}) if d["name"] == "micro")
        return self.ask(f"/deployments/{micro['id']}/create_flow_run", {"parameters": parameters})["id"]

    def again(self, run):
        """Press Retry."""
        retry = {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}}
        assert self.ask(f"/flow_runs/{run}/set_state", retry)["status"] == "ACCEPT"

    def end_of(self, run, seconds, settled_s=90.0):
        """Wait for a final state that nothing restarts; return the run."""
        end, final_since = time.monotonic() + seconds, None
        while time.monotonic() < end:
            found = self.ask(f"/flow_runs/{run}")
            if found["state_type"] == "COMPLETED":
                return found
            final_since = (final_since or time.monotonic()) if found["state_type"] in FINAL else None
            if final_since and time.monotonic() - final_since > settled_s:
                return found
            time.sleep(0.5)
        raise AssertionError(f"no end within {seconds:.0f} s: {found['state']}")


def pids_of(word, runs):
    """Processes with this word among their arguments, a module or a half of an evaluation, in a folder below `runs`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if word in words and any(w.startswith(str(runs)) for w in words) and "tasks.leash" not in words:
                found.append(int(entry.name))
    return found


def flow_of(run):
    """The process of a flow run."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environ = (entry / "environ").read_bytes().decode(errors="replace")
            words = (entry / "cmdline").read_bytes().decode(errors="replace")
            if f"PREFECT__FLOW_RUN_ID={run}" in environ and "prefect" in words and "training" not in words:
                return int(entry.name)
    return None
