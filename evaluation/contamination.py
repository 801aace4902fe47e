"""What training problems share with the evaluated ones: ids are disjoint, content is not.

Rule (specification): two asserts are the same when their syntax trees are, after the tested function's name is
replaced. For MBPP+ the asserts compared are MBPP's own of the same ids. Problems without asserts are the same when
their statements are, but for case and spacing. A problem that shares one is contaminated; the rest is the clean subset
on which every headline is repeated.
"""

import ast
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from evaluation.records import Problem, Record

RULE = "equal syntax trees of an assert, after the tested function's name is replaced"
RULE_OF_WORDS = "equal statements, but for case and spacing"


class Overlap(Record):
    """A training and an evaluated problem with at least one assert in common."""

    train_id: str
    evaluation_id: str
    benchmark: str
    shared_asserts: int
    """Distinct asserts in common."""
    evaluation_asserts: int
    """Asserts that the evaluated problem has; 1 for its statement."""


class Touched(Record):
    """How many problems the overlaps of one benchmark touch."""

    pairs: int
    train: int
    evaluation: int


class Contamination(Record):
    """`contamination.json`."""

    schema_: Literal["contamination/1"] = Field(default="contamination/1", alias="schema")
    rule: str = RULE
    touched: dict[str, Touched]
    """By benchmark."""
    clean: dict[str, tuple[str, ...]]
    """By benchmark: the problem ids that share no assert with a training problem, ascending by number."""
    constant_passable: tuple[str, ...]
    """Training problems whose asserts a program that returns one constant passes (REWARD-017): no skill to learn."""
    overlaps: tuple[Overlap, ...]


def find_contamination(train: Sequence[Problem], evaluated: Mapping[str, Sequence[Problem]]) -> Contamination:
    """Compare training problems with each benchmark's; pass MBPP's own problems for MBPP+."""
    overlaps = {name: find_overlaps(train, problems, name) for name, problems in evaluated.items()}
    return Contamination(
        rule=RULE_OF_WORDS if any(p.answer is not None for p in train) else RULE,
        touched={
            name: Touched(
                pairs=len(found),
                train=len({o.train_id for o in found}),
                evaluation=len({o.evaluation_id for o in found}),
            )
            for name, found in overlaps.items()
        },
        clean={
            name: tuple(
                p.problem_id
                for p in sorted(evaluated[name], key=lambda p: p.number)
                if p.problem_id not in {o.evaluation_id for o in found}
            )
            for name, found in overlaps.items()
        },
        constant_passable=tuple(p.problem_id for p in train if passes_with_constant(p)),
        overlaps=tuple(o for found in overlaps.values() for o in found),
    )


def find_overlaps(train: Sequence[Problem], evaluated: Sequence[Problem], benchmark: str) -> list[Overlap]:
    """Return every pair that shares an assert, by training then evaluated number."""
    holders: dict[str, list[Problem]] = defaultdict(list)
    for problem in evaluated:
        for form in normal_asserts(problem):
            holders[form].append(problem)
    shared: dict[tuple[int, int], int] = defaultdict(int)
    for problem in train:
        for form in normal_asserts(problem):
            for other in holders[form]:
                shared[problem.number, other.number] += 1
    trained = {p.number: p for p in train}
    others = {p.number: p for p in evaluated}
    return [
        Overlap(
            train_id=trained[t].problem_id,
            evaluation_id=others[e].problem_id,
            benchmark=benchmark,
            shared_asserts=n,
            evaluation_asserts=len(others[e].asserts) or 1,
        )
        for (t, e), n in sorted(shared.items())
    ]


def normal_asserts(problem: Problem) -> set[str]:
    """Return the syntax trees of a problem's asserts, as texts, without the tested function's name; or its words."""
    if problem.answer is not None:
        return {" ".join(problem.text.lower().split())}
    return {ast.dump(_Anonymous(problem.entry_point).visit(ast.parse(a))) for a in problem.asserts}


def passes_with_constant(problem: Problem) -> bool:
    """True when all asserts expect one and the same literal of the tested function."""
    expected = [_expected(a, problem.entry_point) for a in problem.asserts]
    return bool(expected) and None not in expected and all(e == expected[0] for e in expected)


class _Anonymous(ast.NodeTransformer):
    def __init__(self, name: str) -> None:
        self.name = name

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(id="_", ctx=node.ctx) if node.id == self.name else node


def _expected(statement: str, entry_point: str) -> tuple[Any] | None:
    """Return (value,) of an assert `f(...) == value`, else None: what it expects is not plain."""
    body = ast.parse(statement).body[0]
    if not (isinstance(body, ast.Assert) and isinstance(body.test, ast.Compare)):
        return None
    if not (len(body.test.ops) == 1 and isinstance(body.test.ops[0], ast.Eq)):
        return None
    call, value = body.test.left, body.test.comparators[0]
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == entry_point):
        return None
    try:
        return (ast.literal_eval(value),)
    except ValueError:
        return None
