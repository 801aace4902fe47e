"""Every known fault of a grader or the orchestrator is a test, or cannot occur for a reason that is written down."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAULTS = ROOT.parent / "shared/cases/faults.jsonl"


@pytest.mark.skipif(not FAULTS.is_file(), reason="the fault cases are not beside the checkout")
@pytest.mark.parametrize("area", ["sandbox", "reward", "extract", "eval", "orchestration", "passk", "report", "split"])
def test_every_fault_is_named(area):
    here = Path(__file__)
    text = "".join(p.read_text() for p in sorted((ROOT / "tests").rglob("*.py")) if p != here)
    text += (ROOT / "docs/judge.md").read_text()
    ids = [r["id"] for r in map(json.loads, FAULTS.read_text().splitlines()) if r["area"] == area]
    assert ids
    missing = [i for i in ids if not re.search(r"{}-(\d+, )*{}\b".format(*i.split("-")), text)]
    assert missing == []
