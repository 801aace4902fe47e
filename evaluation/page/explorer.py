"""The explorer: every problem of the primary benchmark, what each run does with it, and programs with their verdicts.

Bounded: `BYTES` of programs in all, each cut at `CUT` characters; what is left out is counted.
"""

from collections import defaultdict

from evaluation.changes import SOLVED
from evaluation.curves import RunEvidence
from evaluation.given import ReportInput, SampleShown
from evaluation.page.markup import Markup, joined, tag
from evaluation.scores import Score
from evaluation.tables import last_scores

BYTES, CUT = 1_500_000, 1_200
PROBLEMS = 40
"""With programs: those whose pass rate moved most against the base."""


def chosen_problems(given: ReportInput) -> tuple[str, ...]:
    """Return the problems whose pass rate moved most between the base and any run's last checkpoint."""
    base = given.base.get(given.primary)
    ends = [score for _, _, score in last_scores(given, given.protocols[0])]
    moved = {}
    for p, counts in base.problems.items() if base else ():
        assert base is not None
        if counts.n:
            rates = [s.passes(p, s.suite) / s.problems[p].n for s in ends if p in s.problems and s.problems[p].n]
            moved[p] = max((abs(r - base.passes(p, base.suite) / counts.n) for r in rates), default=0.0)
    return tuple(sorted(moved, key=lambda p: (-moved[p], p))[:PROBLEMS])


def explorer(given: ReportInput) -> Markup:
    """Return the filter and an entry a problem; without scripts the filter is absent and everything is there."""
    base = given.base.get(given.primary)
    ends = list(last_scores(given, given.protocols[0]))
    scores = [base, *(s for _, _, s in ends)] if base else [s for _, _, s in ends]
    if not scores:
        return tag("p", "No score is stored yet.")
    shown, left_out = _within(given.samples)
    clean = given.clean.get(given.primary)
    entries = [_entry(given, p, base, ends, shown.get(p, []), clean) for p in scores[0].problems]
    options = ("all", "with programs", "lost", "gained", "contaminated")
    controls = tag(
        "form",
        tag("label", "Problem ", tag("input", type="search", id="find", autocomplete="off")),
        tag("label", "Show ", tag("select", *(tag("option", o, value=o) for o in options), id="kind")),
        tag("output", id="count", aria_live="polite"),
        id="filter",
        hidden=True,
    )
    note = (
        f"Last checkpoint of each run beside the base; a problem is lost or gained where any run's pass rate crosses "
        f"{SOLVED:.0%}. The {PROBLEMS} problems that moved most have programs: of each folder the first that passes "
        "and the first that does not, as the judge got them."
    )
    note += f" {left_out} programs were left out to keep the page small." if left_out else ""
    return joined(tag("p", note, class_="note"), controls, tag("div", *entries, id="problems"))


def _within(samples: tuple[SampleShown, ...]) -> tuple[dict[str, list[SampleShown]], int]:
    """Return the programs that fit, by problem, and how many do not."""
    found, spent, left_out = defaultdict(list), 0, 0
    for sample in samples:
        size = len(sample.source[:CUT].encode(errors="replace")) + 200
        if spent + size > BYTES:
            left_out += 1
            continue
        spent += size
        found[sample.problem_id].append(sample)
    return found, left_out


def _entry(
    given: ReportInput,
    problem: str,
    base: Score | None,
    ends: list[tuple[RunEvidence, int, Score]],
    samples: list[SampleShown],
    clean: frozenset[str] | None,
) -> Markup:
    named = [(f"{given.model}/global_step_0", base)] if base else []
    named += [(f"{run.label}/global_step_{step}", score) for run, step, score in ends]
    rates = [(name, _counts(score, problem)) for name, score in named]
    known = [c / n for _, (c, n) in rates if n]
    before = known[0] if base and known else None
    kinds = ["with programs"] if samples else []
    if before is not None and any(r < SOLVED <= before for r in known):
        kinds.append("lost")
    if before is not None and any(before < SOLVED <= r for r in known):
        kinds.append("gained")
    if clean is not None and problem not in clean:
        kinds.append("contaminated")
    spread = f"{min(known):.2f} to {max(known):.2f}" if known else "not judged"
    head = tag("summary", tag("b", problem), f" pass rate {spread}", *(tag("i", f" {k}") for k in kinds))
    rows = (tag("li", tag("code", name), f" {c} of {n}" if n else " not judged") for name, (c, n) in rates)
    body = (head, tag("ul", *rows, class_="plain"), *(_program(s) for s in samples))
    return tag("details", *body, data_id=problem, data_kinds="|".join(kinds))


def _counts(score: Score | None, problem: str) -> tuple[int, int]:
    counts = score.problems.get(problem) if score else None
    return (0, 0) if score is None or counts is None else (score.passes(problem, score.suite), counts.n)


def _program(sample: SampleShown) -> Markup:
    verdict = f"base {sample.base}" + (f", plus {sample.plus}" if sample.plus is not None else "")
    passed = sample.base == "pass" and sample.plus in {None, "pass"}
    told = f"{sample.folder}, sample {sample.index}: {verdict}; {sample.tests_passed} of {sample.tests_total} tests"
    cut = len(sample.source) - CUT
    source = sample.source[:CUT] + (f"\n... {cut} more characters" if cut > 0 else "")
    look = "passed" if passed else "failed"
    return tag(
        "div", tag("p", f"{'PASS' if passed else 'NO PASS'}: {told}"), tag("pre", source, tabindex=0), class_=look
    )
