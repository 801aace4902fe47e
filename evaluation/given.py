"""What a report is made from: the evidence of every run, and what it takes to check and to repeat it."""

from dataclasses import dataclass, field

from evaluation.contamination import Contamination
from evaluation.curves import Criterion, RunEvidence
from evaluation.protocol import Protocol
from evaluation.records import Record
from evaluation.scores import Estimate, Score, Suite


class SampleShown(Record):
    """One program of the explorer, with its verdict."""

    problem_id: str
    folder: str
    """`<cell>/global_step_N`, or the base's."""
    index: int
    source: str
    base: str
    plus: str | None
    tests_passed: int
    tests_total: int


@dataclass(frozen=True)
class Cost:
    """What the experiment took, as far as its records tell."""

    training_seconds: dict[str, float] = field(default_factory=dict)
    """By cell: the sum over its logged steps."""
    stored_bytes: dict[str, int] = field(default_factory=dict)
    """By kind of folder."""


@dataclass(frozen=True)
class ReportInput:
    """Everything a report says, from what is stored."""

    experiment: str
    question: str
    registered_sha256: str
    model: str
    protocols: tuple[Protocol, ...]
    """The first is the primary one."""
    criterion: Criterion
    runs: tuple[RunEvidence, ...]
    base: dict[str, Score]
    """Of the base model, by benchmark."""
    arm_labels: dict[str, str]
    """Words for each arm, the control first."""
    pairs: tuple[tuple[str, str], ...] = ()
    """(control, treated) arms of the rule "drop", the question's first."""
    top_k: int | None = None
    """Size of the head that the treated arm uses, for result.json."""
    wall_minutes: float | None = None
    """Of all runs together, for result.json."""
    clean: dict[str, frozenset[str] | None] = field(default_factory=dict)
    """Problems of each benchmark that share no assert with training; None or absent: no such subset."""
    missing: tuple[str, ...] = ()
    departures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    provenance: dict[str, str] = field(default_factory=dict)
    contamination: Contamination | None = None
    samples: tuple[SampleShown, ...] = ()
    """Of the explorer: from the base and from the last checkpoint of each run."""
    sources: tuple[tuple[str, str], ...] = ()
    """(path in the store, sha256) of files beside those of the runs."""
    cost: Cost = field(default_factory=Cost)

    @property
    def primary(self) -> str:
        """Benchmark that the finding rests on."""
        return self.protocols[0].benchmark

    def estimates(
        self, protocol: Protocol, score: Score, suite: Suite | None = None, subset: frozenset[str] | None = None
    ) -> dict[int, Estimate]:
        """Return a score's pass@k for every reported k, and for 1, near-duplicate problems drawn together."""
        ks = tuple(sorted({1, *protocol.reported_ks}))
        return score.estimates(suite or score.suite, ks, subset, self.clusters(protocol.benchmark))

    def clusters(self, benchmark: str) -> dict[str, int] | None:
        """Label of each problem of a benchmark that has near-duplicates; None where that is not known."""
        return self.contamination.labels(benchmark) if self.contamination else None
