"""Constructor arguments of environments: what a recipe may pass, checked against what the class takes."""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from headway.errors import EnvironmentFailure

Scalar = str | int | float | bool | None
ArgumentValue = Scalar | list[Scalar] | dict[str, Scalar]


def unknown_argument(kind: str, name: str, allowed: Iterable[str]) -> str:
    """The message for a name that is not among the allowed ones, with the nearest of them."""
    allowed = list(allowed)
    near = difflib.get_close_matches(name, allowed, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"no {kind} is named {name!r}{hint} (allowed: {', '.join(allowed) or 'none'})"


def bind_arguments(
    owner: str, constructor: Callable[..., object], given: Mapping[str, ArgumentValue]
) -> dict[str, Any]:
    """The keyword arguments for `constructor`, each of the type it is annotated with.

    A list becomes a tuple, and an int a float, where the annotation asks for one. Annotations that are no
    plain data types are not checked. A constructor that takes **kwargs checks the unknown names itself.

    Raises:
        EnvironmentFailure: an unknown or a missing argument, or one of the wrong type; names it.
    """
    parameters = inspect.signature(constructor).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    for name in given:
        if name not in named and not open_ended:
            raise EnvironmentFailure(unknown_argument(f"argument of {owner}", name, named))
    missing = [n for n, parameter in named.items() if parameter.default is parameter.empty and n not in given]
    if missing:
        raise EnvironmentFailure(f"{owner} needs the arguments: {', '.join(missing)}")
    hints = _type_hints(constructor)
    return {name: _convert(owner, name, value, hints.get(name)) for name, value in given.items()}


def _type_hints(constructor: Callable[..., object]) -> dict[str, Any]:
    target = constructor.__init__ if isinstance(constructor, type) else constructor
    try:
        return typing.get_type_hints(target)
    except (NameError, TypeError, AttributeError):
        return {}  # annotations that only exist for type checkers


def _convert(owner: str, name: str, value: ArgumentValue, annotation: Any) -> Any:
    if annotation is None:
        return value
    try:
        return msgspec.convert(value, annotation)
    except msgspec.ValidationError as error:
        raise EnvironmentFailure(f"{owner}, argument {name!r}: got {value!r}: {error}") from error
    except TypeError:
        return value  # a type that is not data, such as an open file
