"""The drop experiment through the whole flow: a spent budget ends it as incomplete; the miniature gives every limb."""

import json

import pytest

pytestmark = pytest.mark.prefect

NAME = "score_centering_smoke"
PAIR = "sums_sums_plain_lr3e4,sums_sums_center_lr3e4"


def run(server, runs, *words):
    argv = ("flows.cli", "run", NAME, "--runs", str(runs), "--json", *words)
    done = server.run(*argv, timeout=1500)
    assert done.stdout.strip(), done.stderr[-2000:]
    return done.returncode, json.loads(done.stdout), done.stderr


def test_a_spent_budget_ends_cleanly_as_incomplete(prefect_server, tmp_path):
    """The base is scored, nothing trains, the report says why; a rerun is no way around it."""
    (tmp_path / "wall.json").write_text('{"schema": "wall/1", "seconds": 1000000}')
    code, document, stderr = run(prefect_server, tmp_path, "--cells", PAIR, "--seeds", "1")
    assert (code, document["completed"]) == (1, False), stderr
    assert "budget of 30 minutes" in document["message"] and "run it again" not in document["message"]
    assert set(document["cells"].values()) == {"incomplete"}
    report = tmp_path / "store" / "reports" / NAME
    finding = json.loads((report / "finding.json").read_text())
    assert finding["rule"] == "drop" and finding["verdict"] is None and len(finding["missing"]) == 2
    assert any("budget" in d for d in finding["departures"]) and any("w = 1" in d for d in finding["departures"])
    result = json.loads((report / "result.json").read_text())
    assert result["base_drop"] is None and result["wall_minutes"] > 16_000
    base = next((tmp_path / "store" / "sums" / "scores").glob("sums-*/global_step_0/score.json"))
    score = json.loads(base.read_text())
    assert score["judge_version"] == "exact/1" and score["num_problems"] == 200
    assert 0.15 < score["pass_at_k"]["base"]["1"]["value"] < 0.5
    assert not list(tmp_path.glob("sums_sums_*/train.log"))


@pytest.mark.campaign
def test_the_miniature_reports_every_limb(prefect_server, tmp_path):
    """Minutes on two cores: both arms and their control, two seeds each."""
    code, document, stderr = run(prefect_server, tmp_path)
    assert code == 0, stderr
    report = tmp_path / "store" / "reports" / NAME
    finding = json.loads((report / "finding.json").read_text())
    assert finding["verdict"] in {"validated", "failed", "inconclusive"} and finding["missing"] == []
    names = ["treatment_drop", "drop_difference", "final_difference", "baseline_drop"]
    assert [limb["name"] for limb in finding["limbs"]] == names
    assert [limb["name"] for control in finding["controls"].values() for limb in control["limbs"]] == names
    result = json.loads((report / "result.json").read_text())
    assert None not in result.values() and result["sc_topk_k"] == 32
    assert len(document["cells"]) == 8
