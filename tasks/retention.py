"""Disk space: a checkpoint's copy on this disk goes once the store has it, and its scores where they are made here.

A receipt stays in its place, so that a trainer that goes on from that step does not write it again. Whoever reads the
copy holds a shared lock on its folder; it is then left to them, who call `spare` when they are done.
"""

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from evaluation.files import write_json
from evaluation.manifests import MANIFEST
from tasks.work import Work
from training.cell import Cell
from training.folder import Receipt

logger = logging.getLogger(__name__)


def spare(work: Work, cell: Cell, step: int) -> bool:
    """Remove the local copy of a checkpoint if nobody needs it any more; say whether it is gone."""
    folder = work.folder(cell)
    local = folder.checkpoint(step)
    if not local.is_dir():
        return True
    if not work.published(cell, step) or (work.scores_here and not work.scored(cell, step)):
        return False
    with _held(local, fcntl.LOCK_EX) as alone:
        if not alone:
            return False
        write_json(folder.receipt(step), Receipt(store=work.store.url))
        (local / MANIFEST).unlink(missing_ok=True)  # a kill from here on must not leave half of it for whole
        shutil.rmtree(local)
    logger.info("%s: the store has it; the copy here was removed", local)
    return True


def spare_all(work: Work) -> None:
    """Remove what an earlier run was killed before removing."""
    for cell in work.cells:
        for step in cell.checkpoints:
            spare(work, cell, step)


@contextlib.contextmanager
def reading(local: Path) -> Iterator[bool]:
    """Keep a checkpoint's copy on this disk while it is read; yields False where it is not there."""
    with _held(local, fcntl.LOCK_SH) as there:
        yield there


@contextlib.contextmanager
def _held(folder: Path, how: int) -> Iterator[bool]:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        yield False
        return
    try:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(fd)
