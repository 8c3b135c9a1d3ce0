"""The dotted paths of the schema.

`learner.lr` and its kin, for overrides, messages and the reference page.
"""

from __future__ import annotations

import difflib
import types
import typing
from functools import cache
from typing import Any, Literal

from pydantic.fields import FieldInfo

from headway.config.schema import RunConfig
from headway.config.section import Section


@cache
def fields() -> dict[str, FieldInfo]:
    """Every key that holds a value, by dotted path, in the order of the schema."""
    found: dict[str, FieldInfo] = {}
    _collect(RunConfig, "", found)
    return found


def _collect(section: type[Section], prefix: str, found: dict[str, FieldInfo]) -> None:
    for name, info in section.model_fields.items():
        if is_section(info.annotation):
            _collect(typing.cast("type[Section]", info.annotation), f"{prefix}{name}.", found)
        else:
            found[f"{prefix}{name}"] = info


@cache
def sections() -> dict[str, type[Section]]:
    """Every section by its path, "" for the recipe itself; a section comes before those inside it."""
    found: dict[str, type[Section]] = {}
    _collect_sections(RunConfig, "", found)
    return found


def _collect_sections(section: type[Section], path: str, found: dict[str, type[Section]]) -> None:
    found[path] = section
    for name, info in section.model_fields.items():
        if is_section(info.annotation):
            below = f"{path}.{name}" if path else name
            _collect_sections(typing.cast("type[Section]", info.annotation), below, found)


def is_section(annotation: Any) -> bool:
    """Whether a field's type is a section of the recipe."""
    return isinstance(annotation, type) and issubclass(annotation, Section)


def is_free_form(path: str) -> bool:
    """Whether the path lies inside a table that takes any key, such as env.args."""
    head, _, _ = path.rpartition(".")
    while head:
        info = fields().get(head)
        if info is not None:
            return typing.get_origin(info.annotation) is dict
        head, _, _ = head.rpartition(".")
    return False


def is_known(path: str) -> bool:
    """Whether a value may be given for the path."""
    return path in fields() or is_free_form(path)


def suggestion(path: str) -> str:
    """What to append for an unknown path: "; did you mean learner.lr?", or "" when nothing comes near."""
    section, _, leaf = path.rpartition(".")
    names = list(fields()) if section else [*fields(), *(name for name in sections() if name)]
    by_leaf: dict[str, list[str]] = {}
    for name in names:
        by_leaf.setdefault(name.rpartition(".")[2], []).append(name)
    siblings = [name for name in names if section and name.rpartition(".")[0] == section]
    near = (
        _close(path, siblings, 0.75)
        or by_leaf.get(leaf, [])
        or _close(path, names, 0.7)
        or [name for word in _close(leaf, list(by_leaf), 0.7) for name in by_leaf[word]]
    )
    return f"; did you mean {' or '.join(near[:3])}?" if near else ""


def _close(word: str, candidates: list[str], cutoff: float) -> list[str]:
    return difflib.get_close_matches(word, candidates, n=1, cutoff=cutoff)


def type_words(annotation: Any) -> str:
    """A field's type in words for people: "integer", "one of: none, tis"."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return "one of: " + ", ".join(value if value else '""' for value in arguments)
    if origin in (typing.Union, types.UnionType):
        kinds = [type_words(argument) for argument in arguments if argument is not type(None)]
        return " or ".join(kinds) + (", or unset" if type(None) in arguments else "")
    if origin is tuple:
        words = type_words(arguments[0])
        return f"list of {words}" if typing.get_origin(arguments[0]) is Literal else f"list of {words}s"
    if origin is dict:
        return "table"
    return {bool: "true or false", int: "integer", float: "number", str: "text"}.get(
        annotation, str(annotation)
    )
