"""What `make deploy` puts on a server, and what it says when there is none."""

import json
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
    from typing import get_args

    from flows.experiments import EXPERIMENTS, FLOWS
    from flows.lr_ablation import lr_ablation
    from flows.parameters import Parameters
    from flows.reevaluation import re_evaluation
    from flows.score_centering import score_centering

    words, others = lr_ablation.fn.__annotations__, score_centering.fn.__annotations__
    rules = {e.name: e.criterion.rule for e in EXPERIMENTS.values()}
    assert set(get_args(words["experiment"])) == {n for n, rule in rules.items() if rule == "boundary"}
    assert set(get_args(others["experiment"])) == {n for n, rule in rules.items() if rule == "drop"}
    assert set(get_args(re_evaluation.fn.__annotations__["experiment"])) == set(EXPERIMENTS)
    assert (set(words) | set(others)) - {"return"} == set(Parameters.model_fields) - {"end_by"}
    assert {f.name for f in (lr_ablation, score_centering)} == set(FLOWS.values())


def test_no_server_is_one_line(prefect_server):
    done = prefect_server.run("flows.deploy", PREFECT_API_URL="http://127.0.0.1:9/api")
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith("error: PREFECT_API_URL=http://127.0.0.1:9/api: does not answer")
    assert "Traceback" not in done.stderr


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
