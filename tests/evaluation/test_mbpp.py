"""MBPP's and MBPP+'s files: quirks, forms, and what is refused."""

import gzip
import json
from pathlib import Path

import pytest

from evaluation.errors import InputError
from evaluation.problems import mbpp as module
from evaluation.problems.mbpp import find_entry_point, load_mbpp, load_mbpp_plus, number

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
MBPP, MBPP_PLUS = DATA / "mbpp.jsonl", DATA / "MbppPlus-v0.2.0.jsonl"
needs_data = pytest.mark.skipif(not MBPP.is_file(), reason="needs the local copies of MBPP and MBPP+")


@pytest.fixture(scope="module")
def mbpp():
    return {p.number: p for p in load_mbpp(str(MBPP)).problems}


@pytest.fixture(scope="module")
def plus():
    return {p.number: p for p in load_mbpp_plus(str(MBPP_PLUS)).problems}


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, changed: list[dict]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in changed))
    return str(path)


def solves(problem) -> bool:
    scope: dict = {}
    exec(problem.reference, scope)
    exec(problem.setup, scope)
    for statement in problem.asserts:
        exec(statement, scope)
    return problem.entry_point in scope


@needs_data
def test_mbpp_has_unix_lines_and_one_statement_an_assert(mbpp):
    assert sorted(mbpp) == list(range(1, 975))
    for p in mbpp.values():
        assert "\r" not in p.model_dump_json()
        assert len(p.asserts) == 3
        assert all(a == a.strip() and a.startswith("assert") for a in p.asserts)
        assert p.text == p.text.strip() != ""


@needs_data
@pytest.mark.parametrize("i", [1, 12, 56, 104, 126, 255, 367, 593, 601, 732, 899, 927])
def test_quirky_references_pass_their_asserts(mbpp, i):
    """Globals, `check`, lone CR, `sum`, set-up code, classes: each runs as stored."""
    assert solves(mbpp[i])


@needs_data
def test_entry_points_are_defined_by_the_references(mbpp, plus):
    for p in [*mbpp.values(), *plus.values()]:
        assert f"def {p.entry_point}(" in p.reference.replace(" (", "("), p.problem_id
    assert mbpp[927].entry_point == "max_height"
    assert mbpp[126].entry_point == "sum"
    # EVAL-117: MBPP+ renamed 14 functions, so MBPP's names, tests and solutions must not stand in for its own.
    assert sum(mbpp[i].entry_point != p.entry_point for i, p in plus.items()) == 14


@needs_data
def test_plus_problems_show_an_assert_that_names_the_function(plus):
    """EVAL-116: also in the ten whose `assertion` starts with an import."""
    for p in plus.values():
        assert p.asserts[0].startswith("assert ")
        assert p.entry_point in p.asserts[0]
        assert "assert" not in p.text
        assert not p.text.startswith(("'", '"'))
    assert plus[82].setup == "import math"
    assert plus[82].asserts[0].startswith("assert math.isclose(volume_sphere(10)")
    assert {143, 164, 229}.isdisjoint(plus)  # EVAL-119
    assert sum(len(p.base_inputs) + len(p.plus_inputs) for p in plus.values()) == 41_015


@needs_data
def test_the_released_form_gives_the_same_problems(tmp_path, plus):
    """The released file shows the first assert in a prompt with other quotes; all else is equal."""
    released = rows(MBPP_PLUS)
    for r in released:
        r["prompt"] = f'"""\n{r["prompt"][3:-3].strip()}\n{plus[number(r["task_id"])].asserts[0]}\n"""\n'
    path = tmp_path / "MbppPlus.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in released).encode()))
    assert {p.number: p for p in load_mbpp_plus(str(path)).problems} == plus


@needs_data
def test_an_assert_in_the_prompt_comes_first(tmp_path, plus):
    """EVAL-116: the released file may show another assert than the first of `assertion`."""
    changed = rows(MBPP_PLUS)
    changed[1]["prompt"] = '"""\nWrite it.\nassert is_not_prime(2) == False\n"""\n'
    found = load_mbpp_plus(write(tmp_path / "x.jsonl", changed)).problems[1]
    assert (found.text, found.asserts[0]) == ("Write it.", "assert is_not_prime(2) == False")
    assert sorted(found.asserts) == sorted(plus[3].asserts)


@needs_data
def test_order_line_ends_and_trailing_blanks_do_not_matter(tmp_path, mbpp):
    changed = rows(MBPP)[::-1]
    for r in changed:
        r["code"] = r["code"].replace("\r\n", "\n")
        r["test_list"] = [t + " " for t in r["test_list"]]
    assert [p.number for p in load_mbpp(write(tmp_path / "m.jsonl", changed)).problems] == sorted(mbpp)


def drop(data):
    return data[:-1]


def older(data):
    return data + [dict(data[0], task_id=f"Mbpp/{10_000 + i}") for i in range(21)]


def twice(data):
    return [*data[:-1], data[0]]


def one_test_less(data):
    return [dict(data[0], plus_input=data[0]["plus_input"][:-1]), *data[1:]]


def other_assert(data):
    return [dict(data[0], test_list=["assert True"] * 3), *data[1:]]


def no_field(data):
    return [{k: v for k, v in data[0].items() if k != "task_id"}, *data[1:]]


def other_types(data):
    return [dict(data[0], task_id="six"), dict(data[1], task_id=None, text=3), *data[2:]]


@needs_data
@pytest.mark.parametrize(
    ("load", "source", "change", "reason"),
    [
        (load_mbpp_plus, MBPP_PLUS, older, "v0.1.0"),
        (load_mbpp_plus, MBPP_PLUS, drop, "377 problems and not 378"),
        (load_mbpp_plus, MBPP_PLUS, twice, "differ from v0.2.0"),
        (load_mbpp_plus, MBPP_PLUS, one_test_less, "differ from v0.2.0"),
        (load_mbpp_plus, MBPP_PLUS, no_field, "row 1 has no 'task_id'"),
        (load_mbpp_plus, MBPP_PLUS, other_types, "differ from v0.2.0"),
        (load_mbpp, MBPP, drop, "973 problems and not 974"),
        (load_mbpp, MBPP, twice, "differ from MBPP"),
        (load_mbpp, MBPP, other_assert, "differ from MBPP"),
        (load_mbpp, MBPP, other_types, "differ from MBPP"),
        (load_mbpp, MBPP_PLUS, list, "378 problems and not 974"),
    ],
)
def test_wrong_files_are_refused_with_the_reason(tmp_path, load, source, change, reason):
    with pytest.raises(InputError, match=reason) as error:
        load(write(tmp_path / "wrong.jsonl", change(rows(source))))
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b"{\n"),
        ("a.jsonl", b"[1]\n"),
        ("a.jsonl", b"\xff\xfe"),
        ("a.jsonl.gz", b"no"),
        ("a.jsonl.gz", gzip.compress(b"{}" * 1000, mtime=0)[:-9]),
        ("a.jsonl", b""),
    ],
    ids=["open brace", "no object", "no utf-8", "no gzip", "gzip cut short", "empty"],
)
def test_files_that_are_no_json_lines_are_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    for load in (load_mbpp, load_mbpp_plus):
        with pytest.raises(InputError):
            load(str(tmp_path / name))


def test_a_missing_file_names_the_flag(tmp_path):
    with pytest.raises(InputError, match="--mbpp-plus FILE"):
        load_mbpp_plus(str(tmp_path / "none"))


@needs_data
def test_released_bytes_are_accepted_by_their_hash(monkeypatch, tmp_path):
    """Should a float in the released file print otherwise than in a rebuilt one, its known bytes still count."""
    path = write(tmp_path / "p.jsonl", one_test_less(rows(MBPP_PLUS)))
    monkeypatch.setattr(module, "MBPP_PLUS_RELEASED", module._read_jsonl("mbpp_plus", Path(path))[1])
    assert len(load_mbpp_plus(path).problems) == 378


@pytest.mark.parametrize(
    ("asserts", "name"),
    [
        (["assert f(1) == 2"], "f"),
        (["assert (max_height(root)) == 3", "assert (max_height(root1)) == 5 "], "max_height"),
        (["assert set(f((1, 2))) == set((1,))", "assert set(f((3,))) == set()"], "f"),
        (["assert chain([Pair(5, 24)], 4) == 3", "assert chain([Pair(1, 2)], 4) == 3"], "chain"),
        (["assert sum(10,15)==6"], "sum"),
        (["assert not f(1)", "assert f(2)"], "f"),
        (["assert math.isclose(f(1), 2.0)"], "f"),
        (["assert f(g(1)) == 2", "assert f(2) == 2"], "f"),
    ],
)
def test_entry_point_is_read_from_the_asserts(asserts, name):
    assert find_entry_point(asserts) == name


def test_ids_of_both_files_are_the_same_numbers():
    """SPLIT-003."""
    assert {number(5), number(6)} - {number("Mbpp/6")} == {5}
