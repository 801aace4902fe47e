"""Generated arithmetic word problems: a start and two changes, GSM8K in miniature; the answer is read, no program runs.

They are what `score_centering_smoke` trains on: no download, and a 0.4M-parameter model solves a third of them greedily
after its warm start. As with the generated programs (`toy.py`), what is designed and so no finding is the size of the
effect: the warm start misreads some changes more often than not, which reinforcement learning can unlearn.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from evaluation.answers import MARKER
from evaluation.records import Problem, Record

NUM_WARM_START, NUM_TRAIN, NUM_HELD_OUT = 1600, 320, 200
SHIPPED_SEED = 0
"""Problem seed of the shipped model's warm start."""
STARTS, AMOUNTS, LARGEST = range(2, 13), range(2, 8), 40
NAMES = ("Tom", "Ana", "Max", "Eva", "Ben", "Mia")
THINGS = ("apples", "coins", "cards", "books", "shells", "pens")


class Change(Record):
    """One change of a number: its words, what it does, and what a hasty reader takes it for."""

    words: tuple[str, ...]
    """Ways to say it; `{n}` is the amount."""
    operator: str
    """`+`, `-` or `*`."""
    amount: int | None = None
    """Fixed by the words (twice, three times); None: the problem's."""
    mistake: str | None = None
    """The operator of a hasty reader."""
    mistaken: float = 0.0
    """How often a warm-start solution makes the mistake: above one half greedy answers make it too."""


CHANGES: dict[str, Change] = {
    "find": Change(words=("finds {n} more", "gets {n} more"), operator="+"),
    "lose": Change(words=("loses {n}",), operator="-", mistake="+", mistaken=0.35),
    "give": Change(words=("gives away {n}",), operator="-", mistake="+", mistaken=0.65),
    "double": Change(words=("doubles the number",), operator="*", amount=2, mistake="+", mistaken=0.35),
    "triple": Change(words=("triples the number",), operator="*", amount=3, mistake="+", mistaken=0.65),
}


@dataclass(frozen=True)
class Story:
    """What a problem is made of: the start, and two changes by key with their amounts."""

    start: int
    changes: tuple[tuple[str, int], tuple[str, int]]

    def steps(self, mistaken: Callable[[Change], bool] = lambda _: False) -> list[tuple[int, str, int, int]]:
        """Return (number, operator, amount, result) of each change; `mistaken` decides for each that can be misread."""
        value, rows = self.start, []
        for key, amount in self.changes:
            change = CHANGES[key]
            operator = change.mistake if change.mistake and mistaken(change) else change.operator
            result = {"+": value + amount, "-": value - amount, "*": value * amount}[operator]
            rows.append((value, operator, amount, result))
            value = result
        return rows


@dataclass(frozen=True)
class SumProblems:
    """One problem seed: all stories distinct, across the three parts too."""

    warm_start: tuple[Problem, ...]
    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]
    stories: dict[str, Story]
    """By problem id; the warm start writes its hasty solutions from them."""


def generate(seed: int = SHIPPED_SEED) -> SumProblems:
    """Return the problems of one seed; a pure function of it.

    Another seed than the shipped model's leaves out every story of that model's warm start, so that nothing it is
    trained or scored on was in its warm start.
    """
    taken = set() if seed == SHIPPED_SEED else set(_stories(SHIPPED_SEED)[:NUM_WARM_START])
    first = NUM_WARM_START if taken else 0
    stories = [s for s in _stories(seed) if s not in taken][: NUM_WARM_START + NUM_TRAIN + NUM_HELD_OUT - first]
    problems = tuple(_problem(seed, first + i, story) for i, story in enumerate(stories))
    cuts = (NUM_WARM_START - first, NUM_WARM_START - first + NUM_TRAIN)
    return SumProblems(
        warm_start=problems[: cuts[0]],
        train=problems[cuts[0] : cuts[1]],
        held_out=problems[cuts[1] :],
        stories={p.problem_id: s for p, s in zip(problems, stories, strict=True)},
    )


def solution(story: Story, mistaken: Callable[[Change], bool] = lambda _: False) -> str:
    """Return a worked solution, a line a change, with its answer."""
    rows = story.steps(mistaken)
    lines = [f"{value} {operator} {amount} = {result}" for value, operator, amount, result in rows]
    return "\n".join([*lines, f"{MARKER} {rows[-1][3]}"])


def _stories(seed: int) -> list[Story]:
    """Return every possible story in the seed's order."""
    found = list(_possible())
    random.Random(f"sums-{seed}").shuffle(found)
    return found


def _possible() -> Iterator[Story]:
    """Yield the stories whose numbers stay within 0 and the largest, the hasty reader's too."""
    one = [(k, n) for k, c in CHANGES.items() for n in ([c.amount] if c.amount else AMOUNTS)]
    for start in STARTS:
        for first in one:
            for second in one:
                story = Story(start, (first, second))
                if all(0 <= result <= LARGEST for *_, result in (*story.steps(), *story.steps(lambda _: True))):
                    yield story


def _problem(seed: int, number: int, story: Story) -> Problem:
    rng = random.Random(f"sums-{seed}-{number}")
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    said = [rng.choice(CHANGES[key].words).format(n=amount) for key, amount in story.changes]
    return Problem(
        problem_id=f"Sums/{number}",
        text=f"{name} has {story.start} {thing}. {name} {said[0]}, then {said[1]}. How many {thing} are there now?",
        entry_point="",
        reference=solution(story),
        asserts=(),
        answer=str(story.steps()[-1][3]),
    )
