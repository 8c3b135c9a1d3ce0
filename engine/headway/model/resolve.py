"""model.path to a folder: a local folder as it is, builtin:NAME made on the spot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headway.errors import ModelError
from headway.model.builtin import EOS, builtin_folder, check_builtin, sort_tokenizer
from headway.model.loading import Tokenizer


def resolve_model(path: str, note: Callable[[str], None] = lambda line: None) -> Path:
    """The folder that `model.path` names.

    Raises:
        ModelError: neither a folder in transformers format nor a known builtin.
    """
    if path.startswith("builtin:"):
        return builtin_folder(path.removeprefix("builtin:"), note)
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model.path: {path!r} is not a model folder (no config.json in it); "
            "give a folder in transformers format or builtin:sort5"
        )
    return folder


def builtin_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of "builtin:NAME", without making the model.

    Raises:
        ModelError: no such builtin.
    """
    check_builtin(path.removeprefix("builtin:"))
    return Tokenizer(sort_tokenizer(), (EOS,))
