"""The finding: where each arm's boundary lies on the ladder, whether the arms differ, and how sure that is."""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from evaluation.curves import Classified, Criterion, RunEvidence, classify
from evaluation.drops import DropJudgement, Limb, RunEnding, Verdict, judge_pair, run_ending
from evaluation.ladders import ArmBoundary, ArmShift, Shift, compare, locate, with_seeds_needed
from evaluation.records import Record
from evaluation.scores import Score

__all__ = ["ArmBoundary", "ArmShift", "Criterion", "Finding", "Limb", "find"]


class RunFinding(Record):
    """One run in finding.json."""

    cell: str
    class_: str = Field(alias="class")
    onset_step: int | None
    why: str


class CleanFinding(Record):
    """The same rules on the problems that share no assert with training."""

    num_problems: int
    sentence: str
    shift: Shift
    verdict: Verdict | None
    changed: tuple[str, ...]
    """Runs whose class differs from that on all problems: `cell: class -> class`."""


class Finding(Record):
    """`finding.json` (contracts: finding/1)."""

    schema_: Literal["finding/1"] = Field(default="finding/1", alias="schema")
    experiment: str
    protocol_sha256: str
    registered_sha256: str
    """Of the experiment as declared before training."""
    rule: Literal["boundary", "drop"]
    sentence: str
    runs: tuple[RunFinding, ...]
    boundary: dict[str, ArmBoundary]
    shift: Shift
    """Of the second arm against the first; `comparisons` has every arm."""
    min_detectable: float | None
    """Smallest shift, in rungs of this ladder, that these seeds could have shown if all agreed; null if none could."""
    comparisons: dict[str, ArmShift] = Field(default_factory=dict)
    """Each arm against the first one; those after the first are secondary, their p-values not corrected."""
    limbs: tuple[Limb, ...] = ()
    endings: tuple[RunEnding, ...] = Field(default=(), exclude_if=lambda value: not value)
    """Of every run, by the rule "drop"."""
    controls: dict[str, DropJudgement] = Field(default_factory=dict, exclude_if=lambda value: not value)
    """The rule on the pairs of arms after the first, by the treated arm: read beside the verdict, no part of it."""
    verdict: Verdict | None = None
    statistical_status: str
    missing: tuple[str, ...]
    departures: tuple[str, ...]
    clean: CleanFinding | None = None
    """Null where no problem, or nothing but such problems, is evaluated."""


def find(
    *,
    experiment: str,
    criterion: Criterion,
    runs: Sequence[RunEvidence],
    base: Score | None,
    benchmark: str,
    protocol_sha256: str,
    registered_sha256: str,
    arm_labels: dict[str, str],
    pairs: Sequence[tuple[str, str]] = (),
    missing: Sequence[str] = (),
    departures: Sequence[str] = (),
    clusters: Mapping[str, int] | None = None,
) -> Finding:
    """Classify every run and answer by the declared criterion.

    Args:
        experiment: its name.
        criterion: the declared rules.
        runs: every planned cell, ended or not.
        base: the base model's score on the primary benchmark.
        benchmark: the primary benchmark.
        protocol_sha256: identity of the primary protocol.
        registered_sha256: identity of the experiment as declared.
        arm_labels: words for each arm, control first.
        pairs: (control, treated) arms of the rule "drop"; the first pair is the question's. None: the first two arms.
        missing: planned things that are not there; incomplete runs that it does not name are added.
        departures: where the run departed from what was declared.
        clusters: label of each evaluated problem that has near-duplicates among them.
    """
    classified = [classify(r, base, benchmark, criterion, clusters) for r in runs]
    boundary = {arm: locate([c for c in classified if c.arm == arm], criterion) for arm in arm_labels}
    control, *others = arm_labels
    seen = {arm: compare(classified, control, arm, arm_labels, criterion) for arm in others}
    shifts = {arm: with_seeds_needed(found, classified, control, arm, criterion) for arm, found in seen.items()}
    main = next(iter(shifts.values()), _ONE_ARM)
    asked = (list(pairs) or [(control, arm) for arm in others[:1]]) if criterion.rule == "drop" else []
    judgements = [judge_pair(runs, base, benchmark, pair, criterion) for pair in asked]
    judged = judgements[0] if judgements else _UNJUDGED if criterion.rule == "drop" else None
    return Finding(
        experiment=experiment,
        protocol_sha256=protocol_sha256,
        registered_sha256=registered_sha256,
        rule=criterion.rule,
        sentence=judged.sentence if judged else _sentence(boundary, main, arm_labels, classified),
        runs=tuple(RunFinding.model_validate(_row(c)) for c in classified),
        boundary={} if judged else boundary,
        shift="not_identified" if judged else main.shift,
        min_detectable=None if judged else main.min_detectable,
        comparisons={} if judged else shifts,
        limbs=judged.limbs if judged else (),
        endings=tuple(run_ending(r, base, benchmark) for r in runs) if judged else (),
        controls={pair[1]: found for pair, found in zip(asked[1:], judgements[1:], strict=True)},
        verdict=judged.verdict if judged else None,
        statistical_status=judged.status if judged else main.text,
        missing=(*missing, *_unnamed(classified, base, missing)),
        departures=tuple(departures),
    )


def on_subset(finding: Finding, whole: Finding, num_problems: int) -> CleanFinding:
    """Return what a finding on part of the problems says beside that on all of them."""
    pairs = zip(whole.runs, finding.runs, strict=True)
    changed = tuple(f"{a.cell}: {a.class_} -> {b.class_}" for a, b in pairs if a.class_ != b.class_)
    return CleanFinding(
        num_problems=num_problems,
        sentence=finding.sentence,
        shift=finding.shift,
        verdict=finding.verdict,
        changed=changed,
    )


def _row(run: Classified) -> dict[str, str | int | None]:
    return {"cell": run.label, "class": run.run_class, "onset_step": run.onset_step, "why": run.why}


_UNJUDGED = DropJudgement(
    limbs=(), verdict=None, status="no verdict: one arm", sentence="The rule cannot be applied: there is one arm."
)
_ONE_ARM = ArmShift(shift="not_identified", min_detectable=None, p=None, text="one arm, nothing to compare it with")


def _unnamed(runs: Sequence[Classified], base: Score | None, missing: Sequence[str]) -> list[str]:
    """Return what is missing and not named yet: no incomplete run may be left out of the list."""
    named = {m.split("/")[0].split(" ")[0] for m in missing}
    found = [f"{r.label} ({r.why})" for r in runs if r.run_class == "incomplete" and r.label not in named]
    if base is None and not any("global_step_0 " in f"{m} " for m in missing):
        found.insert(0, "global_step_0 of the base model (score)")
    return found


def _sentence(
    boundary: Mapping[str, ArmBoundary], main: ArmShift, labels: Mapping[str, str], runs: Sequence[Classified]
) -> str:
    """Say what was seen, arm by arm, then what may be concluded about the shift."""
    parts = [f"{labels[arm]}: {found.text}" for arm, found in boundary.items()]
    incomplete = sum(r.run_class == "incomplete" for r in runs)
    tail = f" {incomplete} of {len(runs)} runs are incomplete." if incomplete else ""
    told = ". ".join(p[0].upper() + p[1:] for p in parts)
    why = f" ({main.text})" if main.shift == "not_identified" else ""  # else counts and p are in the status
    return f"{told}. {_shift_words(list(boundary.values()), main, list(labels.values()))}{why}.{tail}"


def _shift_words(boundary: Sequence[ArmBoundary], main: ArmShift, labels: Sequence[str]) -> str:
    if len(boundary) < 2:
        return "A shift is not identified"
    where = f"The boundary of '{labels[1]}' against that of '{labels[0]}'"
    if main.shift in {"up", "down"}:
        return f"{where}: moved {main.shift}"
    if main.shift == "not_identified":
        return f"{where}: a shift is not identified"
    first, second = boundary[0].first_unstable, boundary[1].first_unstable
    if main.p is None:
        known = first is not None and second is not None and first != second
        place = f"its bracket lies {'higher' if (second or 0) > (first or 0) else 'lower'}, but " if known else ""
        return f"{where}: {place}with so few seeds a shift is not detectable"
    seen = f", the smallest that could be seen being {main.min_detectable:g} rungs" if main.min_detectable else ""
    return f"{where}: a shift is not detectable{seen}"
