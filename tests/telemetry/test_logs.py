"""Nothing that is logged can act on a terminal."""

from __future__ import annotations

import io
import logging

from headway.telemetry.logs import SafeFormatter


def test_escapes_in_messages_arguments_and_tracebacks_are_shown_not_sent() -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(SafeFormatter("%(levelname)s %(message)s"))
    logger = logging.getLogger("headway.test_logs")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        logger.warning("model says %s", "\x1b[31mred\r\u202egone\nsecond \x07 line")
        try:
            raise ValueError("\x1b]0;title\x07")
        except ValueError:
            logger.exception("failed")
    finally:
        logger.removeHandler(handler)
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["WARNING model says \\e[31mred\\r\\u202egone", "second \\x07 line"]
    assert lines[-1] == "ValueError: \\e]0;title\\x07"
    assert all(line.isprintable() for line in lines)
