"""Imported first by a module that is run as a program: a signal may come while the rest is still being imported.

Standard library only; `evaluation.program.run_program` takes the signals over.
"""

import os
import signal

STOPPED = 75
LINE = b"error: signal=INT or TERM: stopped before anything was begun; run the same command again\n"


def leave_on_signals() -> None:
    """End with the exit code of a stopped program at SIGTERM and Ctrl-C, at once: there is nothing to save yet."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)


def _leave(*_: object) -> None:
    os.write(2, LINE)
    os._exit(STOPPED)
