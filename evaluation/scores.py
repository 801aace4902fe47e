"""The score of one checkpoint on one benchmark: counts per problem, and pass@k with problem-bootstrap intervals."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
from pydantic import Field

from evaluation.protocol import Protocol
from evaluation.records import Outcome, Record, Verdict
from evaluation.statistics import bootstrap_intervals, pass_at_k

Suite = Literal["base", "plus"]


class Estimate(Record):
    """pass@k with its 95 % interval; null where a problem has fewer than k judged samples."""

    value: float | None
    low: float | None
    high: float | None
    num_problems: int
    """Problems with at least k judged samples; fewer than the score's own number means there is no value."""


class Counts(Record):
    """One problem's samples."""

    n: int
    """Judged samples."""
    base: int
    """Those that pass the base suite."""
    plus: int | None
    """Those that pass both suites; null for a benchmark with one suite."""
    errors: int
    """Samples that the harness could not judge: in no rate, never a wrong answer."""


EXCEPTED = frozenset({"Mbpp/61", "Mbpp/160", "Mbpp/271", "Mbpp/389", "Mbpp/599", "Mbpp/566"})
"""Problems whose EvalPlus verdict depends on the machine's speed, or (566) on what a worker ran before (spec)."""

DISPUTED = frozenset({"Gsm8k/10368"})
"""Golds that readers dispute (grade-school-math issue 25); scored against as they are."""


class Apart(Record):
    """The excepted and the disputed problems of a score, and the score without them."""

    problems: tuple[str, ...]
    pass_at_1: dict[str, Estimate | None]
    """Of all other problems, by suite."""


class Score(Record):
    """`score.json` (contracts: score/1)."""

    schema_: Literal["score/1"] = Field(default="score/1", alias="schema")
    label: str
    cell: str | None
    global_step: int | None
    benchmark: str
    n: int
    """Samples asked for a problem (the most of any problem)."""
    num_problems: int
    outcomes: dict[str, int]
    pass_at_k: dict[str, dict[str, Estimate] | None]
    problems: dict[str, Counts]
    protocol_sha256: str | None
    prompt_sha256: str | None
    judge_version: str
    protocol: Protocol | None = Field(default=None, exclude_if=lambda value: value is None)
    """In full, so that another protocol can tell whether it would have drawn these samples."""
    excepted: Apart | None = Field(default=None, exclude_if=lambda value: value is None)
    num_planned: int | None = Field(default=None, exclude_if=lambda value: value is None)
    """Problems of the benchmark, where a partial file has samples of fewer."""
    num_unknown: int | None = Field(default=None, exclude_if=lambda value: value is None)
    """Samples of a partial file that were left out: their problems are not the benchmark's."""

    @property
    def suite(self) -> Suite:
        """The stricter suite that exists: what headlines rest on."""
        return "base" if self.pass_at_k["plus"] is None else "plus"

    @property
    def num_errors(self) -> int:
        """Samples without a verdict."""
        return self.outcomes[Outcome.HARNESS_ERROR]

    def passes(self, problem_id: str, suite: Suite) -> int:
        """Return how many samples of a problem pass."""
        counts = self.problems[problem_id]
        found = counts.base if suite == "base" else counts.plus
        assert found is not None
        return found

    def judged(self, suite: Suite, subset: frozenset[str] | None = None) -> dict[str, tuple[int, int]]:
        """Return (judged, passing) samples of all problems or of a subset, by id."""
        return {p: (c.n, self.passes(p, suite)) for p, c in self.problems.items() if subset is None or p in subset}

    def estimate(self, suite: Suite, k: int, subset: frozenset[str] | None = None) -> Estimate:
        """Return pass@k over all problems or a subset of them, from the counts."""
        return self.estimates(suite, (k,), subset)[k]

    def estimates(
        self,
        suite: Suite,
        ks: Sequence[int],
        subset: frozenset[str] | None = None,
        clusters: Mapping[str, int] | None = None,
    ) -> dict[int, Estimate]:
        """Return pass@k for several k from one resampling; near-duplicate problems (one label) are drawn together."""
        judged = self.judged(suite, subset)
        return estimate_pass_at_ks(list(judged.values()), ks, labels(judged, clusters))

    def restricted(self, subset: frozenset[str]) -> "Score":
        """Return the score of some of the problems; its pass@k of all problems are left out."""
        problems = {p: c for p, c in self.problems.items() if p in subset}
        empty = {"base": {}, "plus": None if self.pass_at_k["plus"] is None else {}}
        return self.model_copy(update={"problems": problems, "num_problems": len(problems), "pass_at_k": empty})


def labels(problem_ids: Iterable[str], clusters: Mapping[str, int] | None) -> list[int] | None:
    """Return a cluster label a problem (negative where it stands alone), or None where no clusters are known."""
    if not clusters:
        return None
    return [clusters.get(p, -1 - i) for i, p in enumerate(problem_ids)]


def estimate_pass_at_k(judged: Sequence[tuple[int, int]], k: int) -> Estimate:
    """Return pass@k of (judged, passing) counts; no value unless every problem has k judged samples."""
    return estimate_pass_at_ks(judged, (k,))[k]


def estimate_pass_at_ks(
    judged: Sequence[tuple[int, int]], ks: Sequence[int], clusters_P: Sequence[int] | None = None
) -> dict[int, Estimate]:
    """Return pass@k for each k; one resampling serves all of them.

    Args:
        judged: (judged, passing) samples of each problem.
        ks: those asked for.
        clusters_P: a label a problem, or None.
    """
    found = _estimates(tuple(judged), tuple(ks), None if clusters_P is None else tuple(clusters_P))
    return dict(zip(ks, found, strict=True))


@lru_cache(maxsize=4096)  # a report's tables, pictures and CSV ask for the same
def _estimates(
    judged: tuple[tuple[int, int], ...], ks: tuple[int, ...], clusters_P: tuple[int, ...] | None
) -> tuple[Estimate, ...]:
    counts = {k: sum(n >= k for n, _ in judged) for k in ks}
    known = [k for k in ks if judged and counts[k] == len(judged)]
    found = {k: Estimate(value=None, low=None, high=None, num_problems=counts[k]) for k in ks}
    values_PK = np.array([[pass_at_k(n, c, k) for k in known] for n, c in judged])
    intervals = bootstrap_intervals(values_PK, clusters_P=clusters_P) if known else []
    for k, values_P, (low, high) in zip(known, values_PK.T.tolist() if known else [], intervals, strict=True):
        # Where all problems agree the interval is their value, which their mean is up to rounding.
        value = low if low == high else sum(values_P) / len(values_P)
        found[k] = Estimate(value=value, low=min(low, value), high=max(high, value), num_problems=len(judged))
    return tuple(found[k] for k in ks)


def sample_outcome(verdict: Verdict) -> Outcome:
    """Return one word for a sample with two suites: an error first, then a time-out, then a wrong answer."""
    found = {verdict.base, verdict.plus}
    for outcome in (Outcome.HARNESS_ERROR, Outcome.TIMEOUT, Outcome.FAIL):
        if outcome in found:
            return outcome
    return Outcome.PASS


def build_score(
    *,
    label: str,
    cell: str | None,
    global_step: int | None,
    benchmark: str,
    ks: Sequence[int],
    problem_ids: Sequence[str],
    verdicts: Sequence[tuple[int, Verdict]],
    has_plus: bool,
    protocol_sha256: str | None,
    prompt_sha256: str | None,
    judge_version: str,
) -> Score:
    """Count verdicts by problem and estimate pass@k.

    Args:
        label: what tables call it.
        cell: cell name, or None.
        global_step: optimizer steps of the checkpoint, or None.
        benchmark: name of the problems.
        ks: reported k.
        problem_ids: every problem that must have samples.
        verdicts: (sample index, verdict) pairs, in any order.
        has_plus: whether the benchmark has a second suite.
        protocol_sha256: identity of the protocol, where there is one.
        prompt_sha256: identity of the prompt specification, where there is one.
        judge_version: of the judge that gave the verdicts.

    Raises:
        ValueError: a sample counted twice, a verdict of an unknown problem, a problem without samples or a verdict
            without one of the suites: each would change the mean without a word.
    """
    grouped = _grouped(benchmark, problem_ids, verdicts, has_plus)
    problems = {p: _count(found, has_plus) for p, found in grouped.items()}
    suites: tuple[Suite, ...] = ("base", "plus") if has_plus else ("base",)
    judged = {s: [(c.n, c.base if s == "base" else c.plus or 0) for c in problems.values()] for s in suites}
    estimates = {s: {str(k): estimate_pass_at_k(judged[s], k) for k in ks} for s in suites}
    outcomes = Counter(sample_outcome(v) for _, v in verdicts)
    score = Score(
        label=label,
        cell=cell,
        global_step=global_step,
        benchmark=benchmark,
        n=max(len(found) for found in grouped.values()),
        num_problems=len(problems),
        outcomes={o.value: outcomes[o] for o in Outcome},
        pass_at_k={"base": estimates["base"], "plus": estimates.get("plus")},
        problems=problems,
        protocol_sha256=protocol_sha256,
        prompt_sha256=prompt_sha256,
        judge_version=judge_version,
    )
    return score.replace(excepted=_apart(score))


def _grouped(
    benchmark: str, problem_ids: Sequence[str], verdicts: Sequence[tuple[int, Verdict]], has_plus: bool
) -> dict[str, list[Verdict]]:
    """Return each problem's verdicts; refuse what would change a mean without a word."""
    seen = Counter((v.problem_id, index) for index, v in verdicts)
    if doubles := [key for key, times in seen.items() if times > 1]:
        raise ValueError(f"verdicts: {doubles[0]} is there {seen[doubles[0]]} times; keep one row a sample")
    grouped: dict[str, list[Verdict]] = {p: [] for p in problem_ids}
    for _, verdict in verdicts:
        if verdict.problem_id not in grouped:
            raise ValueError(f"verdicts: {verdict.problem_id} is not a problem of {benchmark}")
        if has_plus and verdict.plus is None:
            raise ValueError(f"verdicts: {verdict.problem_id} lacks the plus suite that {benchmark} has")
        grouped[verdict.problem_id].append(verdict)
    if empty := [p for p, found in grouped.items() if not found]:
        raise ValueError(f"verdicts: {len(empty)} problems have no samples ({', '.join(empty[:3])}, ...)")
    return grouped


def _apart(score: Score) -> Apart | None:
    apart = EXCEPTED | DISPUTED
    others = frozenset(score.problems) - apart
    if len(others) == len(score.problems) or not others:
        return None
    plus = None if score.pass_at_k["plus"] is None else score.estimate("plus", 1, others)
    excepted = tuple(p for p in score.problems if p in apart)
    return Apart(problems=excepted, pass_at_1={"base": score.estimate("base", 1, others), "plus": plus})


def _count(verdicts: Sequence[Verdict], has_plus: bool) -> Counts:
    judged = [v for v in verdicts if not v.errored]
    base = sum(v.base is Outcome.PASS for v in judged)
    both = sum(v.base is Outcome.PASS and v.plus is Outcome.PASS for v in judged)
    return Counts(n=len(judged), base=base, plus=both if has_plus else None, errors=len(verdicts) - len(judged))
