"""Scores and samples that a store has already: read with their bytes checked, and used again where that is sound."""

import hashlib
import logging
from pathlib import Path

from evaluation.errors import InputError
from evaluation.files import sha256_file
from evaluation.protocol import Protocol
from evaluation.scores import Score
from tasks.work import Work
from training.cell import Cell
from training.store import Store

logger = logging.getLogger(__name__)


def stored_score(store: Store, folder: str, step: int) -> Score | None:
    """Return a complete score of a store, its bytes checked; None if there is none.

    Raises:
        InputError: its bytes are not those of its manifest.
    """
    found = read_score(store, folder, step)
    return found[0] if found is not None else None


def read_score(store: Store, folder: str, step: int) -> tuple[Score, str] | None:
    """Return a score as `stored_score` does, and the sha256 of its file.

    Raises:
        InputError: its bytes are not those of its manifest.
    """
    rel = f"{folder}/global_step_{step}"
    manifest = store.manifest(rel)
    raw = store.read(f"{rel}/score.json") if manifest is not None else None
    if raw is None or manifest is None:
        return None
    digest = hashlib.sha256(raw).hexdigest()
    if digest != next((f.sha256 for f in manifest.files if f.path == "score.json"), None):
        reason, fix = "has other bytes than its manifest says", "remove its folder; the same run then sends it again"
        raise InputError("score", f"{store.url}/{rel}/score.json", reason, fix)
    return Score.model_validate_json(raw), digest


def reuse_samples(work: Work, cell: Cell | None, step: int, protocol: Protocol, out: Path) -> bool:
    """Take over the samples of a checkpoint that another protocol drew, where this one would draw the very same.

    Sound where prompt, weights and everything that a draw depends on are equal (`Protocol.holds`): then a changed k, or
    fewer samples or problems, needs no model. The evaluation finds them in `out`, as after a kill, and judges them.
    """
    target, samples = out / "samples.jsonl", "samples.jsonl"
    wanted = Path(work.score_rel(cell, protocol, step))
    root = wanted.parent.parent.as_posix()
    for name in [] if target.exists() else work.store.backend.folders(root):
        rel = f"{root}/{name}/{wanted.name}"
        found, manifest = stored_score(work.store, f"{root}/{name}", step), work.store.manifest(rel)
        if found is None or manifest is None or found.protocol is None or found.num_errors:
            continue
        same = manifest.fingerprint == work.identity(cell).fingerprint and found.prompt_sha256 == work.prompt.sha256
        if not (same and found.protocol.holds(protocol)):
            continue
        fetched = target.with_name("samples.fetched")
        work.store.backend.get(f"{rel}/{samples}", fetched)
        if sha256_file(fetched) != next((f.sha256 for f in manifest.files if f.path == samples), None):
            fetched.unlink()
            raise OSError(f"{work.store.url}/{rel}/{samples}: hash differs from its manifest; run `ablation verify`")
        fetched.replace(target)
        logger.info("%s: judged from the samples of %s; nothing is drawn", wanted, name)
        return True
    return False
