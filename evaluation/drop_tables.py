"""The tables of the rule "drop": its conditions, every run's drop, the control pairs, and stability signals."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from evaluation.curves import RunEvidence
from evaluation.drops import Limb
from evaluation.findings import Finding
from evaluation.markup import Row, Table
from evaluation.results import LAST, figure

WORDS = {
    "treatment_drop": "drop of the treated arm, at most",
    "drop_difference": "drop of the plain arm minus the treated one's, at least",
    "final_difference": "final accuracy, treated minus plain, at least",
    "baseline_drop": "drop of the plain arm, at least (of the hypothesis text; no part of the rule)",
}
CONDITIONS = ("condition", "value", "interval over seeds", "threshold", "met")


def drop_tables(runs: Sequence[RunEvidence], labels: Mapping[str, str], finding: Finding) -> Iterator[Table]:
    """Yield everything between the sentence and the table of classes."""
    yield Table("The rule", (CONDITIONS, *map(_limb, finding.limbs)))
    yield _endings(finding)
    for arm, found in finding.controls.items():
        yield Table(f"Control: {labels.get(arm, arm)}", (CONDITIONS, *map(_limb, found.limbs)), found.sentence)
    yield _signals(runs)


def _limb(x: Limb) -> Row:
    interval = "one seed, none" if x.low is None else f"{x.low:+.3f} to {x.high:+.3f}, {x.seeds} seeds"
    met = "unknown" if x.passed is None else "yes" if x.passed else "no"
    return WORDS.get(x.name, x.name), _number(x.value, "+.3f"), interval, f"{x.threshold:g}", met


def _endings(finding: Finding) -> Table:
    rows = [(e.cell, *(_number(x) for x in (e.initial, e.peak, e.final, e.drop))) for e in finding.endings]
    return Table("Drop from peak to end", (("cell", "step 0", "peak", "end", "drop"), *rows))


def _signals(runs: Sequence[RunEvidence]) -> Table:
    head = (
        "cell",
        "gradient norm, mean",
        "largest",
        "sampler to learner, mean of |log p - log q|",
        "head mass",
        f"entropy, last {LAST}",
        f"reward, last {LAST}",
    )
    rows = []
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
    return Table("Stability signals", (head, *rows), "Head mass: the sampler's probability on the head.")


def _number(value: float | None, form: str = ".3f") -> str:
    return "" if value is None else format(value, form)
