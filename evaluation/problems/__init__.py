"""The benchmarks by name, and the files of problems that training and evaluation read."""

from evaluation.problems.prepare import (
    BENCHMARKS,
    Benchmark,
    Prepared,
    load_benchmark,
    load_split,
    num_samples,
    prepare,
    read_problems,
    write_problems,
)

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "Prepared",
    "load_benchmark",
    "load_split",
    "num_samples",
    "prepare",
    "read_problems",
    "write_problems",
]
