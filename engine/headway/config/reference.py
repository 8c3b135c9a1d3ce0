"""docs/configuration.md, generated from the schema.

`python -m headway.config.reference docs/configuration.md`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from headway.config import paths

_HEAD = """\
# Configuration

Generated from `engine/headway/config/schema.py`
by `python -m headway.config.reference docs/configuration.md`; a test keeps it current.

A recipe is a TOML file. Any key can be given on the command line as well, by its dotted path
(`headway run recipe.toml --learner.lr 1e-6 --batch.prompts=16`), or in the environment
(`HEADWAY__LEARNER__LR=1e-6`); the command line wins over the environment, the environment over the file.
A value is read as TOML (`1e-6`, `true`, `["a", "b"]`), as text where it is none; `none` unsets a key that
may be unset. Unknown keys are refused, all faults are reported at once, and the resolved recipe is saved as
`config.toml` in the folder of the run. Rules across keys (such as the window against the lag) are checked
before anything starts; `--dry-run` prints the plan that follows.
"""


def markdown() -> str:
    """The page as text."""
    lines = [_HEAD]
    for name, section in paths.sections().items():
        lines += [f"## {name}" if name else "## Top level", ""]
        if name:
            lines += [(section.__doc__ or "").strip(), ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        prefix = f"{name}." if name else ""
        lines += [
            _row(f"{prefix}{key}", info)
            for key, info in section.model_fields.items()
            if f"{prefix}{key}" in paths.fields()
        ]
        lines.append("")
    return "\n".join(lines)


def _row(path: str, info: FieldInfo) -> str:
    cells = (f"`{path}`", _type(info), _default(info), info.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(info: FieldInfo) -> str:
    return paths.type_words(info.annotation) + _range(info)


def _range(info: FieldInfo) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = [
        f"{sign} {value}"
        for constraint in info.metadata
        for name, sign in signs.items()
        if (value := getattr(constraint, name, None)) is not None
    ]
    return f" ({', '.join(limits)})" if limits else ""


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value: Any = info.get_default(call_default_factory=True)
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f"`{value}`" if value else "empty"
    if isinstance(value, tuple | dict):
        return "`[]`" if isinstance(value, tuple) else "`{}`"
    return f"`{value}`"


if __name__ == "__main__":
    if len(sys.argv) == 2:
        Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
    else:
        sys.stdout.write(markdown())
