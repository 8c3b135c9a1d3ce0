"""`headway keys`: who may join a run from another machine (docs/security.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import Debug

app = typer.Typer(help="Keys for generators on other machines (docs/security.md).", no_args_is_help=True)


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(help="folder of the keys; made when missing")],
    client: Annotated[
        list[str] | None, typer.Option("--client", help="name of a client; may be given again")
    ] = None,
    debug: Debug = False,
) -> int:
    """Make the learner's keys, unless the folder has them, and those of new clients."""
    from headway.stream.keys import DEFAULT_CLIENT, new_keys

    for path in new_keys(folder, client or [DEFAULT_CLIENT]):
        typer.echo(f"made {path}")
    typer.echo(f"set stream.keys to {folder}; give each generator its own .key file and nothing else of it")
    return 0


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="folder of the keys")],
    debug: Debug = False,
) -> int:
    """The public keys: the learner's, and those of the clients on its list. No secrets."""
    from headway.stream.keys import read_allowed, read_server_keys
    from headway.telemetry.sanitise import printable

    typer.echo(f"{read_server_keys(folder).public}  learner")
    for key, name in read_allowed(folder).items():
        typer.echo(f"{key}  {printable(name, 64)}")
    return 0
