"""What a process says about itself: time splits, metric sinks, safe text, and the watch on its parent."""

from headway.telemetry.clock import SplitClock, State
from headway.telemetry.logs import SafeFormatter, log_to
from headway.telemetry.parent import watch_parent
from headway.telemetry.sanitise import printable
from headway.telemetry.sink import JsonlSink, MemorySink, MetricsSink, read_records, rewind, write_summary

__all__ = [
    "JsonlSink",
    "MemorySink",
    "MetricsSink",
    "SafeFormatter",
    "SplitClock",
    "State",
    "log_to",
    "printable",
    "read_records",
    "rewind",
    "watch_parent",
    "write_summary",
]
