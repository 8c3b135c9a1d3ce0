"""What must hold of a run's folder after any faults. Reads files only; shares no bookkeeping with the learner."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from headway.journal import (
    BatchSelected,
    MessageReceived,
    Opened,
    StepTrained,
    TicketEnded,
    TicketIssued,
    read,
    unpack,
)
from headway.wire import decode
from headway.wire.messages import Trajectories


def faults_of(run: Path) -> list[str]:
    """Every broken invariant, in words; none for a run that did all its updates as promised."""
    config: dict[str, Any] = _toml(run / "config.toml")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [*_rows(rows, config), *_lineage(run, rows)]


def _toml(path: Path) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(path.read_text())


def _rows(rows: list[dict[str, Any]], config: dict[str, Any]) -> list[str]:
    """One row a step, conservation in each, the bound in each, one status at the end."""
    found: list[str] = []
    steps = [row for row in rows if row["kind"] == "step"]
    if [row["step"] for row in steps] != list(range(1, config["steps"] + 1)):
        found.append(f"rows of steps {[row['step'] for row in steps]}, expected 1 to {config['steps']}")
    if [row["kind"] for row in rows].count("status") != 1 or rows[-1]["kind"] != "status":
        found.append("the rows do not end with one status")
    for row in rows:
        for table, opened, held in (
            ("tickets", "issued", ("in_flight", "buffered")),
            ("trajectories", "received", ("masked", "buffered")),
            ("tokens", "received", ("masked", "buffered")),
        ):
            counts = row[table]
            ended = counts["trained"] + counts["dropped"] + sum(counts[name] for name in held)
            reasons = sum(num for name, num in counts.items() if name.startswith("dropped."))
            if counts[opened] != ended or counts["dropped"] != reasons:
                found.append(f"{row.get('step', 'the end')}: {table} do not balance: {counts}")
    for row in steps:
        if row["lag_max"] > config["staleness"]["max_lag"]:
            found.append(f"step {row['step']}: lag {row['lag_max']} > {config['staleness']['max_lag']}")
        if sum(row["lag_histogram"]) != row["num_tokens"]:
            found.append(f"step {row['step']}: {row['num_tokens']} tokens trained, the histogram has others")
    return found


class _Lineage:
    """The journal as seen by the steps that survived: a later attempt's start undoes what came after its step.

    `ended` are the endings that surely count. Those of the step that an attempt starts from may be older than its
    checkpoint, and count, or younger, and be undone: they are in `undone`.
    """

    def __init__(self) -> None:
        self.received: dict[str, int] = {}
        self.by_ticket: dict[int, set[str]] = {}
        self.issued: set[int] = set()
        self.ended: dict[int, tuple[str, int]] = {}
        self.undone: set[int] = set()
        self.trained: dict[int, list[int]] = {}
        self.step = 0

    def add(self, entry: object) -> None:
        match entry:
            case Opened():
                self.trained = {step: ids for step, ids in self.trained.items() if step <= entry.step}
                self.undone |= {ticket for ticket, (_, at) in self.ended.items() if at >= entry.step}
                self.ended = {ticket: end for ticket, end in self.ended.items() if end[1] < entry.step}
                self.step = entry.step
            case TicketIssued():
                self.issued.add(entry.ticket.ticket_id)
                self.ended.pop(entry.ticket.ticket_id, None)
                self.undone.discard(entry.ticket.ticket_id)
            case MessageReceived():
                message = decode(entry.frames)
                assert isinstance(message, Trajectories)
                for trajectory in message.trajectories:
                    self.received[trajectory.trajectory_id] = trajectory.ticket_id
                    self.by_ticket.setdefault(trajectory.ticket_id, set()).add(trajectory.trajectory_id)
            case TicketEnded():
                self.ended[entry.ticket_id] = (entry.reason, self.step)
            case BatchSelected():
                self.trained[entry.step] = list(entry.ticket_ids)
            case StepTrained():
                self.step = entry.version.step
            case _:
                pass


def _lineage(run: Path, rows: list[dict[str, Any]]) -> list[str]:
    """Nothing trained twice, nothing trained unreceived, nothing received forgotten."""
    found: list[str] = []
    lineage = _Lineage()
    for _, record in read(run / "journal"):
        lineage.add(unpack(record.kind, record.payload))
    trained = [ticket for ids in lineage.trained.values() for ticket in ids]
    twice = [ticket for ticket, times in Counter(trained).items() if times > 1]
    if twice:
        found.append(f"tickets {twice} are trained twice in the surviving lineage")
    unreceived = [ticket for ticket in trained if not lineage.by_ticket.get(ticket)]
    if unreceived:
        found.append(f"tickets {unreceived} are trained, and the journal has no trajectory of them")
    both = sorted(set(trained) & lineage.ended.keys())
    if both:
        found.append(f"tickets {both} are trained and dropped ({[lineage.ended[each][0] for each in both]})")
    end = rows[-1]
    if end["tickets"]["trained"] != len(trained):
        found.append(
            f"{end['tickets']['trained']} tickets trained by the ledger, {len(trained)} by the journal"
        )
    forgotten = sorted(lineage.by_ticket.keys() - set(trained) - lineage.ended.keys() - lineage.undone)
    if forgotten and end["status"] == "finished":
        found.append(f"tickets {forgotten} were received and acknowledged, and never ended")
    return found
