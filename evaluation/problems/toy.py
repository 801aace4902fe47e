"""Generated MBPP-shaped problems: a statement, three asserts, thirty plus inputs; compositions of small operations.

The embedded default trains on them: they need no download, a 0.4M-parameter model solves about a third of them after
its warm start, and their programs really run. What is designed here, and so not a finding, is the size of the effect:
the warm-start corpus makes one fixed plausible mistake per operation, which reinforcement learning can unlearn.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from evaluation.problems.toy_grammar import (
    FILTERS,
    MAPS,
    POSTFIX_FILTERS,
    REDUCES,
    RESULTS,
    SOURCES,
    TRANSFORMS,
    VERBS,
    WITH_DEFAULT,
    WORDS,
)
from evaluation.records import Problem

NUM_INTEGER, NUM_STRING = 700, 300
NUM_WARM_START, NUM_TRAIN, NUM_HELD_OUT = 400, 320, 128
NUM_PLUS = 30
SHIPPED_SEED = 0
"""Problem seed of the shipped model's warm start."""


@dataclass(frozen=True)
class Composition:
    """What a problem is made of: its operations by table key, and its two constants."""

    key: tuple[str, ...]
    """`("int", source, filter, map, reduce)` or `("str", transform, transform or "", result)`."""
    k: int
    m: int

    @property
    def name(self) -> str:
        """Name of the function."""
        if self.key[0] == "int":
            _, _, f, m, r = self.key
            return "_".join([w for w in (REDUCES[r].name, MAPS[m].name, FILTERS[f].name) if w][:2])
        _, first, second, result = self.key
        return f"{RESULTS[result].name}_{TRANSFORMS[second or first].name}"


@dataclass(frozen=True)
class ToyProblems:
    """One problem seed: all compositions distinct, across the three parts too."""

    warm_start: tuple[Problem, ...]
    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]
    compositions: dict[str, Composition]
    """By problem id; the warm start writes its sloppy solutions from them."""


def generate(seed: int = SHIPPED_SEED) -> ToyProblems:
    """Return the problems of one seed; a pure function of it.

    Another seed than the shipped model's leaves out every composition of that model's warm-start corpus, so that
    nothing it is trained or scored on was in its warm start.
    """
    taken = set() if seed == SHIPPED_SEED else {c.key for c in _warm_start_compositions()}
    made = _make(seed, taken)
    problems = tuple(p for p, _ in made)
    return ToyProblems(
        warm_start=problems[:NUM_WARM_START],
        train=problems[NUM_WARM_START : NUM_WARM_START + NUM_TRAIN],
        held_out=problems[-NUM_HELD_OUT:],
        compositions={p.problem_id: c for p, c in made},
    )


def _warm_start_compositions() -> list[Composition]:
    return [c for _, c in _make(SHIPPED_SEED, set())[:NUM_WARM_START]]


def _make(seed: int, taken: set[tuple[str, ...]]) -> list[tuple[Problem, Composition]]:
    """Draw compositions in a shuffled order, skip trivial ones, shuffle the result and number it."""
    rng = random.Random(seed)
    integer = [
        ("int", s, f, m, r) for s in SOURCES for f in FILTERS for m in MAPS for r in REDUCES if _sensible(s, f, m, r)
    ]
    string = [("str", a, b, c) for a in TRANSFORMS for b in [*TRANSFORMS, ""] for c in RESULTS if a != b]
    rng.shuffle(integer)
    rng.shuffle(string)
    made: list[tuple[Problem, Composition]] = []
    for keys, count in ((integer, NUM_INTEGER), (string, NUM_STRING)):
        found = (_problem(seed, key) for key in keys if key not in taken)
        made += [x for x, _ in zip((x for x in found if x is not None), range(count), strict=False)]
    rng.shuffle(made)
    return [(p.replace(problem_id=f"Toy/{i}"), c) for i, (p, c) in enumerate(made)]


def _sensible(source: str, f: str, m: str, r: str) -> bool:
    identity = (source, f, m, r) == ("list", "none", "none", "list")
    return not identity and not (f == "pos" and source != "list")


def _problem(seed: int, key: tuple[str, ...]) -> tuple[Problem, Composition] | None:
    """Return the problem of one composition, or None if its answers hardly vary."""
    named = tuple(x or None for x in key) if key[0] == "str" else key
    rng = random.Random(f"{seed}-{named}")
    composition = Composition(key, rng.randint(2, 9), rng.randint(2, 9))
    text = _statement(composition, rng)
    code = solution(composition)
    run = _function(code, composition.name)
    kind = key[1] if key[0] == "int" else "words"
    base, seen, tries = [], set(), 0
    while len(base) < 3 and tries < 50:
        tries += 1
        arguments = _arguments(kind, rng)
        answer = run(*arguments)
        if repr(answer) in seen and tries < 40:
            continue
        seen.add(repr(answer))
        base.append(f"assert {composition.name}({', '.join(map(repr, arguments))}) == {answer!r}")
    plus = [_arguments(kind, rng, edge=i) for i in range(NUM_PLUS)]
    if len({repr(run(*json.loads(json.dumps(x)))) for x in plus}) < 3:
        return None
    problem = Problem(
        problem_id="Toy/0",
        text=text,
        entry_point=composition.name,
        reference=code,
        asserts=tuple(base),
        plus_inputs=plus,
    )
    return problem, composition


def solution(c: Composition, mistaken: Callable[[str], bool] = lambda _: False, keep_name: str | None = None) -> str:
    """Return a program for a composition; `mistaken` decides for each operation's mistake whether it is made.

    Operations are asked in a fixed order, and only those that have a mistake. `keep_name` names the function otherwise
    than the composition does.
    """
    name = keep_name or c.name

    def pick(right: str, wrong: str | None) -> str:
        return wrong if wrong is not None and mistaken(wrong) else right

    if c.key[0] == "int":
        _, s, f, m, r = c.key
        source = pick(SOURCES[s].code, SOURCES[s].mistake)
        condition = pick(FILTERS[f].code, FILTERS[f].mistake).format(k=c.k)
        mapped = pick(MAPS[m].code, MAPS[m].mistake).format(m=c.m)
        reduce = pick(REDUCES[r].code, REDUCES[r].mistake)
        items = f"{mapped} for x in {source}" + (f" if {condition}" if condition else "")
        if "," in reduce and "[{it}]" not in reduce:
            reduce = reduce.replace("{it}", "[{it}]")
        return f"def {name}({SOURCES[s].parameter}):\n    return {reduce.format(it=items)}\n"
    _, first, second, result = c.key
    steps = [pick(TRANSFORMS[t].code, TRANSFORMS[t].mistake).format(k=c.k) for t in (first, second) if t]
    steps.append("return " + pick(RESULTS[result].code, RESULTS[result].mistake))
    return f"def {name}(s):\n" + "".join(f"    {line}\n" for line in steps)


def _function(code: str, name: str) -> Callable[..., Any]:
    """Run our own generated code, never a model's."""
    scope: dict[str, Any] = {}
    exec(code, scope)
    return scope[name]


def _statement(c: Composition, rng: random.Random) -> str:
    if c.key[0] == "str":
        _, first, second, result = c.key
        steps = ", ".join(TRANSFORMS[t].words[0].format(k=c.k) for t in (first, second) if t)
        return f"Write a function {c.name} to take a string, {steps} and {RESULTS[result].words[0]}."
    _, s, f, m, r = c.key
    chosen = rng.choice(FILTERS[f].words).format(k=c.k)
    mapped = rng.choice(MAPS[m].words).format(m=c.m)
    reduced = rng.choice(REDUCES[r].words)
    noun = SOURCES[s].words
    if f in POSTFIX_FILTERS:
        noun = f"{noun} {chosen}"
    elif chosen:
        noun = f"{chosen} {noun}"
    what = f"{reduced} {mapped}" if mapped else reduced
    default = " or 0 if there are none" if r in WITH_DEFAULT else ""
    return f"Write a function {c.name} to {rng.choice(VERBS)} the {what} {noun}{default}."


def _arguments(kind: str, rng: random.Random, edge: int = 9) -> list[Any]:
    """Return one argument list; edge 0 is the empty case, 1 the smallest, others are ordinary."""
    if kind == "list":
        size = edge if edge in {0, 1} else rng.randint(3, 8)
        return [[rng.randint(-12, 20) for _ in range(size)]]
    if kind == "digits":
        return [0 if edge == 0 else rng.randint(1, 9) if edge == 1 else rng.randint(10, 99999)]
    if kind == "range":
        return [0 if edge == 0 else 1 if edge == 1 else rng.randint(5, 25)]
    if edge == 0:
        return [""]
    if edge == 1:
        return [rng.choice(WORDS)]
    return [" ".join(rng.choice(WORDS) for _ in range(rng.randint(2, 6)))]
