"""The tables of the rule "drop": its conditions, every run's drop, the control pairs, and stability signals."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from evaluation.curves import RunEvidence
from evaluation.drops import Limb
from evaluation.findings import Finding
from evaluation.markup import table
from evaluation.results import LAST, figure

WORDS = {
    "treatment_drop": "drop of the treated arm, at most",
    "drop_difference": "drop of the plain arm minus the treated one's, at least",
    "final_difference": "final accuracy, treated minus plain, at least",
    "baseline_drop": "drop of the plain arm, at least (of the hypothesis text; no part of the rule)",
}


def drop_tables(runs: Sequence[RunEvidence], labels: Mapping[str, str], finding: Finding) -> str:
    """Return everything between the sentence and the table of classes."""
    return "\n\n".join(_parts(runs, labels, finding))


def _parts(runs: Sequence[RunEvidence], labels: Mapping[str, str], finding: Finding) -> Iterator[str]:
    if finding.limbs:
        yield _limbs(finding.limbs)
    yield "## Drop from peak to end\n\n" + _endings(finding)
    for arm, found in finding.controls.items():
        yield f"### Control: {labels.get(arm, arm)}\n\n{found.sentence}"
        if found.limbs:
            yield _limbs(found.limbs)
    yield "## Stability signals\n\n" + _signals(runs)


def _limbs(limbs: Sequence[Limb]) -> str:
    rows: list[tuple[str, ...]] = [("condition", "value", "threshold", "met")]
    rows += [(WORDS[x.name], _number(x.value, "+.3f"), f"{x.threshold:g}", _met(x.passed)) for x in limbs]
    return table(rows)


def _endings(finding: Finding) -> str:
    rows: list[tuple[str, ...]] = [("cell", "step 0", "peak", "end", "drop")]
    rows += [(e.cell, *(_number(x) for x in (e.initial, e.peak, e.final, e.drop))) for e in finding.endings]
    return table(rows)


def _signals(runs: Sequence[RunEvidence]) -> str:
    rows: list[tuple[str, ...]] = [
        (
            "cell",
            "gradient norm, mean",
            "largest",
            "sampler to learner, mean of |log p - log q|",
            "head mass",
            f"entropy, last {LAST}",
            f"reward, last {LAST}",
        )
    ]
    for run in runs:
        found = (
            figure(run, "grad_norm", fmean),
            figure(run, "grad_norm", max),
            figure(run, "logprob_gap", fmean),
            figure(run, "head_mass", fmean),
            figure(run, "entropy", fmean, LAST),
            figure(run, "reward", fmean, LAST),
        )
        rows.append((run.label, *(_number(x, ".4g") for x in found)))
    return table(rows) + "\n\nHead mass: the sampler's probability on the tokens that centering knows."


def _number(value: float | None, form: str = ".3f") -> str:
    return "" if value is None else format(value, form)


def _met(passed: bool | None) -> str:
    return "unknown" if passed is None else "yes" if passed else "no"
