"""What `make deploy` puts on a server, and what it says when there is none."""

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILE = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())


def ask(server, path, body=None):
    request = urllib.request.Request(
        f"{server.url}{path}", json.dumps(body or {}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_entry_points_are_modules_that_hold_flows():
    from prefect import Flow
    from prefect.utilities.importtools import import_object

    for d in FILE["deployments"]:
        assert "/" not in d["entrypoint"] and ":" not in d["entrypoint"]
        found = import_object(d["entrypoint"])
        assert isinstance(found, Flow)
        assert set(d.get("parameters", {})) <= set(found.parameters.properties)


def test_the_form_offers_every_experiment_and_every_parameter():
    from flows.experiments import EXPERIMENTS, FLOWS
    from flows.lr_ablation import lr_ablation
    from flows.parameters import Parameters
    from flows.reevaluation import re_evaluation
    from flows.score_centering import score_centering
    from training.cell import MODELS

    rules = {e.name: e.criterion.rule for e in EXPERIMENTS.values()}
    offered = set()
    for found, rule in ((lr_ablation, "boundary"), (score_centering, "drop")):
        form = found.parameters.properties
        assert form["experiment"]["enum"] == [n for n, r in rules.items() if r == rule]
        assert form["model"]["anyOf"][0]["enum"] == [*MODELS]
        assert sorted(form, key=lambda name: form[name]["position"]) == [*found.fn.__annotations__][:-1]
        offered |= set(form)
    assert offered == set(Parameters.model_fields) - {"end_by"}
    assert re_evaluation.parameters.properties["experiment"]["enum"] == [*EXPERIMENTS]
    assert {f.name for f in (lr_ablation, score_centering)} == set(FLOWS.values())


def test_no_server_is_one_line(prefect_server):
    done = prefect_server.run("flows.deploy", PREFECT_API_URL="http://127.0.0.1:9/api")
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith("error: PREFECT_API_URL=http://127.0.0.1:9/api: does not answer")
    assert "Traceback" not in done.stderr


def test_a_living_run_is_never_taken_for_lost_however_it_was_started_nor_another_s():
    from prefect.utilities.importtools import import_object

    from tasks.settings import PREFECT_DEFAULTS

    (lost,) = yaml.safe_load((ROOT / "deployments/automations.yaml").read_text())["automations"]
    every = {d["work_pool"]["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] for d in FILE["deployments"]}
    assert every == {PREFECT_DEFAULTS["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]} == {"30"}
    assert lost["trigger"]["within"] >= 30 + 60 + 60  # a heartbeat, a minute without a server, and its start
    named = lost["trigger"]["match_related"]["prefect.resource.name"]
    assert set(named) == {import_object(d["entrypoint"]).name for d in FILE["deployments"]}


def test_every_ablation_is_restarted_and_once_a_death():
    from flows.experiments import FLOWS

    (restart,) = yaml.safe_load((ROOT / "deployments/restart.yaml").read_text())["automations"]
    trigger = restart["trigger"]
    assert set(trigger["match_related"]["prefect.resource.name"]) == set(FLOWS.values())
    assert (trigger["posture"], trigger["after"]) == ("Proactive", ["prefect.flow-run.Crashed"])
    assert trigger["within"] >= 30  # by then a worker has told of the death a second time


@pytest.mark.prefect
def test_deploying_twice_makes_everything_once(deployed):
    again = deployed.run("flows.deploy")
    assert again.returncode == 0, again.stderr
    names = sorted(d["name"] for d in ask(deployed, "/deployments/filter"))
    assert names == sorted(["full", "full", "ladder", "smoke", "smoke", "micro", "nightly", "gpu", "eval"])
    pools = {p["name"]: p["type"] for p in ask(deployed, "/work_pools/filter")}
    assert {"control", "gpu", "eval"} <= {n for n, kind in pools.items() if kind == "process"}
    automations = [a["name"] for a in ask(deployed, "/automations/filter")]
    assert sorted(automations) == ["ablation-lost-runs", "ablation-restart-crashed"]


@pytest.mark.prefect
def test_the_form_knows_words_and_bounds(deployed):
    full = next(d for d in ask(deployed, "/deployments/filter") if d["name"] == "full")
    properties = full["parameter_openapi_schema"]["properties"]
    assert {"experiment", "store", "model", "seeds", "cells", "max_parallel_cells", "mbpp", "mbpp_plus"} <= set(
        properties
    )
    assert "full" in json.dumps(properties["experiment"]) and "enum" in json.dumps(properties["experiment"])
    assert all(p.get("description") for p in properties.values()), properties
    assert '"minimum": 1' in json.dumps(properties["seeds"])
    assert "qwen3_1p7b_base" in json.dumps(properties["model"])
    assert full["tags"] == ["ablation", "full"]


@pytest.mark.prefect
@pytest.mark.parametrize(
    ("name", "value"), [("experiment", "nope"), ("model", "gpt2"), ("seeds", 0), ("max_parallel_cells", 0)]
)
def test_a_wrong_value_is_refused_by_the_server_before_a_run_exists(deployed, name, value):
    full = next(d for d in ask(deployed, "/deployments/filter") if d["name"] == "full")
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(deployed, f"/deployments/{full['id']}/create_flow_run", {"parameters": {name: value}})
    assert refused.value.code in {409, 422} and name in refused.value.read().decode()


@pytest.mark.prefect
@pytest.mark.parametrize(("pool", "file"), [("docker", "docker-job.yaml"), ("kubernetes", "kubernetes/job.yaml")])
def test_a_pool_of_another_type_is_kept(deployed, pool, file):
    """What the recipes say: the server takes the template, and deploying leaves the pool as it is."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.deploy import make_pool

    template = yaml.safe_load((ROOT / "deployments" / file).read_text())
    with temporary_settings({PREFECT_API_URL: deployed.url}), get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name=f"recipe-{pool}", type=pool, base_job_template=template))
        make_pool(client, f"recipe-{pool}", "another description")
        found = client.read_work_pool(f"recipe-{pool}")
    assert (found.type, found.base_job_template) == (pool, template)
