"""From the name and the arguments in a recipe to an environment."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import msgspec

from headway.envs.arguments import ArgumentValue, bind_arguments, unknown_argument
from headway.envs.gym import GymEnvironment
from headway.envs.protocol import Environment, Message
from headway.envs.sort import SortEnvironment
from headway.envs.table import TableEnvironment
from headway.errors import EnvironmentFailure

METHODS = ("prompt", "reward")
NAMES = "sort, gym:<dataset>, table, path/to/file.py, path/to/file.py:Class"


class EnvSpec(msgspec.Struct, frozen=True):
    """Which environment, built how; equal specs build environments that say the same.

    Attributes:
        name: "sort" | "gym:<dataset>" | "table" | "path/to/file.py" | "path/to/file.py:Class".
        args: for its constructor, by name.
    """

    name: str
    args: dict[str, ArgumentValue] = {}


def check_spec(spec: EnvSpec) -> None:
    """Refuses arguments that cannot travel to a reward worker.

    Raises:
        EnvironmentFailure: a value that is no text, number, bool, None, or flat list or table of these.
    """
    for name, value in spec.args.items():
        try:
            msgspec.convert(value, ArgumentValue)
        except msgspec.ValidationError as error:
            raise EnvironmentFailure(f"{spec.name}, argument {name!r}: got {value!r}: {error}") from error


def load_environment(spec: EnvSpec) -> Environment:
    """Builds the environment and looks at its first prompt.

    Raises:
        EnvironmentFailure: no such environment, bad arguments, an incomplete class, or its own error.
    """
    check_spec(spec)
    constructor, fixed = _find_class(spec.name)
    for name in spec.args.keys() & fixed.keys():
        raise EnvironmentFailure(f"{spec.name}: the argument {name!r} is given by the name already")
    arguments = fixed | bind_arguments(spec.name, constructor, fixed | spec.args)
    try:
        environment = constructor(**arguments)
        _check_instance(spec.name, environment)
        check_prompt(environment.prompt(0))
    except EnvironmentFailure as error:
        raise EnvironmentFailure(f"environment {spec.name!r}: {error}") from error
    except Exception as error:
        raise EnvironmentFailure(
            f"environment {spec.name!r} cannot be used: {type(error).__name__}: {error}"
        ) from error
    return cast(Environment, environment)


def check_prompt(prompt: object) -> None:
    """Refuses what is no Prompt.

    Raises:
        EnvironmentFailure: neither text nor a list of {role, content} messages.
    """
    if isinstance(prompt, str):
        return
    try:
        msgspec.convert(prompt, list[Message])
    except msgspec.ValidationError as error:
        raise EnvironmentFailure(
            f"prompt(index) returned {type(prompt).__name__}; expected text or a list of {{role, content}}: "
            f"{error}"
        ) from error


def _find_class(name: str) -> tuple[type[Any], dict[str, ArgumentValue]]:
    """The class that `name` means, and the arguments that the name itself fixes."""
    if name == "sort":
        return SortEnvironment, {}
    if name == "table":
        return TableEnvironment, {}
    family, colon, rest = name.partition(":")
    if family == "gym":
        if not rest:
            raise EnvironmentFailure("gym: expected gym:<dataset>, such as gym:chain_sum")
        return GymEnvironment, {"dataset": rest}
    path, colon, class_name = name.rpartition(":") if ".py:" in name else (name, "", "")
    if path.endswith(".py"):
        return _class_in_file(Path(path), class_name if colon else None), {}
    raise EnvironmentFailure(
        unknown_argument("environment", name, ["sort", "table", "gym:<dataset>"]) + f"; {NAMES}"
    )


def _class_in_file(path: Path, class_name: str | None) -> type[Any]:
    module = _import_file(path)
    defined = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__ and not name.startswith("_")
    }
    if class_name is not None:
        if class_name not in defined:
            raise EnvironmentFailure(f"{path}: {unknown_argument('class', class_name, sorted(defined))}")
        missing = _missing_methods(defined[class_name])
        if missing:
            raise EnvironmentFailure(f"{path}: class {class_name} lacks {', '.join(missing)}")
        return defined[class_name]
    complete = sorted(name for name, value in defined.items() if not _missing_methods(value))
    if len(complete) == 1:
        return defined[complete[0]]
    if complete:
        raise EnvironmentFailure(
            f"{path}: several classes are environments: {', '.join(complete)}; name one: {path}:{complete[0]}"
        )
    partial = [
        f"{name} lacks {', '.join(_missing_methods(value))}" for name, value in sorted(defined.items())
    ]
    raise EnvironmentFailure(
        f"{path}: no class with the methods {' and '.join(METHODS)}: "
        f"{'; '.join(partial) or 'it defines no class'}"
    )


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise EnvironmentFailure(f"{path}: no such file (relative to {Path.cwd()}); environments: {NAMES}")
    path = path.resolve()
    name = f"headway_env_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look classes up here
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # so that it may import its neighbours
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise EnvironmentFailure(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _missing_methods(candidate: type[Any]) -> list[str]:
    return [
        method for method in METHODS if not inspect.isroutine(inspect.getattr_static(candidate, method, None))
    ]


def _check_instance(name: str, environment: object) -> None:
    if not hasattr(environment, "num_prompts"):
        raise EnvironmentFailure("it lacks the attribute num_prompts (an int, or None for no end)")
    num_prompts = cast(object, environment.num_prompts)  # type: ignore[attr-defined]
    if num_prompts is None:
        return
    if isinstance(num_prompts, bool) or not isinstance(num_prompts, int) or num_prompts < 1:
        raise EnvironmentFailure(
            f"num_prompts: got {num_prompts!r}, expected an int >= 1, or None for no end"
        )
