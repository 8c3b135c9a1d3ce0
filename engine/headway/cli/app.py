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

from headway.cli import keys, reporting, tuning
from headway.cli.errors import report
from headway.cli.options import OVERRIDES, Debug, Words
from headway.errors import EXIT_USER_ERROR, ConfigError, HeadwayError

app = typer.Typer(
    name="headway",
    help="Asynchronous reinforcement learning of language models, with bounded and corrected lag.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


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
    resume: Annotated[
        Path | None, typer.Option("--resume", help="folder of a run to go on with, in place of a recipe")
    ] = None,
    checkpoint: Annotated[
        str,
        typer.Option("--checkpoint", help="with --resume: its name or step, or `initial`; else the newest"),
    ] = "",
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without", help="with --resume: a piece to start anew (optimizer, rng, cursor, desk, journal)"
        ),
    ] = None,
    serial: Annotated[
        bool, typer.Option("--serial", help="all components in this process, deterministic")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the plan, try model and environment, and exit")
    ] = False,
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

    resumed = None
    if resume is not None:
        if dry_run:
            raise ConfigError([("--dry-run", "shows the plan of a recipe; a run that goes on has its own")])
        resumed = running.resume(resume, words or [], checkpoint, without or [])
    elif checkpoint or without:
        raise ConfigError(
            [("--checkpoint" if checkpoint else "--without", "is for runs that go on: --resume RUN")]
        )
    config = resumed.config if resumed else running.recipe(words or [])
    if view is not View.NONE or dry_run:
        for line in (*(resumed.lines if resumed else ()), *describe(config, serial=serial)):
            typer.echo(line)
    if dry_run:
        from headway.cli.trial import try_parts

        for line in try_parts(config):
            typer.echo(line)
        return 0
    chosen = view if view is not View.AUTO else View.LIVE if sys.stdout.isatty() else View.PLAIN
    if serial:
        return running.run_serially(config, chosen, resumed)
    return running.run(config, chosen, logs, resumed)


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
    connect: Annotated[
        str, typer.Option("--connect", help="the learner: tcp://HOST:PORT (stream.bind), or DATA,HEARTBEAT")
    ],
    index: Annotated[int, typer.Option("--index", min=0, help="which of the run's generators this is")] = 0,
    keys: Annotated[
        Path | None,
        typer.Option("--keys", help="key file of this generator; default: generator.key in stream.keys"),
    ] = None,
    debug: Debug = False,
) -> int:
    """One generator of a run; `headway run` starts it, another machine may add more."""
    _become_child()
    from headway.generator.main import main as generator_main

    return _leave(generator_main(run_dir, connect, index, keys))


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


@app.command()
def inspect(
    run: Annotated[Path, typer.Argument(help="folder of the run")],
    show: Annotated[
        str, typer.Option("--show", help="one trajectory as text: its id, or TICKET.MEMBER")
    ] = "",
    ticket: Annotated[int | None, typer.Option("--ticket", help="only this ticket")] = None,
    state: Annotated[
        str, typer.Option("--state", help="only these: trained, open, dropped, or a drop reason")
    ] = "",
    last: Annotated[int, typer.Option("--last", min=0, help="only so many, the newest; 0: all")] = 50,
    debug: Debug = False,
) -> int:
    """What became of the trajectories of a run, from its journal; also while it runs."""
    from headway.cli.inspecting import inspect as inspect_run

    for line in inspect_run(run, show, ticket, state, last):
        typer.echo(line)
    return 0


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="folder of the run")],
    start: Annotated[
        str,
        typer.Option(
            "--from",
            help="checkpoint to start from: its name or step, or `initial`; else where the newest attempt did",
        ),
    ] = "",
    end: Annotated[
        str, typer.Option("--to", help="checkpoint to end with; else as far as the journal leads")
    ] = "",
    any_machine: Annotated[
        bool, typer.Option("--any-machine", help="go on where the machine is not the run's")
    ] = False,
    debug: Debug = False,
) -> int:
    """Make the updates of a run again from its record, and compare the weights bit for bit."""
    from headway.cli.replaying import replay as replay_run

    return replay_run(run, start, end, any_machine)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="folder of the run")],
    target: Annotated[Path, typer.Argument(help="folder to make")],
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", help="its name or step; else the newest complete one")
    ] = "",
    masters: Annotated[
        bool, typer.Option("--masters", help="the optimizer's fp32 weights; else as served, in push.dtype")
    ] = False,
    debug: Debug = False,
) -> int:
    """Write a checkpoint's weights as a folder that transformers loads."""
    from headway.learner.export import export as export_weights

    typer.echo(export_weights(run, target, checkpoint, masters))
    return 0


app.command(context_settings=OVERRIDES)(tuning.plan)
app.command(context_settings=OVERRIDES)(tuning.calibrate)
app.command(context_settings=OVERRIDES)(tuning.tune)
app.command()(reporting.report)
app.command()(reporting.watch)
app.add_typer(keys.app, name="keys")


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
    from headway.telemetry import log_to, watch_parent

    watch_parent()
    log_to()
