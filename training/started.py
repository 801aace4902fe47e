"""What a run directory holds before the trainer touches it: whose it is, from where to go on, and whether all is there.

Read before anything heavy is imported, so that a refusal costs a second.
"""

import logging
from pathlib import Path

from evaluation.errors import IncompleteError, InputError
from evaluation.files import read_jsonl, sha256_file, write_json
from evaluation.manifests import MANIFEST, Manifest, damaged, is_complete, read_manifest, write_manifest
from evaluation.program import read_record
from training.cell import Identity
from training.folder import Began, CellFile, Result, RunFolder

logger = logging.getLogger("training")


def begin(folder: RunFolder, cell_file: CellFile, problems: Path, step: int) -> None:
    """Note whose training begins in this folder, after which step, unless it has begun before."""
    if not folder.began_json.is_file():
        began = Began(identity=cell_file.identity, problems_sha256=sha256_file(problems), after_step=step)
        write_json(folder.began_json, began)


def began(folder: RunFolder) -> Began | None:
    """Return what was noted when training began in this folder, if it has."""
    return read_record(Began, folder.began_json) if folder.began_json.is_file() else None


def refuse_other(folder: RunFolder, cell_file: CellFile) -> None:
    """Refuse a folder that another configuration, split, prompt or revision has trained in.

    Raises:
        InputError: with the fields that differ.
    """
    parts = [*map(folder.resume, folder.resumes()), *map(folder.checkpoint, folder.checkpoints())]
    held: list[tuple[Path, Manifest | Identity | None]] = [
        (part, read_manifest(part)) for part in (*parts, folder.logs, folder.rollouts)
    ]
    start = began(folder)
    for part, found in (*held, (folder.began_json, start and start.identity)):
        if found is not None and found.fingerprint != cell_file.identity.fingerprint:
            difference = "; ".join(cell_file.identity.differences(found)[:4])
            raise InputError("cell", part, f"holds another run ({difference})", "use another --runs folder")


def refuse_other_problems(folder: RunFolder, path: Path) -> None:
    """Refuse other problems than those that the cell began with.

    Raises:
        InputError: with both hashes.
    """
    start, found = began(folder), sha256_file(path)
    if start is not None and start.problems_sha256 != found:
        reason = f"is not what this cell began with (sha256 {found[:12]} -> {start.problems_sha256[:12]})"
        raise InputError("problems_path", path, reason, "restore it, or use another --runs folder")


def newest_resume(folder: RunFolder) -> int | None:
    """Return the step of the newest whole resume state, by number; a damaged one is passed over with a warning."""
    for step in reversed(folder.resumes(whole=False)):
        path = folder.resume(step)
        difference = damaged(path) if (path / MANIFEST).is_file() else f"has no {MANIFEST}"
        if difference is None:
            return step
        logger.warning("%s is passed over: %s", path, difference)
    return None


def refuse_damaged(folder: RunFolder) -> None:
    """Raise IncompleteError where somebody has changed the sealed records of an ended cell."""
    for part in (folder.logs, folder.rollouts):
        if (part / MANIFEST).is_file() and (difference := damaged(part)):
            raise _incomplete(part, difference)


def close(folder: RunFolder, cell_file: CellFile) -> None:
    """Seal logs and rollouts with their manifests.

    Raises:
        IncompleteError: not all of them is there, of the steps that were taken here.
    """
    identity = cell_file.identity
    refuse_lost(folder)
    for path, kind in ((folder.logs, "logs"), (folder.rollouts, "rollouts")):
        if path.is_dir() and not is_complete(path):
            write_manifest(path, kind, identity.provenance(cell_file.cell.name))
    logger.info("%s has ended", cell_file.cell.name)


def refuse_lost(folder: RunFolder) -> None:
    """Raise IncompleteError where the records of an ended cell lack a step; sealed like this nobody would see it."""
    result, start = read_record(Result, folder.result_json), began(folder)
    rows = read_jsonl(folder.steps_jsonl) if folder.steps_jsonl.is_file() else []
    if [r["global_step"] for r in rows] != list(range(1, result.last_step + 1)):
        raise _incomplete(folder.steps_jsonl, f"has {len(rows)} of {result.last_step} steps")
    sampled = result.last_step if result.end == "finished" else result.last_step - 1  # it may have broken off before
    for step in range(start.after_step + 1 if start else sampled + 1, sampled + 1):
        if not folder.rollout(step).is_file():
            raise _incomplete(folder.rollouts, f"{folder.rollout(step).name} is missing")


def _incomplete(part: Path, difference: str) -> IncompleteError:
    return IncompleteError(f"folder={part}: {difference}; restore it, or remove the cell's folder to train it again")
