"""GSM8K: its files, its split, its prompt, and verdicts that are the judge's in form."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from evaluation.errors import InputError, MachineError
from evaluation.exact import ExactMatch, audit, open_judge
from evaluation.problems import BENCHMARKS, load_benchmark, prepare, read_problems
from evaluation.problems.gsm8k import gold_of, load_gsm8k
from evaluation.prompts import ANSWER_INSTRUCTION, PromptSpec, extract, render
from evaluation.records import Outcome, Problem, Program
from evaluation.scores import build_score
from evaluation.scoring import score_samples

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs the local copy of GSM8K")
SPEC = PromptSpec(
    name="gsm8k/1", rendering="chat", instruction=ANSWER_INSTRUCTION, extraction="answer/1", stop_ids=(1,)
)


def eggs(**changes: object) -> Problem:
    fields = {"problem_id": "Gsm8k/10000", "text": "How many eggs?", "entry_point": "", "reference": "#### 18"}
    return Problem.model_validate({**fields, "asserts": (), "answer": "18", **changes})


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare("gsm8k", 0, ["gsm8k"], tmp_path_factory.mktemp("gsm8k"), gsm8k=str(DATA))


@needs_data
def test_the_first_3200_train_and_all_of_test_is_held_out(prepared):
    train, test = read_problems(prepared.train), read_problems(prepared.benchmarks["gsm8k"])
    rows = [json.loads(x) for x in (DATA / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [p.text for p in train] == [r["question"].strip() for r in rows[:3200]]
    assert [p.number for p in train] == list(range(3200))
    assert [p.number for p in test] == list(range(10_000, 11_319))
    assert prepared.split.counts.model_dump() == {"train": 3200, "plus": 0, "test": 1319, "canonical_test": 1319}
    assert BENCHMARKS["gsm8k"].num_problems == 1319 and not BENCHMARKS["gsm8k"].has_plus
    assert prepared.contamination.constant_passable == () and "statements" in prepared.contamination.rule
    assert prepared.contamination.touched["gsm8k"].pairs == 0
    assert load_benchmark("gsm8k", gsm8k=str(DATA)) == test


@needs_data
def test_golds_are_the_numbers_after_the_only_marker_disputed_ones_too(prepared):
    """GSM8K-162: row 368 is disputed and scored against as it is, apart; GSM8K-163: nothing else is the gold."""
    test = read_problems(prepared.benchmarks["gsm8k"])
    disputed = test[368]
    assert "Erin" in disputed.text and disputed.answer == "18"
    verdicts = ExactMatch(test).judge([Program(problem_id=p.problem_id, source=p.reference) for p in test])
    assert all(v.passed for v in verdicts)
    wrong = ExactMatch(test).judge([Program(problem_id=disputed.problem_id, source="#### 10")])[0]
    score = build_score(
        label="x", cell=None, global_step=0, benchmark="gsm8k", ks=(1,), problem_ids=[p.problem_id for p in test],
        verdicts=[(0, v) for v in verdicts if v.problem_id != disputed.problem_id] + [(0, wrong)], has_plus=False,
        protocol_sha256=None, prompt_sha256=None, judge_version="exact/1",
    )  # fmt: skip
    assert score.excepted is not None and score.excepted.problems == ("Gsm8k/10368",)
    apart = score.excepted.pass_at_1["base"]
    assert score.estimate("base", 1).value == pytest.approx(1318 / 1319) and apart is not None and apart.value == 1
    assert [gold_of(a) for a in ("1 <<1+1=2>>\n#### 2,125", "#### -10")] == ["2125", "-10"]
    for answer in ("18", "#### 1\n#### 2", "#### 1.5", "#### "):
        with pytest.raises(ValueError, match="not one ####"):
            gold_of(answer)


@needs_data
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda rows: rows[:-1], "1318 problems and not 1319"),
        (lambda rows: [*rows[:-1], {"question": "?", "answer": "#### 1"}], "differ from GSM8K's"),
        (lambda rows: [rows[1], rows[0], *rows[2:]], "differ from GSM8K's"),
        (lambda rows: [{"question": rows[0]["question"]}, *rows[1:]], "row 1 has no 'answer'"),
        (lambda rows: [{**rows[0], "answer": 18}, *rows[1:]], "differ from GSM8K's"),
    ],
)
def test_other_files_are_refused(tmp_path, damage, reason):
    rows = [json.loads(x) for x in (DATA / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()]
    (tmp_path / "train.jsonl").symlink_to(DATA / "gsm8k_train.jsonl")
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(r) + "\n" for r in damage(rows)), encoding="utf-8")
    with pytest.raises(InputError, match=reason) as e:
        load_gsm8k(str(tmp_path))
    assert e.value.field == "gsm8k"


def test_a_missing_folder_or_file_is_named(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        load_gsm8k(str(tmp_path / "nope"))
    with pytest.raises(InputError, match=r"has no gsm8k_train\.jsonl"):
        load_gsm8k(str(tmp_path))


def test_without_files_and_hub_the_fix_is_named(monkeypatch):
    def offline(argv, **_):
        return subprocess.CompletedProcess(argv, 3, "", "ConnectionError: no route\n")

    monkeypatch.setattr(subprocess, "run", offline)
    with pytest.raises(MachineError, match=r"no route.*--gsm8k FOLDER"):
        load_gsm8k()


def test_the_prompt_is_a_question_in_the_models_own_chat_form_and_thinking_is_off():
    asked = {}

    def template(messages, **how):
        asked.update(how, messages=messages)
        return "<prompt>"

    assert render(SPEC, eggs(), template) == "<prompt>"
    assert asked["enable_thinking"] is False and asked["add_generation_prompt"] is True
    content = asked["messages"][0]["content"]
    assert content.endswith("\n\nHow many eggs?") and "####" in content
    assert render(SPEC.replace(name="sums/1", rendering="plain", instruction=""), eggs()) == "How many eggs?\n"


def test_a_completion_becomes_its_answers_line():
    assert extract(SPEC, "9 * 2 = 18\n#### $18.00 a day<|im_end|>", eggs()) == "#### 18"
    assert extract(SPEC, "eighteen", eggs()) == ""


def test_verdicts_have_the_judges_form():
    texts = ["#### 18", "#### 19", "", "so 9 * 2 is\n\\boxed{18}"]
    with open_judge([eggs()], suites="score") as judge:
        found = judge.judge([Program(problem_id="Gsm8k/10000", source=t) for t in texts])
    assert [v.base for v in found] == [Outcome.PASS, Outcome.FAIL, Outcome.FAIL, Outcome.PASS]
    assert [v.detail for v in found] == ["", "19 and not 18", "no answer", ""]
    assert {(v.plus, v.tests_total, v.errored) for v in found} == {(None, 1, False)}
    with pytest.raises(KeyError):
        judge.judge([Program(problem_id="Gsm8k/1", source="#### 18")])
    with pytest.raises(ValueError, match="keep benchmarks apart"):
        open_judge([eggs(), eggs(answer=None)])


def test_samples_in_evalplus_form_are_scored_whole_or_as_answers(tmp_path):
    rows = [
        {"task_id": "Gsm8k/10000", "completion": "9 * 2 = 18\n#### 18"},
        {"task_id": "Gsm8k/10001", "solution": "#### 4"},
    ]
    path = tmp_path / "s.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    problems = [eggs(), eggs(problem_id="Gsm8k/10001", answer="3")]
    score = score_samples(path, "gsm8k", problems, tmp_path / "out")
    assert score.outcomes == {"pass": 1, "fail": 1, "timeout": 0, "harness_error": 0}
    assert (score.judge_version, score.suite, score.estimate("base", 1).value) == ("exact/1", "base", 0.5)


def test_the_audit_shows_right_and_wrong_answers():
    version, checks = audit([eggs()])
    assert version == "exact/1" and len(checks) >= 10 and all(c.ok for c in checks)


def test_a_problem_without_an_answer_is_stored_as_before():
    """What was hashed before there were answers keeps its hash."""
    assert "answer" not in eggs(answer=None).model_dump() and eggs().model_dump()["answer"] == "18"


def test_judging_answers_imports_no_torch():
    code = "import sys, evaluation.exact; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
