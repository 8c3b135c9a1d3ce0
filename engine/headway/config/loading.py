"""Reading a recipe: a TOML file, then environment variables, then overrides; every fault reported at once.

Who calls it: the CLI, headway.Engine, the learner and the generators (on the config.toml of their run).
Overrides are nested mappings ({"learner": {"lr": 1e-6}}), dotted mappings ({"learner.lr": 1e-6}) or the
words of a command line (["--learner.lr", "1e-6"]). Environment variables read HEADWAY__LEARNER__LR=1e-6.
"""

from __future__ import annotations

import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headway.config import checks, paths
from headway.config.schema import RunConfig
from headway.errors import ConfigError

ENVIRONMENT_PREFIX = "HEADWAY__"

Overrides = Mapping[str, Any] | Sequence[str]
Fault = tuple[str, str]


def load_recipe(
    path: str | Path | None = None,
    overrides: Overrides | None = None,
    environ: Mapping[str, str] | None = None,
) -> RunConfig:
    """The effective config of a recipe.

    Args:
        path: a TOML file; None takes defaults and overrides only.
        overrides: nested or dotted mapping, or words of a command line; they win over everything else.
        environ: environment to read HEADWAY__SECTION__KEY from; None reads none.

    Raises:
        ConfigError: the file cannot be read or parsed, a key is unknown, a value has the wrong type or
            range, or keys contradict each other; `faults` holds all of them.
    """
    data = _read(Path(path)) if path is not None else {}
    faults: list[Fault] = []
    for given in (environment_overrides(environ or {}), overrides or {}):
        pairs, wrong = dotted(given)
        faults += wrong
        for key, value in pairs:
            _assign(data, key, value, faults)
    return validate(data, faults)


def load_toml(text: str) -> RunConfig:
    """The config that to_toml wrote.

    Raises:
        ConfigError: it is none.
    """
    try:
        return validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([("", f"not TOML: {error}")]) from None


def validate(data: Mapping[str, Any], faults: Iterable[Fault] = ()) -> RunConfig:
    """The config of nested plain values.

    Raises:
        ConfigError: with `faults` and every fault of `data`.
    """
    found = list(faults)
    config, wrong = _build(data)
    found += wrong
    bad = {path for path, _ in found}
    repaired = config or _repaired(data, bad)
    if repaired is not None:
        found += checks.faults(repaired, skip=bad)
    if found:
        raise ConfigError(_in_order(found))
    assert config is not None
    return config


def typed(data: Mapping[str, Any]) -> RunConfig:
    """The config of nested plain values, each of its type; the rules between keys are not asked.

    Raises:
        ConfigError: with every value that is of another type, or beyond its own limits.
    """
    config, wrong = _build(data)
    if config is None:
        raise ConfigError(_in_order(wrong))
    return config


def dotted(overrides: Overrides) -> tuple[list[tuple[str, Any]], list[Fault]]:
    """Overrides as (dotted path, value) pairs, and the faults of their spelling."""
    if isinstance(overrides, Mapping):
        return list(_flatten(overrides, "")), []
    return _from_words(list(overrides))


def environment_overrides(environ: Mapping[str, str]) -> dict[str, Any]:
    """HEADWAY__LEARNER__LR=1e-6 as {"learner.lr": 1e-6}; names are matched in lower case."""
    found: dict[str, Any] = {}
    for name, text in environ.items():
        if name.startswith(ENVIRONMENT_PREFIX):
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            found[key] = parse_value(key, text)
    return found


def parse_value(path: str, text: str) -> Any:
    """The value of a word for a dotted path: a TOML scalar or array where it is one, else the text itself.

    A key that takes text keeps it as it is (`--name 7`); `none` unsets a key that may be unset.
    """
    info = paths.fields().get(path)
    annotation = info.annotation if info is not None else Any
    if annotation is str:
        return text
    if text == "none" and type(None) in typing.get_args(annotation):
        return None
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _from_words(words: list[str]) -> tuple[list[tuple[str, Any]], list[Fault]]:
    pairs: list[tuple[str, Any]] = []
    faults: list[Fault] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("--") or len(word) == 2:
            faults.append(("", f"{word!r} is not an override: write --section.key VALUE"))
            continue
        key, has_value, text = word[2:].partition("=")
        key = key if paths.is_known(key) else key.replace("-", "_")
        if not has_value:
            if position == len(words):
                faults.append((key, "an override needs a value: --section.key VALUE" + _unknown(key)))
                continue
            text = words[position]
            position += 1
        pairs.append((key, parse_value(key, text)))
    return pairs, faults


def _unknown(path: str) -> str:
    return "" if paths.is_known(path) else f" (unknown key{paths.suggestion(path)})"


def _flatten(tree: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and path not in paths.fields() and not paths.is_free_form(path):
            yield from _flatten(typing.cast("Mapping[str, Any]", value), f"{path}.")
        else:
            yield path, value


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        folder = path.parent if path.parent.is_dir() else Path()
        near = ", ".join(sorted(str(other) for other in folder.glob("*.toml"))[:8])
        raise ConfigError([("", f"no recipe at {path}" + (f"; there are: {near}" if near else ""))]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([("", f"{path} cannot be read: {error}")]) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([("", f"{path} is not TOML: {error}")]) from None


def _assign(data: dict[str, Any], path: str, value: Any, faults: list[Fault]) -> None:
    """Sets one dotted path in nested data; an unknown path becomes a fault instead."""
    if not paths.is_known(path):
        if path in paths.sections():
            faults.append((path, "is a section: give its keys, such as " + _first_key(path)))
        else:
            faults.append((path, "unknown key" + paths.suggestion(path)))
        return
    *parents, leaf = path.split(".")
    for parent in parents:
        below = data.setdefault(parent, {})
        if not isinstance(below, dict):
            return  # the recipe gives a value where a section belongs; validation says so
        data = typing.cast("dict[str, Any]", below)
    data[leaf] = value


def _first_key(section: str) -> str:
    return next(path for path in paths.fields() if path.startswith(f"{section}."))


def _build(data: Mapping[str, Any]) -> tuple[RunConfig | None, list[Fault]]:
    try:
        return RunConfig.model_validate(_as_tuples(data), strict=True), []
    except ValidationError as error:
        return None, [_fault(detail) for detail in error.errors()]


def _as_tuples(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """TOML has lists, the frozen tree has tuples."""
    converted: dict[str, Any] = {}
    for name, value in data.items():
        path = f"{prefix}{name}"
        info = paths.fields().get(path)
        if path in paths.sections() and isinstance(value, Mapping):
            value = _as_tuples(typing.cast("Mapping[str, Any]", value), f"{path}.")
        elif info is not None and typing.get_origin(info.annotation) is tuple and isinstance(value, list):
            value = tuple(typing.cast("list[Any]", value))
        converted[name] = value
    return converted


def _fault(detail: Any) -> Fault:
    """One pydantic error in our words."""
    location = [str(part) for part in detail["loc"]]
    path = ".".join(location)
    stems = (".".join(location[:length]) for length in range(len(location), 0, -1))
    known = next((stem for stem in stems if stem in paths.fields()), "")
    got = detail["input"]
    if detail["type"] == "extra_forbidden":
        return path, "unknown key" + paths.suggestion(path)
    if detail["type"] == "missing":
        if path in paths.sections():
            missing = [
                name
                for name, info in paths.fields().items()
                if name.startswith(f"{path}.") and info.is_required()
            ]
            return path, f"is missing: a recipe needs {' and '.join(missing)}"
        return path, f"is missing: {paths.fields()[path].description}"
    if path in paths.sections():
        return path, f"is a section (a table of keys), got {got!r}"
    if known:
        wanted = paths.type_words(paths.fields()[known].annotation)
        return path, f"{_lower(detail['msg'])}: expected {wanted}, got {got!r}"
    return path, f"{_lower(detail['msg'])}, got {got!r}"


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]


def _repaired(data: Mapping[str, Any], bad: set[str]) -> RunConfig | None:
    """The recipe with its faulty keys at their defaults, so that the other rules can still be checked."""
    kept: dict[str, Any] = {}
    for path, value in _flatten(_as_tuples(data), ""):
        if not any(
            path == wrong or path.startswith(f"{wrong}.") or wrong.startswith(f"{path}.") for wrong in bad
        ):
            _assign(kept, path, value, [])
    given = {path for path, _ in _flatten(kept, "")}
    for path, info in paths.fields().items():
        if info.is_required() and path not in given:
            _assign(kept, path, "unknown", [])
    return _build(kept)[0]


def _in_order(found: list[Fault]) -> list[Fault]:
    """In the order of the schema, what has no place in it first; the same fault once."""
    order = {path: index for index, path in enumerate(paths.fields())}
    tops = {path.split(".")[0]: index for path, index in reversed(order.items())}

    def place(fault: Fault) -> int:
        return order.get(fault[0], tops.get(fault[0].split(".")[0], -1))

    return sorted(dict.fromkeys(found), key=place)
