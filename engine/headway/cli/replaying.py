"""`headway replay`: what was found, as lines and as an exit status."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import typer

from headway.cli.errors import EXIT_FAILED
from headway.learner.replay import Verdict
from headway.learner.replay import replay as make_again


def replay(run: Path, start: str, end: str, any_machine: bool) -> int:
    """Prints the verdict. Returns 0 for equal bits, 1 when something differs or nothing could be compared."""
    verdict = make_again(run, start, end, any_machine, typer.echo)
    for line in lines_of(verdict):
        typer.echo(line)
    return EXIT_FAILED if verdict.difference or verdict.compared is None else 0


def lines_of(verdict: Verdict) -> Iterator[str]:
    """For people."""
    yield f"replayed {verdict.num_updates} updates, from version {verdict.start} to {verdict.end}"
    yield (
        f"equal so far: {len(verdict.pushed)} pushed versions; "
        f"checkpoints {', '.join(verdict.checkpoints) or 'none'}"
    )
    if verdict.difference:
        yield f"DIFFERENT: {verdict.difference}"
    elif verdict.compared is None:
        yield "nothing to compare with: no version was pushed and no checkpoint is kept on the way"
    elif verdict.compared < verdict.end:
        yield f"bit for bit equal up to version {verdict.compared}; nothing to compare with beyond it"
    else:
        yield "bit for bit equal"
