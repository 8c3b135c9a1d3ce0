"""The commands. Each imports what it needs when it runs, so that `headway --help` is quick and needs no
torch.

Exit status: 0 done; 1 a run or a check failed; 2 the recipe, the model or an option is wrong; 130 and 143
after Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from headway.cli.errors import EXIT_USER_ERROR, report
from headway.errors import HeadwayError

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    name="headway",
    help="Asynchronous reinforcement learning of language models, with bounded and corrected lag.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

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


class View(StrEnum):
    """How a run is shown."""

    AUTO = "auto"
    LIVE = "live"
    PLAIN = "plain"
    NONE = "none"


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False,
) -> None:
    """Asynchronous reinforcement learning of language models, with bounded and corrected lag."""
    if version:
        from headway import __version__

        typer.echo(f"headway {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(context_settings=OVERRIDES)
def run(
    words: Words = None,
    serial: Annotated[
        bool, typer.Option("--serial", help="all components in this process, deterministic")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan and exit")] = False,
    view: Annotated[
        View, typer.Option("--view", help="auto: live on a terminal, plain elsewhere")
    ] = View.AUTO,
    logs: Annotated[
        bool, typer.Option("--logs", help="print the logs of the processes too, prefixed")
    ] = False,
    debug: Debug = False,
) -> int:
    """Train: start the learner and the generators of a recipe, watch them, and show the run."""
    from headway.cli import running
    from headway.config import describe

    config = running.recipe(words or [])
    if view is not View.NONE or dry_run:
        for line in describe(config):
            typer.echo(line)
    if dry_run:
        return 0
    chosen = view if view is not View.AUTO else View.LIVE if sys.stdout.isatty() else View.PLAIN
    return running.run_serially(config, chosen) if serial else running.run(config, chosen, logs)


@app.command(name="set")
def set_(
    run: Annotated[Path, typer.Argument(help="folder of the run")],
    key: Annotated[str, typer.Argument(help="dotted key, such as staleness.max_lag")],
    value: Annotated[str, typer.Argument(help="as in a recipe")],
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, help="seconds to wait for the answer")
    ] = 60.0,
    debug: Debug = False,
) -> int:
    """Change a setting of a run while it goes on; in force, and in the run's record, when this returns."""
    from headway.cli import running

    running.change(run, key, value, timeout_s)
    typer.echo(f"{key} = {value}")
    return 0


@app.command()
def learner(
    run_dir: Annotated[Path, typer.Option("--run", help="folder of the run")],
    control: Annotated[str, typer.Option("--control", help="endpoint of the supervisor")],
    debug: Debug = False,
) -> int:
    """One learner of a run; `headway run` starts it."""
    _become_child()
    from headway.learner.main import main as learner_main

    return _leave(learner_main(run_dir, control))


@app.command()
def generator(
    run_dir: Annotated[Path, typer.Option("--run", help="folder of the run")],
    connect: Annotated[str, typer.Option("--connect", help="endpoints of the learner")],
    index: Annotated[int, typer.Option("--index", min=0, help="which of the run's generators this is")] = 0,
    debug: Debug = False,
) -> int:
    """One generator of a run; `headway run` starts it."""
    _become_child()
    from headway.generator.main import main as generator_main

    return _leave(generator_main(run_dir, connect, index))


@app.command()
def doctor() -> int:
    """What this machine can run: versions, cores, memory, compilers, devices, extras."""
    from headway.cli.doctor import examine

    for line in examine():
        typer.echo(line)
    return 0


@app.command(context_settings=OVERRIDES)
def selfcheck(words: Words = None, debug: Debug = False) -> int:
    """The frozen-policy check: both sides must agree on every log-prob, and pushes must be exact."""
    from headway.cli import running

    return running.selfcheck(running.recipe(words or []))


@app.command(context_settings={**OVERRIDES, "help_option_names": []})
def bench(words: Annotated[list[str] | None, typer.Argument(metavar="NAME [OPTIONS]")] = None) -> int:
    """Throughput benches; without a name, the list of them."""
    from headway_bench import registry

    arguments = words or []
    if not arguments or arguments[0] in ("--help", "-h"):
        typer.echo("usage: headway bench NAME [OPTIONS]\n\n" + registry.listing())
        return 0
    return registry.run(arguments[0], arguments[1:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits with its status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = app(words, standalone_mode=False, prog_name="headway")
    except HeadwayError as error:
        status = report(error, "--debug" in words)
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except BrokenPipeError:
        status = 1
    except Exception as error:
        show = getattr(error, "show", None)  # errors of usage, whose class typer does not export
        if show is None:
            raise
        show()
        status = int(getattr(error, "exit_code", EXIT_USER_ERROR))
    raise SystemExit(status if isinstance(status, int) else 0)


def _leave(status: int) -> NoReturn:
    """Ends a child process without taking the interpreter apart.

    With torch loaded that costs a second of CPU, many on a busy machine; what must be closed is closed by now.
    """
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _become_child() -> None:
    """What a child process does before it loads anything heavy."""
    from headway.telemetry.parent import watch_parent

    watch_parent()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
