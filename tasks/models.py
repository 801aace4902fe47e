"""Where a base model's files are, and what they are: shipped, on the hub, or converted from a wheel."""

import logging
import sys
from pathlib import Path

from evaluation.errors import MachineError
from evaluation.files import sha256_file
from evaluation.manifests import list_files
from evaluation.prompts import PROMPTS, PromptSpec, resolve
from evaluation.records import Record, sha256_json
from tasks.launch import run_to_end
from training.cell import Model

logger = logging.getLogger(__name__)

PROMPT_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]


class ModelFiles(Record):
    """A base model, ready to load."""

    path: str
    """Local folder, or hub repository."""
    revision: str | None
    """Hub commit; None for a local folder."""
    identity: str
    """What manifests record: the commit, or the hash of the files."""
    prompt_dir: str
    """Local folder with at least config and tokenizer."""


def locate_model(model: Model, work: Path) -> ModelFiles:
    """Return a model's files; the hub's weights are not fetched here, only what the prompt is read from.

    Raises:
        MachineError: the hub or a package cannot be reached.
    """
    kind, _, name = model.source.partition(":")
    if kind == "package":
        return _local(Path(__file__).resolve().parent.parent / "training" / name)
    if kind == "gguf":
        out = work / "models" / model.name
        run_to_end([sys.executable, "-m", "training.convert_gguf", str(out)], log=work / "models" / f"{model.name}.log")
        return _local(out)
    return _hub(model)


def _local(folder: Path) -> ModelFiles:
    hashes = {p.name: sha256_file(p) for p in list_files(folder)}
    return ModelFiles(path=str(folder), revision=None, identity=f"sha256:{sha256_json(hashes)}", prompt_dir=str(folder))


def _hub(model: Model) -> ModelFiles:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        found = snapshot_download(model.source, revision=model.revision, allow_patterns=PROMPT_FILES)
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError) as e:
        reason = f"cannot be fetched ({type(e).__name__})"
        raise MachineError("model", model.source, reason, "connect to the hub, or fill its cache") from e
    commit = model.revision or Path(found).name
    return ModelFiles(path=model.source, revision=commit, identity=commit, prompt_dir=found)


def prompt_of(model: Model, files: ModelFiles, benchmark: str) -> PromptSpec:
    """Return the prompt specification that training and evaluation share."""
    return resolve(Path(files.prompt_dir), name=PROMPTS[benchmark], rendering=model.rendering)
