"""What training problems share with the evaluated ones."""

import csv
from pathlib import Path

import pytest

from evaluation.contamination import find_contamination, find_overlaps, passes_with_constant
from evaluation.problems import prepare
from evaluation.records import Problem

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
PARTS = {"mbpp_plus": "plus", "mbpp_test276": "test"}


def problem(i: int, entry_point: str, *asserts: str) -> Problem:
    return Problem(problem_id=f"Mbpp/{i}", text="t", entry_point=entry_point, reference="", asserts=asserts)


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the local copies of MBPP and MBPP+")
def test_the_real_overlaps(tmp_path):
    """71 pairs touching 40 and 44 problems, 57 with the 276; each pair as listed independently."""
    found = prepare(
        "mbpp", 0, ["mbpp_plus"], tmp_path, str(DATA / "mbpp.jsonl"), str(DATA / "MbppPlus-v0.2.0.jsonl")
    ).contamination
    assert found.touched["mbpp_plus"].model_dump() == {"pairs": 71, "train": 40, "evaluation": 44}
    assert found.touched["mbpp_test276"].pairs == 57
    assert len(found.clean["mbpp_plus"]) == 334
    assert found.constant_passable == ("Mbpp/667", "Mbpp/674", "Mbpp/816", "Mbpp/899")
    with (DATA / "overlaps.csv").open() as f:
        listed = {(r["train_id"], r["evaluation_id"], r["part"], r["shared_asserts"]) for r in csv.DictReader(f)}
    assert listed == {
        (o.train_id[5:], o.evaluation_id[5:], PARTS[o.benchmark], str(o.shared_asserts)) for o in found.overlaps
    }


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the local copies of MBPP and MBPP+")
def test_the_real_near_duplicates_are_those_of_the_docs(tmp_path):
    found = prepare(
        "mbpp", 0, ["mbpp_plus"], tmp_path, str(DATA / "mbpp.jsonl"), str(DATA / "MbppPlus-v0.2.0.jsonl")
    ).contamination
    parts = (Path(__file__).resolve().parents[2] / "docs/near_duplicates.md").read_text().split("## ")[1:]
    listed, clusters = {}, {}
    for part in parts:
        benchmark = next(b for b in PARTS if b in part.splitlines()[0])
        text = part.splitlines()[4].rstrip(".")
        if part.startswith("Among"):
            clusters[benchmark] = tuple(tuple(f"Mbpp/{i}" for i in g.split()) for g in text.split("; "))
            continue
        for train, pairs in (group.split(": ") for group in text.split("; ")):
            listed |= {
                (benchmark, train, p.split(" (")[0]): float(p.split(" (")[1].rstrip(")")) for p in pairs.split(", ")
            }
    assert clusters == found.clusters
    seen = {(d.benchmark, d.train_id[5:], d.evaluation_id[5:]): d.jaccard for d in found.near}
    assert listed.keys() == seen.keys() and all(abs(listed[k] - seen[k]) < 0.006 for k in seen)


def test_rule_ignores_the_name_and_the_spelling_only():
    train = [problem(1, "add", "assert add(1,2)==3", "assert add( 2, 2 ) == 4", "assert add(3, 3) == 6")]
    same = problem(2, "plus", "assert (plus(1, 2)) == 3", "assert plus(2,2)==4", "assert plus(9, 9) == 18")
    swapped = problem(3, "plus", "assert 3 == plus(1, 2)", "assert plus(2, 1) == 3", "assert add(1, 2) == 3")
    overlaps = find_overlaps(train, [same, swapped], "b")
    assert [(o.train_id, o.evaluation_id, o.shared_asserts) for o in overlaps] == [("Mbpp/1", "Mbpp/2", 2)]
    found = find_contamination(train, {"b": [same, swapped]})
    assert found.clean == {"b": ("Mbpp/3",)}


def test_a_repeated_assert_counts_once():
    train = [problem(1, "f", "assert f(1) == 1", "assert f(1) == 1")]
    assert find_overlaps(train, [problem(2, "g", "assert g(1) == 1", "assert g(1)==1")], "b")[0].shared_asserts == 1


@pytest.mark.parametrize(
    ("asserts", "constant"),
    [
        (["assert f(1) == 2", "assert f(2) == 2"], True),
        (["assert f(1) == 2", "assert f(2) == 3"], False),
        (["assert f(1) == ()", "assert f(2) == ()"], True),
        (["assert f(1) == -1", "assert f(2) == -1"], True),
        (["assert f(1) == g(2)", "assert f(2) == g(2)"], False),
        (["assert f(1) == True", "assert f(2) == 1"], True),
        (["assert f(1) != 2", "assert f(2) != 2"], False),
        (["assert f(1)", "assert f(2)"], False),
    ],
)
def test_constant_passable(asserts, constant):
    """REWARD-017; only asserts `f(..) == literal` are looked at, the one form that training problems have."""
    assert passes_with_constant(problem(1, "f", *asserts)) is constant
