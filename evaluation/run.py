"""Draw, judge and score checkpoints: `python -m evaluation.run FOLDER`, by the request.json in FOLDER.

One process serves every unit of the request, and those appended while it runs, so that start-up is paid once. Two that
share the folder, one with `--only draw` and one with `--only judge`, overlap: samples are judged while they are drawn,
and the GPU is free when the last one is. Samples are kept as they are drawn: a killed run goes on with the same
samples, and what is scored is not scored again.
Exit codes: 0 every unit is scored; 1 a unit failed, or the judge failed on a sample; 2, 3, 75 as everywhere.
"""

if __name__ == "__main__":  # the imports below take a second
    from evaluation.early import leave_on_signals

    leave_on_signals()

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from evaluation.drawing import Drawer
from evaluation.errors import IncompleteError, InputError
from evaluation.files import write_text
from evaluation.judging import Judger
from evaluation.manifests import is_complete
from evaluation.program import leave, read_record, run_program
from evaluation.request import FAILURE, REQUEST, Request, Unit

logger = logging.getLogger("evaluation")

LOOK_EVERY_S = 0.2
JUDGE_LINGERS_S = 600.0
"""Who only judges holds little, and waits for the next unit as long."""


class Part(Protocol):
    """Half of the work on a unit: to draw it, or to judge it."""

    def left(self, waiting: Sequence[Unit]) -> Sequence[Unit]:
        """Return those of the units without a score that something is still to be done for."""
        ...

    def step(self, request: Request, unit: Unit) -> bool:
        """Do what can be done of a unit now; return whether that was anything."""
        ...


def main(argv: list[str] | None = None) -> int:
    """Serve the folder's request; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.run", description="Score the units of FOLDER.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=("draw", "judge"), help="one half; another process does the other")
    parser.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    return run_program(lambda: serve(args.folder, args.only), debug=args.debug)


def serve(folder: Path, only: str | None = None) -> int:
    """Draw and judge unit after unit, or do one half of it, until none is left and no more are to come."""
    look = _Look(folder)
    request, judger = look(), Judger()
    # The judge comes first: where it cannot be had nothing is drawn.
    parts: list[Part] = [judger] if only == "judge" else [Drawer()] if only == "draw" else [judger, Drawer()]
    if only is None:
        for unit in request.units:
            _failure(unit).unlink(missing_ok=True)  # an earlier run gave it up; this one tries again
    linger_s = JUDGE_LINGERS_S if only == "judge" else request.linger_s
    idle_since, done = time.monotonic(), set[str]()
    try:
        while True:
            done |= {u.out for u in request.units if u.out not in done and is_complete(Path(u.out))}
            waiting = [u for u in request.units if u.out not in done and not _failure(u).exists()]
            if any(_attempt(part, request, unit) for part in parts for unit in part.left(waiting)):
                idle_since = time.monotonic()
            elif not any(part.left(waiting) for part in parts) and (
                request.closed or time.monotonic() - idle_since > linger_s
            ):
                break
            else:
                time.sleep(LOOK_EVERY_S)
            request = look()
    finally:
        judger.close()
    failed = [_failure(u).read_text(encoding="utf-8").strip() for u in request.units if _failure(u).exists()]
    if failed:
        raise IncompleteError(f"units={len(failed)}: {failed[0]}; run the same command again")
    return 0


def _attempt(part: Part, request: Request, unit: Unit) -> bool:
    """Do a step; a unit that cannot be scored is given up, and the others go on."""
    try:
        return part.step(request, unit)
    except IncompleteError as e:
        write_text(_failure(unit), f"{e}\n")
        logger.warning("%s: %s", unit.label, e)
        return True


def _failure(unit: Unit) -> Path:
    return Path(unit.out) / FAILURE


class _Look:
    """The request, read again when it has changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: tuple[int, int] | None = None
        self.request: Request | None = None

    def __call__(self) -> Request:
        path = self.folder / REQUEST
        stat = path.stat() if path.is_file() else None
        key = (stat.st_ino, stat.st_mtime_ns) if stat else None
        if self.request is None or key != self.seen:
            self.request, self.seen = load_request(self.folder), key
        return self.request


def load_request(folder: Path) -> Request:
    """Read and check request.json, before anything heavy is imported.

    Raises:
        InputError: it is missing, says something impossible, or names problems that are not there.
    """
    if not (folder / REQUEST).is_file():
        raise InputError("folder", folder, f"has no {REQUEST}", "name the folder of a request")
    request = read_record(Request, folder / REQUEST)
    for unit in request.units:
        path = request.problems.get(unit.protocol.benchmark)
        if path is None or not Path(path).is_file():
            raise InputError("problems", path, f"no problems of {unit.protocol.benchmark}", "name their file")
    return request


if __name__ == "__main__":
    leave(main())
