"""Log records for terminals and files: what a model, an environment or a peer wrote cannot act on either."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from headway.telemetry.sanitise import printable

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LIMIT = 20_000


class SafeFormatter(logging.Formatter):
    """Formats as usual, then shows every control character of every line as an escape."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's lines, its traceback's included."""
        return "\n".join(printable(line, _LIMIT) for line in super().format(record).split("\n"))


def log_to(stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """Send this process's log records to a stream (default: standard error), if nothing takes them yet."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(SafeFormatter(_FORMAT))
    logging.basicConfig(level=level, handlers=[handler])
