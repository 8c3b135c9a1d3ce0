"""`headway inspect`: the trajectories of a run, as its journal has them.

All text that a model, an environment or a peer wrote is made printable: escapes are shown, never sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from headway.config import RunConfig, open_run
from headway.errors import ConfigError, HeadwayError, JournalError
from headway.journal import MessageReceived, read, unpack
from headway.journal.history import OPEN, TRAINED, History, Row, Shown, show
from headway.telemetry.sanitise import printable
from headway.types import DropReason

DROPPED = "dropped"  # for any reason
STATES = (TRAINED, OPEN, DROPPED, *(reason.value for reason in DropReason))
_HEAD = ("trajectory", "versions", "tokens", "lag", "queue s", "reward", "finish", "state")


def inspect(run: Path, wanted: str, ticket: int | None, state: str, last: int) -> Iterator[str]:
    """The lines to print.

    Args:
        run: folder of the run. wanted: id, or TICKET.MEMBER, of one trajectory to show as text.
        ticket, state: only rows of this ticket, in this state ("dropped": for any reason).
        last: only so many, the newest; 0: all.

    Raises:
        ConfigError: not a run's folder, no such state, or nothing matches `wanted`.
        JournalError: the journal is damaged.
    """
    if state and state not in STATES:
        raise ConfigError([("--state", f"{state!r} is unknown; choose from {', '.join(STATES)}")])
    folder, config = open_run(run)
    reader = read(folder.journal)
    history = History.of(reader)
    if wanted:
        yield from _text(config, _content(folder.journal, _find(history, wanted)))
        return
    rows = [row for row in history.rows if _matches(row, ticket, state)]
    yield from table(rows[-last:] if last else rows)
    if len(rows) > last > 0:
        yield f"... the newest {last} of {len(rows)}; --last 0 shows all"
    counts = Counter(row.state for row in history.rows)
    yield "received: " + ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
    if reader.torn is not None:
        yield f"the journal: {reader.torn}"


def _matches(row: Row, ticket: int | None, state: str) -> bool:
    dropped = row.state not in (OPEN, TRAINED)
    return (ticket is None or row.ticket_id == ticket) and (
        not state or row.state == state or (state == DROPPED and dropped)
    )


def table(rows: Sequence[Row]) -> list[str]:
    """The rows as aligned lines under a head; nothing in them is longer than a few words."""
    lines = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _cells(row: Row) -> tuple[str, ...]:
    versions = "-"
    if row.oldest is not None and row.newest is not None:
        first, last = (f"{epoch}.{step}" for epoch, step in (row.oldest, row.newest))
        versions = first if first == last else f"{first}..{last}"
    state = row.state if row.state != TRAINED else f"{TRAINED} in step {row.step}"
    if row.detail:
        state += f": {row.detail}"
    return (
        printable(row.trajectory_id, 60),
        versions,
        str(row.num_sampled),
        "-" if row.lag is None else str(row.lag),
        "-" if row.queue_s is None else f"{row.queue_s:.2f}",
        "-" if row.reward is None else f"{row.reward:.4g}",
        printable(row.finish_reason, 20) or "-",
        printable(state, 100),
    )


def _find(history: History, wanted: str) -> Row:
    found = [row for row in history.rows if wanted in (row.trajectory_id, f"{row.ticket_id}.{row.member}")]
    if not found:
        raise ConfigError([("--show", f"the journal has no trajectory {printable(wanted, 80)}")])
    return found[-1]


def _content(journal: Path, row: Row) -> Shown:
    for _, record in read(journal, row.position):
        entry = unpack(record.kind, record.payload)
        if isinstance(entry, MessageReceived):
            return show(entry, row)
        break
    raise JournalError(f"the message of {row.trajectory_id} at {row.position} is gone")


def _text(config: RunConfig, shown: Shown) -> Iterator[str]:
    yield from table([shown.row])
    decode = _decoder(config)
    for name, ids in (("prompt", shown.prompt_ids), ("completion", shown.completion_ids)):
        yield f"{name} ({len(ids)} tokens)"
        yield from (f"  {line}" for line in decode(ids.tolist()))
    if len(shown.logprobs):
        mean = float(shown.logprobs.mean())
        yield f"behaviour log-prob: mean {mean:.3f}, lowest {float(shown.logprobs.min()):.3f}"


def _decoder(config: RunConfig) -> Callable[[list[int]], list[str]]:
    """Token ids to printable lines; the ids themselves when the tokenizer cannot be had."""
    from headway.model import load_tokenizer, resolve_model

    try:
        tokenizer = load_tokenizer(resolve_model(config.model.path))
    except HeadwayError as error:
        reason = printable(str(error), 200)
        return lambda ids: [f"(as ids: {reason})", " ".join(map(str, ids))]
    return lambda ids: [printable(line, 10_000) for line in tokenizer.decode_many([ids])[0].split("\n")]
