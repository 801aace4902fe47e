"""`ablation run score_centering --backend tinker` through the unmodified SDK: from split to report; refusals."""

import json
import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("tinker")

from tinker_flow import MINI
from tinker_server import TinkerServer

from flows.cli import main
from flows.experiments import EXPERIMENTS
from training.cell import MODELS
from training.store import open_store

ROOT = Path(__file__).resolve().parents[2]
CELLS = [c.name for c in MINI.cells(backend="tinker")]
STORE = 2 * (2 + 2 + 2 + 2) + 1 + 1
"""Per cell 2 checkpoints, 2 resume states, 2 scores, logs and rollouts; the base's score; the report."""
PATIENCE_S = 900


@pytest.fixture
def service(tmp_path):
    with TinkerServer(ROOT / "training/sums_model", MINI.cells(backend="tinker")[0], MODELS["sums"].source) as served:
        served.scratch = str(tmp_path)
        yield served


@pytest.mark.prefect
@pytest.mark.slow
def test_killed_in_its_middle_it_goes_on_to_a_whole_report(prefect_server, service, tmp_path, wait_for):
    runs, log = tmp_path / "runs", tmp_path / "log"
    env = {"TINKER_BASE_URL": service.url, "TINKER_API_KEY": "tml-test", "TINKER_TELEMETRY": "0"}
    env["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    words = ("tinker_flow", "run", "score_centering", "--backend", "tinker", "--runs", str(runs), "--json")

    first = prefect_server.start(*words, log=log, **env)
    third = [runs / name / "rollouts" / "step_000003.parquet" for name in CELLS]
    wait_for(lambda: any(p.exists() for p in third) or first.poll() is not None, PATIENCE_S, "a third step", 0.02)
    assert first.poll() is None, log.read_text()
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    found = (runs / "store").rglob("MANIFEST.json")
    whole = {p: p.read_bytes() for p in found if not {"resume", "reports"} & {*p.parts}}

    service.faults += [("/optim_step", 503), ("/asample", 429), ("/create_session", 500)]
    second = prefect_server.start(*words, log=tmp_path / "second", **env)
    assert second.wait(PATIENCE_S) == 0, (tmp_path / "second").read_text()
    answer = json.loads((tmp_path / "second").read_text().splitlines()[-1])
    assert answer["completed"] and [*answer["cells"]] == CELLS

    found = open_store(str(runs / "store")).verify()
    assert (found.ok, found.folders) == (True, STORE), found
    assert all(p.read_bytes() == before for p, before in whole.items())
    for name in CELLS:
        steps = [json.loads(line) for line in (runs / name / "logs/steps.jsonl").read_text().splitlines()]
        assert [s["global_step"] for s in steps] == [1, 2, 3, 4]
        assert (steps[0]["sampler"]["head_mass"] is not None) == ("center" in name)
        assert "Traceback" not in (runs / name / "train.log").read_text()
    *killed, last, end = service.ends.values()  # a killed flow's trainers are told to stop, and may get to say so
    assert (last, end) == ("success", "success") and {*killed} <= {"interrupted"}

    report = runs / "store/reports/score_centering"
    finding, result = (json.loads((report / f"{n}.json").read_text()) for n in ("finding", "result"))
    assert finding["verdict"] == "failed" and finding["missing"] == [] and len(finding["limbs"]) == 4
    assert None not in result.values() and result["sc_topk_k"] == 32
    assert service.adams and all(a == service.adams[0] for a in service.adams)
    assert (service.adams[0]["beta2"], service.adams[0]["eps"]) == (0.95, 1e-12)


@pytest.mark.parametrize(
    ("key", "url", "line"),
    [
        ("", "http://127.0.0.1:9", "error: TINKER_API_KEY=: there is no key for the service; set it, or"),
        ("tml-x", "http://127.0.0.1:9", "error: TINKER_BASE_URL=http://127.0.0.1:9: <urlopen error [Errno 111]"),
        ("tml-x", "tinker.example", "error: TINKER_BASE_URL=tinker.example: unknown url type"),
        ("tml-x", "http://tinker .example", "error: TINKER_BASE_URL=http://tinker .example: URL can't contain"),
    ],
)
def test_a_service_that_cannot_be_used_is_refused_before_anything_is_done(
    monkeypatch, capsys, tmp_path, key, url, line
):
    monkeypatch.setitem(EXPERIMENTS, MINI.name, MINI)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TINKER_CREDENTIAL_CMD", raising=False)
    monkeypatch.setenv("TINKER_API_KEY", key)
    monkeypatch.setenv("TINKER_BASE_URL", url)
    assert main(["run", "score_centering", "--backend", "tinker", "--runs", str(tmp_path / "runs")]) == 3
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith(line)
    assert not list((tmp_path / "runs").rglob("*.json*"))


def test_without_the_sdk_it_is_refused_too(monkeypatch, capsys, tmp_path):
    import tasks.data

    monkeypatch.setitem(EXPERIMENTS, MINI.name, MINI)
    monkeypatch.setattr(tasks.data.importlib.util, "find_spec", lambda name: None)
    assert main(["run", "score_centering", "--backend", "tinker", "--runs", str(tmp_path / "runs")]) == 3
    assert capsys.readouterr().err == "error: backend=tinker: its SDK is not installed; pip install '.[tinker]'\n"
