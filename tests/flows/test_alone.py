"""One process a flow run, one flow run a folder of runs."""

import json
import urllib.request

import pytest

from evaluation.errors import InputError
from flows.ablation import alone


def test_another_flow_run_is_refused_and_the_same_one_steps_aside(monkeypatch, tmp_path):
    from prefect.exceptions import Abort

    monkeypatch.setattr("flows.ablation.LOCK_PATIENCE_S", 0.0)
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "mine")
    with alone(tmp_path):
        with pytest.raises(Abort, match="goes on in another process"), alone(tmp_path):
            pass
        monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "other")
        with pytest.raises(InputError, match="another run is at work"), alone(tmp_path):
            pass
    with alone(tmp_path):
        pass


@pytest.mark.prefect
def test_who_steps_aside_leaves_the_state_to_who_is_at_work(prefect_server, monkeypatch, tmp_path):
    from prefect import flow
    from prefect.exceptions import Abort
    from prefect.runtime import flow_run
    from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings

    monkeypatch.setattr("flows.ablation.LOCK_PATIENCE_S", 0.0)
    seen = []

    @flow
    def twice():
        seen.append(flow_run.get_id())
        with alone(tmp_path), alone(tmp_path):
            raise AssertionError("both are at work")

    here = {PREFECT_API_URL: prefect_server.url, PREFECT_LOGGING_TO_API_ENABLED: False}
    with temporary_settings(here), pytest.raises(Abort):
        twice()
    with urllib.request.urlopen(f"{prefect_server.url}/flow_runs/{seen[0]}", timeout=60) as answer:
        assert json.load(answer)["state_type"] == "RUNNING"
