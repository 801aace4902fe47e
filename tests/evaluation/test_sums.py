"""Generated arithmetic problems: right by an independent reading of their words, distinct, and the same every time."""

import re

import pytest

from evaluation.answers import find_answer
from evaluation.exact import ExactMatch
from evaluation.problems import load_benchmark, prepare, read_problems
from evaluation.problems.sums import CHANGES, LARGEST, NUM_HELD_OUT, NUM_TRAIN, NUM_WARM_START, generate, solution
from evaluation.prompts import PROMPTS, RENDERINGS
from evaluation.records import Program

SENTENCE = re.compile(r"(\w+) has (\d+) (\w+)\. \1 (.+), then (.+)\. How many \3 are there now\?")


def by_words(text: str) -> int:
    """Solve a problem from its text alone."""
    found = SENTENCE.fullmatch(text)
    assert found, text
    value = int(found[2])
    for said in (found[4], found[5]):
        verb = said.split()[0]
        if verb in {"doubles", "triples"}:
            value *= 2 if verb == "doubles" else 3
            continue
        amount = re.search(r"\d+", said)
        assert amount and verb in {"finds", "gets", "loses", "gives"}
        value += int(amount[0]) if verb in {"finds", "gets"} else -int(amount[0])
    return value


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_every_answer_is_right_by_the_words_and_reads_back(seed):
    made = generate(seed)
    problems = (*made.warm_start, *made.train, *made.held_out)
    assert all(p.answer == str(by_words(p.text)) and find_answer(p.reference) == int(p.answer) for p in problems)
    assert all(0 <= int(p.answer or "") <= LARGEST for p in problems)
    references = [Program(problem_id=p.problem_id, source=p.reference) for p in problems]
    assert all(v.passed for v in ExactMatch(problems).judge(references))


def test_stories_are_distinct_across_parts_and_from_the_shipped_warm_start():
    shipped, other = generate(0), generate(1)
    assert (len(shipped.warm_start), len(shipped.train), len(shipped.held_out)) == (
        NUM_WARM_START,
        NUM_TRAIN,
        NUM_HELD_OUT,
    )
    assert not other.warm_start and (len(other.train), len(other.held_out)) == (NUM_TRAIN, NUM_HELD_OUT)
    for made in (shipped, other):
        assert len(set(made.stories.values())) == len(made.stories)
    warm = {shipped.stories[p.problem_id] for p in shipped.warm_start}
    assert not warm & set(other.stories.values())
    assert generate(1) == other and generate(2) != other


def test_a_hasty_reader_is_wrong_wherever_a_change_can_be_misread():
    made = generate(0)
    wrong = right = 0
    for p in made.train:
        story = made.stories[p.problem_id]
        hasty = find_answer(solution(story, lambda _: True))
        if all(CHANGES[key].mistake is None for key, _ in story.changes):
            assert hasty == int(p.answer or "")
            right += 1
        else:
            wrong += hasty != int(p.answer or "")
    assert right > 10 and wrong > 0.9 * (NUM_TRAIN - right)


def test_the_benchmark_is_split_like_every_other(tmp_path):
    made = prepare("sums", 0, ["sums"], tmp_path)
    train, held_out = read_problems(made.train), read_problems(made.benchmarks["sums"])
    assert made.split.counts.model_dump() == {"train": 320, "plus": 200, "test": 0, "canonical_test": 0}
    assert [p.number for p in train] == list(range(1600, 1920)) and held_out == load_benchmark("sums")
    assert prepare("sums", 0, ["sums"], tmp_path) == made
    assert prepare("sums", 1, ["sums"], tmp_path / "1").split_sha256 != made.split_sha256


def test_every_training_benchmark_has_a_prompt():
    assert PROMPTS == {"mbpp": "mbpp/1", "toy": "toy/1", "gsm8k": "gsm8k/1", "sums": "sums/1"}
    assert set(PROMPTS.values()) == set(RENDERINGS)
