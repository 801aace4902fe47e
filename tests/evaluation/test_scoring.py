"""Scoring a file of samples: EvalPlus's format in, EvalPlus's and ours out; every bad file refused before judging."""

import json

import pytest

from evaluation.errors import InputError
from evaluation.records import Outcome, Problem
from evaluation.scoring import evalplus_word, score_samples

RIGHT, WRONG = "def f(x):\n    return 2 * x\n", "def f(x):\n    return x\n"


@pytest.fixture
def problems():
    return [
        Problem(
            problem_id=f"Test/{i}", text="double it", entry_point="f", reference=RIGHT, asserts=("assert f(2) == 4",),
            base_inputs=[[2]], plus_inputs=[[3], [-1]],
        )
        for i in (1, 2)
    ]  # fmt: skip


def write(path, rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def test_scores_in_both_formats(tmp_path, problems):
    rows = [{"task_id": "Test/1", "solution": RIGHT}, {"task_id": "Test/2", "completion": WRONG}]
    score = score_samples(write(tmp_path / "s.jsonl", rows), "toy", problems, tmp_path / "out", cache=tmp_path / "c")
    assert score.pass_at_k["plus"]["1"].value == 0.5
    assert {p: (c.n, c.base, c.plus) for p, c in score.problems.items()} == {"Test/1": (1, 1, 1), "Test/2": (1, 0, 0)}
    verdicts = [json.loads(x) for x in (tmp_path / "out/verdicts.jsonl").read_text().splitlines()]
    assert [(v["task_id"], v["base"], v["plus"]) for v in verdicts] == [
        ("Test/1", "pass", "pass"),
        ("Test/2", "fail", "fail"),
    ]
    theirs = json.loads((tmp_path / "out/s_eval_results.json").read_text())
    assert set(theirs) == {"date", "hash", "eval"}
    assert set(theirs["eval"]["Test/2"][0]) == {
        "task_id", "solution", "base_status", "plus_status", "base_fail_tests", "plus_fail_tests",
    }  # fmt: skip
    assert theirs["eval"]["Test/2"][0]["plus_fail_tests"] == [[3]]
    assert theirs["eval"]["Test/1"][0]["base_status"] == "pass"


def test_changed_samples_are_judged_again(tmp_path, problems):
    """EVAL-113: neither an old result file nor a remembered verdict decides."""
    path = tmp_path / "s.jsonl"
    for source, value in ((WRONG, 0.0), (RIGHT, 1.0)):
        rows = [{"task_id": p.problem_id, "solution": source} for p in problems]
        score = score_samples(write(path, rows), "toy", problems, tmp_path, cache=tmp_path / "c")
        assert score.pass_at_k["plus"]["1"].value == value


@pytest.mark.parametrize(
    ("rows", "field", "words"),
    [
        ([], "samples", "no samples"),
        (["{not json"], "samples", "line 1"),
        ([{"solution": RIGHT}], "task_id", "missing"),
        ([{"task_id": "Test/9", "solution": RIGHT}], "task_id", "not a problem"),
        ([{"task_id": "Test/1", "solution": [RIGHT, WRONG]}], "solution", "list"),
        ([{"task_id": "Test/1", "solution": RIGHT, "completion": RIGHT}], "solution", "both"),
        ([{"task_id": "Test/1"}], "solution", "neither"),
        ([{"task_id": "Test/1", "solution": RIGHT}], "samples", "1 problems have no sample"),
        ([{"task_id": f"Test/{i}", "solution": RIGHT} for i in (1, 2, 2)], "samples", "duplicates"),
        (
            [{"task_id": f"Test/{i}", "solution": RIGHT, "_identifier": "a"} for i in (1, 2, 2)],
            "_identifier",
            "repeats",
        ),
    ],
)
def test_bad_files_are_refused(tmp_path, problems, rows, field, words):
    """EXTRACT-052 among them: a list of programs is no program."""
    with pytest.raises(InputError) as refusal:
        score_samples(write(tmp_path / "s.jsonl", rows), "toy", problems, tmp_path / "out")
    assert refusal.value.field == field
    assert words in str(refusal.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"\xd3\x00", b'{"task_id": "Test/1", "solution": "\xff"}\n', b"\x1f\x8b\x08" * 9])
def test_a_binary_file_is_refused(tmp_path, problems, content):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"samples=line 1 of samples.jsonl"):
        score_samples(path, "toy", problems, tmp_path)


def test_json_without_end_is_refused(tmp_path, problems):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"task_id": "Test/1", "solution": "", "more": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(InputError, match=r"samples=line 1 of samples.jsonl: not JSON"):
        score_samples(path, "toy", problems, tmp_path)


def test_k_beyond_the_samples_is_refused(tmp_path, problems):
    rows = [{"task_id": p.problem_id, "solution": RIGHT} for p in problems]
    with pytest.raises(InputError, match="k=10"):
        score_samples(write(tmp_path / "s.jsonl", rows), "toy", problems, tmp_path, ks=(1, 10))


def test_a_k_that_a_problem_lacks_names_the_problem(tmp_path, problems):
    rows = [{"task_id": p.problem_id, "solution": RIGHT} for p in problems]
    with pytest.raises(InputError, match="Test/1 has 1 samples"):
        score_samples(write(tmp_path / "s.jsonl", rows), "toy", problems, tmp_path, ks=(2,))


def test_duplicates_are_told_before_what_is_missing(tmp_path, problems):
    more = [*problems, problems[0].replace(problem_id="Test/3")]
    rows = [{"task_id": f"Test/{i}", "solution": RIGHT} for i in (1, 2, 2)]
    with pytest.raises(InputError, match="duplicates"):
        score_samples(write(tmp_path / "s.jsonl", rows), "toy", more, tmp_path)


def test_a_partial_file_may_have_problems_of_other_benchmarks_and_says_how_many(tmp_path, problems):
    rows = [{"task_id": t, "solution": RIGHT} for t in ("Other/1", "Test/1", "Other/2", "Test/2")]
    path = write(tmp_path / "s.jsonl", rows)
    score = score_samples(path, "toy", problems, tmp_path, partial=True, cache=tmp_path / "c")
    assert (score.num_unknown, score.num_problems, score.num_planned) == (2, 2, None)
    assert score.pass_at_k["plus"]["1"].value == 1.0
    verdicts = [json.loads(x)["task_id"] for x in (tmp_path / "verdicts.jsonl").read_text().splitlines()]
    assert verdicts == ["Test/1", "Test/2"]
    with pytest.raises(InputError, match="no samples"):
        score_samples(write(path, rows[:1]), "toy", problems, tmp_path, partial=True)


def test_a_partial_file_says_how_much_it_is(tmp_path, problems):
    rows = [{"task_id": "Test/1", "solution": RIGHT}] * 2
    score = score_samples(
        write(tmp_path / "s.jsonl", rows), "toy", problems, tmp_path, partial=True, cache=tmp_path / "c"
    )
    assert (score.num_problems, score.num_planned) == (1, 2)


def test_evalplus_words():
    assert evalplus_word("base", Outcome.TIMEOUT, "base: test 0: time limit; plus: suite: time limit") == "fail"
    assert evalplus_word("plus", Outcome.TIMEOUT, "base: test 0: time limit; plus: suite: time limit") == "timeout"
    assert evalplus_word("base", Outcome.FAIL, "base: ended without an answer") == "timeout"
    assert evalplus_word("plus", None, "") is None


@pytest.mark.parametrize("name", ["verdicts.jsonl", "score.json"])
def test_results_never_replace_the_samples(tmp_path, name):
    samples = tmp_path / name
    samples.write_text("{}\n")
    with pytest.raises(InputError, match="would be overwritten by the results"):
        score_samples(samples, "toy_plus", [], tmp_path)
    assert samples.read_text() == "{}\n"
