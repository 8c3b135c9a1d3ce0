"""What several commands share: how a recipe and its overrides are given, and --debug."""

from __future__ import annotations

from typing import Annotated

import typer

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
