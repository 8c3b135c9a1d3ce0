"""Writing a config as TOML, so that a run folder holds exactly what ran.

Reading it back gives an equal tree.
"""

from __future__ import annotations

import datetime
import math
import os
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.config.schema import RunConfig

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SHORT_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def save(config: RunConfig, path: Path) -> None:
    """Writes the whole resolved config, defaults included; a reader sees all of it or the old file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(to_toml(config), encoding="utf-8")
    temporary.replace(path)


def to_toml(config: RunConfig) -> str:
    """The config as TOML text. Keys that are unset are left out."""
    lines = ["# The resolved recipe of one run: every key, defaults included."]
    lines += _table(config.model_dump(mode="python"), ())
    return "\n".join(lines) + "\n"


def _table(values: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """The plain keys of one table, then its sub-tables (TOML wants them in this order)."""
    plain = {
        key: value for key, value in values.items() if value is not None and not isinstance(value, Mapping)
    }
    nested = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    lines = ["", f"[{'.'.join(_key(part) for part in path)}]"] if path else []
    lines += [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    for key, value in nested.items():
        lines += _table(typing.cast("Mapping[str, Any]", value), (*path, key))
    return lines


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _text(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Mapping):
        pairs = typing.cast("Mapping[str, Any]", value).items()
        return (
            "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in pairs if item is not None) + "}"
        )
    if isinstance(value, Sequence):
        return "[" + ", ".join(_value(item) for item in typing.cast("Sequence[Any]", value)) + "]"
    raise TypeError(
        f"TOML has no {type(value).__name__}; use text, numbers, booleans, dates, lists or tables"
    )


def _text(value: str) -> str:
    escaped = "".join(
        _SHORT_ESCAPES.get(sign, sign)
        if (sign >= " " and sign != "\x7f") or sign in _SHORT_ESCAPES
        else f"\\u{ord(sign):04x}"
        for sign in value
    )
    return f'"{escaped}"'
