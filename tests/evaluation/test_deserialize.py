"""Inputs are the objects that EvalPlus makes of them."""

import json
from pathlib import Path

import pytest

from evaluation.judge import deserialize

SHARED = Path(__file__).resolve().parents[2].parent / "shared"


@pytest.mark.skipif(not SHARED.is_dir(), reason="the data files are not beside the checkout")
def test_all_inputs_are_evalplus_own():
    from evalplus.data.mbpp import mbpp_deserialize_inputs

    rows = list(map(json.loads, (SHARED / "data/MbppPlus-v0.2.0.jsonl").read_text().splitlines()))
    assert len(rows) == 378
    for row in rows:
        for raw in (row["base_input"], row["plus_input"]):
            expected = mbpp_deserialize_inputs(row["task_id"], raw) if raw else []
            assert repr(deserialize.inputs(row["task_id"], raw)) == repr(expected), row["task_id"]


def test_other_benchmarks_inputs_stay_as_they_are():
    assert deserialize.inputs("HumanEval/2", [[[1, 2]]]) == [[[1, 2]]]
    assert deserialize.inputs("Toy/2", [[[1, 2]]]) == [[[1, 2]]]
    assert deserialize.inputs("Mbpp/793", {}) == []
