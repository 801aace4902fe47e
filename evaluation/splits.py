"""The partition of the problems, by integer id, asserted against the numbers of the specification.

MBPP+ holds 378 of MBPP's 974 problems. The canonical test split is ids 11 to 510 (500 of them); the 276 of those that
MBPP+ lacks are the benchmark `mbpp_test276`, not "the test split" (SPLIT-001). What is in neither trains: 320.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from evaluation.records import Problem, Record, sha256_json

CANONICAL_TEST = range(11, 511)

MBPP_COUNTS = {"train": 320, "plus": 378, "test": 276, "canonical_test": 500}
MBPP_SHA256 = {
    "train": "2b51d00c2d5719c9e1b9eb1e5cc53c4d507a345b47e80bc6fbabc8aea9125d5e",
    "plus": "b2e8490659ab13e792366449928502cd8dee5d51b0239ddd3314ea5280eaff99",
    "test": "918b42ee916d72cf18e91580a16ca5fabe8757aef8eaeca2bfcf5f901fcf71c4",
}
"""Of the ascending, comma-joined ids."""


class Counts(Record):
    """How many problems each part has."""

    train: int
    plus: int
    test: int
    """Canonical test problems outside MBPP+; 0 for generated problems."""
    canonical_test: int
    """The whole canonical test split; 0 for generated problems."""


class Ids(Record):
    """Ascending integer ids."""

    train: tuple[int, ...]
    plus: tuple[int, ...]
    test: tuple[int, ...]

    @model_validator(mode="after")
    def _disjoint(self) -> Self:
        for part in (self.train, self.plus, self.test):
            if list(part) != sorted(set(part)):
                raise ValueError("ids: not ascending or not distinct; sort them")
        if set(self.train) & set(self.plus) or set(self.train) & set(self.test) or set(self.plus) & set(self.test):
            raise ValueError("ids: a problem is in two parts; the parts must be disjoint")
        return self


class Digests(Record):
    """sha256 of each part's comma-joined ids."""

    train: str
    plus: str
    test: str


class Source(Record):
    """A file that the problems were read from, or the problems that were generated."""

    sha256: str
    rows: int


class Split(Record):
    """`split.json` (contracts: split/1)."""

    schema_: Literal["split/1"] = Field(default="split/1", alias="schema")
    counts: Counts
    ids: Ids
    sha256: Digests
    sources: dict[str, Source]
    problems: dict[str, str] = Field(default_factory=dict)
    """sha256 of each part's problems as written (`train`, and each benchmark): ids do not say what they stand for."""

    @property
    def identity(self) -> str:
        """The `split_sha256` of manifests: ids and content of the problems, not the files that they came from."""
        return sha256_json({"ids": self.ids.model_dump(), "problems": self.problems})


def partition(mbpp_ids: Iterable[int], plus_ids: Iterable[int]) -> Ids:
    """Return who trains and who evaluates; arguments are integers in any order."""
    everything, plus = set(mbpp_ids), set(plus_ids)
    if not plus <= everything:
        raise ValueError(f"ids: {sorted(plus - everything)[:5]} are in MBPP+ but not in MBPP")
    canonical = everything & set(CANONICAL_TEST)
    return Ids(
        train=tuple(sorted(everything - canonical - plus)),
        plus=tuple(sorted(plus)),
        test=tuple(sorted(canonical - plus)),
    )


def digest(ids: Sequence[int]) -> str:
    """Return the sha256 of the comma-joined ids."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()


def build_split(ids: Ids, *, num_canonical_test: int, sources: Mapping[str, Source]) -> Split:
    """Return the record of a partition."""
    parts = {"train": ids.train, "plus": ids.plus, "test": ids.test}
    return Split(
        counts=Counts(**{k: len(v) for k, v in parts.items()}, canonical_test=num_canonical_test),
        ids=ids,
        sha256=Digests(**{k: digest(v) for k, v in parts.items()}),
        sources=dict(sources),
    )


def split_mbpp(mbpp: Sequence[Problem], plus: Sequence[Problem], sources: Mapping[str, Source]) -> Split:
    """Partition MBPP against MBPP+ and assert the counts and hashes of the specification."""
    numbers = [p.number for p in mbpp]
    split = build_split(
        partition(numbers, (p.number for p in plus)),
        num_canonical_test=len(set(numbers) & set(CANONICAL_TEST)),
        sources=sources,
    )
    # Both files passed their content checks, so a difference here is our own mistake.
    assert split.counts.model_dump() == MBPP_COUNTS, split.counts
    assert split.sha256.model_dump() == MBPP_SHA256, split.sha256
    return split
