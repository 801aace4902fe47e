"""Make a large sample file of recorded programs: `python benchmarks/made_samples.py OUT RECORDED... --distinct 0.2`.

60,480 rows in EvalPlus's format, spread evenly over the problems without Mbpp/599. A distinct program is a recorded one
with a constant of its own added; its copies differ from it in names, comments and docstring only.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

ROWS = 60_480
LEFT_OUT = "Mbpp/599"


def recorded(paths: Sequence[Path]) -> dict[str, list[str]]:
    """Return the different recorded programs of each problem."""
    found: dict[str, list[str]] = {}
    for path in paths:
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            if row["task_id"] != LEFT_OUT and row["solution"] not in found.setdefault(row["task_id"], []):
                found[row["task_id"]].append(row["solution"])
    return found


def make(programs: dict[str, list[str]], rows: int, distinct: float) -> Iterator[dict[str, str]]:
    """Yield samples: the i-th of a problem is copy i % c of variant i // c, where c is how many share one meaning."""
    copies = round(1 / distinct)
    names = sorted(programs, key=lambda n: int(n.rpartition("/")[2]))
    for at in range(rows):
        problem, i = names[at % len(names)], at // len(names)
        variant, copy = divmod(i, copies)
        source = programs[problem][variant % len(programs[problem])]
        yield {
            "task_id": problem,
            "solution": f"{source}\n# copy {copy}\n_variant_{copy} = {variant}\n",
            "_identifier": f"{problem} {i}",
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("recorded", type=Path, nargs="+")
    parser.add_argument("--distinct", type=float, default=0.2)
    parser.add_argument("--rows", type=int, default=ROWS)
    args = parser.parse_args()
    if not 0 < args.distinct <= 1:
        parser.error("--distinct is a share, above 0 and at most 1")
    with args.out.open("w", encoding="utf-8") as f:
        for row in make(recorded(args.recorded), args.rows, args.distinct):
            f.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
