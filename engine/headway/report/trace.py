"""What the rows say of each process's time, as a trace for ui.perfetto.dev or chrome://tracing.

One track for the learner and one for the generators' mean. A row knows how long each part of an update took, not
in which order: within an update the parts lie one after another, ending at the row's time. Counters and the
settings that were changed lie beside them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

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
_NAMES = {_LEARNER: ("learner", {"work": "train"}), _GENERATORS: ("generators (mean)", {"work": "generate"})}

Event = dict[str, Any]


def trace(data: RunData) -> dict[str, Any]:
    """The trace in the Chrome format; timestamps in microseconds since the first update began."""
    records = [record_of(row) for row in data.steps]
    events: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        for pid, (name, _) in _NAMES.items()
    ]
    start = min((r.time_s - max(r.learner.total, r.generator.total) for r in records[:1]), default=0.0)
    cursors = {_LEARNER: 0.0, _GENERATORS: 0.0}
    for record in records:
        for pid, split in ((_LEARNER, record.learner), (_GENERATORS, record.generator)):
            begin = max(cursors[pid], record.time_s - start - split.total)
            cursors[pid] = begin + split.total
            events += _parts(pid, record, split, begin)
        events += _marks(record, record.time_s - start)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"run": data.config.name, "unix_start_s": start},
    }


def write_trace(data: RunData, path: Path) -> None:
    """Writes the trace as JSON."""
    path.write_bytes(msgspec.json.encode(trace(data)))


def _parts(pid: int, record: StepRecord, split: TimeSplit, begin: float) -> list[Event]:
    events: list[Event] = []
    for part in _ORDER:
        seconds: float = getattr(split, part)
        if seconds > 0.0:
            events.append({
                "ph": "X", "name": _NAMES[pid][1].get(part, part), "cat": part, "pid": pid, "tid": 0,
                "ts": begin * 1e6, "dur": seconds * 1e6, "args": {"update": record.step},
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
