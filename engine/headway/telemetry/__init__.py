"""What a process says about itself: time splits, metric sinks, safe text, and the watch on its parent."""

from headway.telemetry.chosen import open_sinks, require_sinks
from headway.telemetry.clock import SplitClock, State
from headway.telemetry.logs import SafeFormatter, log_to
from headway.telemetry.parent import watch_parent
from headway.telemetry.sanitise import printable
from headway.telemetry.scalars import scalars
from headway.telemetry.sink import JsonlSink, MemorySink, MetricsSink, read_records, rewind, write_summary
from headway.telemetry.spans import Header, SpanLog, spans_in

__all__ = [
    "Header",
    "JsonlSink",
    "MemorySink",
    "MetricsSink",
    "SafeFormatter",
    "SpanLog",
    "SplitClock",
    "State",
    "log_to",
    "open_sinks",
    "printable",
    "read_records",
    "require_sinks",
    "rewind",
    "scalars",
    "spans_in",
    "watch_parent",
    "write_summary",
]
