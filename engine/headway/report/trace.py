"""Each process's time, as a trace for ui.perfetto.dev or chrome://tracing.

A track for each process, from what it recorded. A run that recorded nothing has one for the learner and one for the
generators' mean, from the rows: a row knows how long each part of an update took, not in which order, so that within
an update the parts lie one after another, ending at the row's time. Counters and the settings that were changed lie
beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headway.report.processes import PARTS, Process
from headway.report.rows import RunData, record_of
from headway.types import StepRecord, TimeSplit

_LEARNER, _GENERATORS = 1, 2
_COUNTERS = (
    "reward",
    "ess",
    "lag_mean",
    "tokens_per_s",
    "generated_per_s",
    "buffered",
    "in_flight",
    "queue_s",
)
_ORDER = ("idle", "other", "work", "push")
_NAMES = {_LEARNER: ("learner", "train"), _GENERATORS: ("generators (mean)", "generate")}

Event = dict[str, Any]


def trace(data: RunData) -> dict[str, Any]:
    """The trace in the Chrome format; timestamps in microseconds since the first process or update began."""
    records = [record_of(row) for row in data.steps]
    begins = [r.time_s - max(r.learner.total, r.generator.total) for r in records[:1]]
    begins += [float(process.slices[0, 0]) for process in data.processes]
    start = min(begins, default=0.0)
    events = _recorded(data.processes, start) if data.processes else _from_rows(records, start)
    for record in records:
        events += _marks(record, record.time_s - start)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"run": data.config.name, "unix_start_s": start},
    }


def write_trace(data: RunData, path: Path) -> None:
    """Writes the trace as JSON."""
    path.write_bytes(msgspec.json.encode(trace(data)))


def _recorded(processes: Sequence[Process], start: float) -> list[Event]:
    events: list[Event] = []
    for pid, process in enumerate(processes, _LEARNER):
        events.append(_name(pid, process.name))
        works = "train" if process.side == "learner" else "generate"
        for begin, _, *seconds in process.slices.tolist():
            split = TimeSplit(**dict(zip(PARTS, seconds, strict=True)))
            events += _parts(pid, works, split, begin - start, {})
    return events


def _from_rows(records: Sequence[StepRecord], start: float) -> list[Event]:
    events = [_name(pid, name) for pid, (name, _) in _NAMES.items()]
    cursors = {_LEARNER: 0.0, _GENERATORS: 0.0}
    for record in records:
        for pid, split in ((_LEARNER, record.learner), (_GENERATORS, record.generator)):
            begin = max(cursors[pid], record.time_s - start - split.total)
            cursors[pid] = begin + split.total
            events += _parts(pid, _NAMES[pid][1], split, begin, {"update": record.step})
    return events


def _name(pid: int, name: str) -> Event:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def _parts(pid: int, works: str, split: TimeSplit, begin: float, about: Mapping[str, Any]) -> list[Event]:
    """The parts of a stretch of time, one after another; `works` names the work of this side."""
    events: list[Event] = []
    for part in _ORDER:
        seconds: float = getattr(split, part)
        if seconds > 0.0:
            events.append({
                "ph": "X", "name": works if part == "work" else part, "cat": part, "pid": pid, "tid": 0,
                "ts": begin * 1e6, "dur": seconds * 1e6, "args": dict(about),
            })  # fmt: skip
        begin += seconds
    return events


def _marks(record: StepRecord, at: float) -> list[Event]:
    counters: list[Event] = [
        {"ph": "C", "name": name, "pid": _LEARNER, "ts": at * 1e6, "args": {name: value}}
        for name in _COUNTERS
        if (value := getattr(record, name)) == value
    ]
    changes: list[Event] = [
        {
            "ph": "i", "name": f"set {change.key}", "s": "g", "pid": _LEARNER, "tid": 0, "ts": at * 1e6,
            "args": {"value": change.value, "source": change.source},
        }
        for change in record.changes
    ]  # fmt: skip
    return [*counters, *changes]
