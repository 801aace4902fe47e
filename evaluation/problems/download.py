"""Fetch a data set to a file: `python -m evaluation.problems.download NAME OUT`, run as a child.

Prints the revision. Guarantees nothing about the content (the caller checks it) and has no time limit of its own (the
caller has one). An unreachable hub is reported after one quick probe; what is in the local cache is used all the same.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from evaluation.files import write_text

MBPP_REPOSITORY = "google-research-datasets/mbpp"
MBPP_REVISION = "4bb6404fdc6cacfda99d4ac4205087b89d32030c"
"""Commit of the hub repository, taken from several public projects that pin it; the content is checked anyway."""
MBPP_PLUS_VERSION = "v0.2.0"
GSM8K_REPOSITORY = "openai/gsm8k"
GSM8K_REVISION = "e53f048856ff4f594e959d75785d2c2d37b678ee"
"""As MBPP's: pinned by public projects, and the content is checked."""
PROBE_TIMEOUT_S = 15


def download_mbpp(out: Path) -> str:
    """Write the rows of all four splits of MBPP's `full` configuration as JSONL; return the commit."""
    parts = _from_hub(MBPP_REPOSITORY, "full", MBPP_REVISION)
    write_text(out, "".join(json.dumps(row) + "\n" for part in parts.values() for row in part))
    return MBPP_REVISION


def download_gsm8k(out: Path) -> str:
    """Write the rows of both splits of GSM8K's `main` as JSONL, each with its split; return the commit."""
    parts = _from_hub(GSM8K_REPOSITORY, "main", GSM8K_REVISION)
    rows = ({"split": split, **row} for split, part in parts.items() for row in part)
    write_text(out, "".join(json.dumps(row) + "\n" for row in rows))
    return GSM8K_REVISION


def _from_hub(repository: str, configuration: str, revision: str) -> Any:
    """Return the splits of a hub data set, from the cache where the hub does not answer."""
    import datasets
    import huggingface_hub
    from datasets import config

    try:
        huggingface_hub.HfApi().dataset_info(repository, revision=revision, timeout=PROBE_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - whatever the network does; the cache may still serve
        config.HF_HUB_OFFLINE = True
        sys.stderr.write(f"{repository}: {error}\n")
    parts = datasets.load_dataset(repository, configuration, revision=revision)
    assert isinstance(parts, datasets.DatasetDict)
    return parts


def download_mbpp_plus(out: Path) -> str:
    """Copy EvalPlus's own MBPP+ file (its cache, else its release) to `out`; return the version."""
    from evalplus.data import mbpp

    # `get_mbpp_plus` would turn the inputs into Python objects; problems keep them as stored.
    shutil.copyfile(mbpp._ready_mbpp_plus_path(version=MBPP_PLUS_VERSION), out)
    return f"{MBPP_PLUS_VERSION} {mbpp.get_mbpp_plus_hash(version=MBPP_PLUS_VERSION)}"


def download_humaneval_plus(out: Path) -> str:
    """Copy EvalPlus's own HumanEval+ file (its cache, else its release) to `out`; return the version."""
    from evalplus.data import humaneval

    shutil.copyfile(humaneval._ready_human_eval_plus_path(), out)
    return f"{humaneval.HUMANEVAL_PLUS_VERSION} {humaneval.get_human_eval_plus_hash()}"


DOWNLOADS = {
    "mbpp": download_mbpp,
    "mbpp_plus": download_mbpp_plus,
    "humaneval_plus": download_humaneval_plus,
    "gsm8k": download_gsm8k,
}


def main(argv: list[str]) -> int:
    """Run one download; the last line of stdout is the revision, of stderr the reason of a failure."""
    name, out = argv
    try:
        revision = DOWNLOADS[name](Path(out))
    except Exception as error:  # noqa: BLE001 - the boundary: one line for the caller, whatever the library raised
        while error.__cause__ is not None:  # libraries wrap the reason: "an error occurred"
            error = error.__cause__
        sys.stderr.write(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}\n")
        return 3
    sys.stdout.write(f"{revision}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
