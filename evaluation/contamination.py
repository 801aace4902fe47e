"""What training problems share with the evaluated ones: ids are disjoint, content is not.

Rule (specification): two asserts are the same when their syntax trees are, after the tested function's name is
replaced. For MBPP+ the asserts compared are MBPP's own of the same ids. Problems without asserts are the same when
their statements are, but for case and spacing. A problem that shares one is contaminated; the rest is the clean subset
on which every headline is repeated.

Beside it, near-duplicates: statements whose sets of words agree to a Jaccard index of 0.8. Between training and an
evaluated problem they are listed; among the evaluated ones they (and those that share an assert) make the clusters that
the bootstrap draws together.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from evaluation.records import Problem, Record

RULE = "equal syntax trees of an assert, after the tested function's name is replaced"
NEAR = 0.8
"""Jaccard index of two statements' words from which they are near-duplicates."""
NEAR_RULE = f"the words of the statements (lower case, each once) agree to a Jaccard index of {NEAR:g} or more"
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


class NearDuplicate(Record):
    """A training and an evaluated problem whose statements say nearly the same."""

    train_id: str
    evaluation_id: str
    benchmark: str
    jaccard: float
    """Rounded to three digits; 1: the same words."""


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
    near_rule: str = NEAR_RULE
    near: tuple[NearDuplicate, ...] = ()
    """Between training and each benchmark."""
    clusters: dict[str, tuple[tuple[str, ...], ...]] = Field(default_factory=dict)
    """By benchmark: groups of evaluated problems that are near-duplicates of, or share an assert with, each other."""

    def labels(self, benchmark: str) -> dict[str, int]:
        """Return the cluster of each problem that has one."""
        return {p: i for i, group in enumerate(self.clusters.get(benchmark, ())) for p in group}


def find_contamination(
    train: Sequence[Problem], evaluated: Mapping[str, Sequence[Problem]], *, drawn: bool = False
) -> Contamination:
    """Compare training problems with each benchmark's; pass MBPP's own problems for MBPP+.

    Args:
        train: the training problems.
        evaluated: the problems of each benchmark.
        drawn: the problems are independent draws from templates: alike by design, and no near-duplicates of each other.
    """
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
        near=() if drawn else tuple(d for name, ps in evaluated.items() for d in find_near(train, ps, name)),
        clusters={} if drawn else {name: find_clusters(problems) for name, problems in evaluated.items()},
    )


def find_near(train: Sequence[Problem], evaluated: Sequence[Problem], benchmark: str) -> list[NearDuplicate]:
    """Return every pair whose statements are near-duplicates, in the given order."""
    jaccard_TE = _jaccard(train, evaluated)
    return [
        NearDuplicate(
            train_id=train[t].problem_id,
            evaluation_id=evaluated[e].problem_id,
            benchmark=benchmark,
            jaccard=round(float(jaccard_TE[t, e]), 3),
        )
        for t, e in np.argwhere(jaccard_TE >= NEAR)
    ]


def find_clusters(problems: Sequence[Problem]) -> tuple[tuple[str, ...], ...]:
    """Return the connected groups of two or more near-duplicates, ids in the given order."""
    root = list(range(len(problems)))

    def find(i: int) -> int:
        while root[i] != i:
            i = root[i]
        return i

    place = {p.problem_id: i for i, p in enumerate(problems)}
    alike = [(int(i), int(j)) for i, j in np.argwhere(_jaccard(problems, problems) >= NEAR)]
    alike += [(place[o.train_id], place[o.evaluation_id]) for o in find_overlaps(problems, problems, "")]
    for i, j in alike:
        root[max(find(i), find(j))] = min(find(i), find(j))
    groups: dict[int, list[str]] = defaultdict(list)
    for i, problem in enumerate(problems):
        groups[find(i)].append(problem.problem_id)
    return tuple(tuple(g) for g in groups.values() if len(g) > 1)


def _jaccard(first: Sequence[Problem], second: Sequence[Problem]) -> np.ndarray:
    """Return (A, B): shared over all words of two statements; statements without a word are alike to none."""
    words = [[set(re.findall(r"[a-z0-9_]+", p.text.lower())) for p in problems] for problems in (first, second)]
    column = {w: i for i, w in enumerate(sorted(set().union(*words[0], *words[1])))}
    has_AW, has_BW = (np.zeros((len(found), len(column)), dtype=np.float32) for found in words)
    for has, found in ((has_AW, words[0]), (has_BW, words[1])):
        for row, own in enumerate(found):
            has[row, [column[w] for w in own]] = 1
    shared_AB = has_AW @ has_BW.T
    return shared_AB / np.maximum(has_AW.sum(1)[:, None] + has_BW.sum(1)[None] - shared_AB, 1)


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
