"""`headway report` and `headway watch`: what a run did, to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import Debug, check_writable_place

Run = Annotated[Path, typer.Argument(help="folder of the run")]


def report(
    run: Run,
    out: Annotated[Path | None, typer.Option("--out", help="the page; default: report.html in RUN")] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="also a trace for ui.perfetto.dev, to this file")
    ] = None,
    debug: Debug = False,
) -> int:
    """Draw what a run did as one HTML page that needs nothing else; also while it goes on."""
    from headway.config import open_run
    from headway.report import RunReader, document, page, read_groups, write_trace

    check_writable_place("--out", out)
    check_writable_place("--trace", trace)
    data = RunReader(run).read()
    target = out or run / "report.html"
    groups = read_groups(open_run(run)[0].journal)
    target.write_text(page(document(data, groups)), encoding="utf-8")
    typer.echo(f"{len(data.steps):,} updates: {target} ({target.stat().st_size / 1e6:.1f} MB)")
    if trace is not None:
        write_trace(data, trace)
        typer.echo(f"trace: {trace} (open it in ui.perfetto.dev)")
    return 0


def watch(
    run: Run,
    host: Annotated[str, typer.Option("--host", help="a loopback address; others are refused")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free one")] = 0,
    debug: Debug = False,
) -> int:
    """Serve the report of a run to this machine's browser, live; Ctrl-C ends it, not the run."""
    from headway.report import Watch

    server = Watch(run, host, port)
    typer.echo(f"watching {run} at {server.url}")
    try:
        server.serve()
    except KeyboardInterrupt:
        return 0
    finally:
        server.close()
    return 0
