"""What several commands share: how a recipe and its overrides are given, and --debug."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.errors import ConfigError

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE [--SECTION.KEY VALUE ...]",
        help=(
            "a TOML file, and any key of docs/configuration.md by its dotted path, such as --learner.lr 1e-6"
        ),
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]


def check_writable_place(option: str, path: Path | None) -> None:
    """Refuse a file to write that is a folder, or in a folder that is not there, before anything is measured.

    Raises:
        ConfigError: names the option.
    """
    if path is not None and not path.parent.is_dir():
        raise ConfigError([(option, f"{path.parent} is not a folder; make it first")])
    if path is not None and path.is_dir():
        raise ConfigError([(option, f"{path} is a folder; name a file in it")])
