"""Errors on the terminal: one clear block, and an exit status that says whether trying again could help."""

from __future__ import annotations

import sys
import traceback

from headway.errors import (
    EXIT_USER_ERROR,
    BackendUnavailable,
    ConfigError,
    EnvironmentFailure,
    HeadwayError,
    ModelError,
    ReplayRefused,
    RunLocked,
    UnsupportedOption,
)

EXIT_FAILED = 1

_USER_ERRORS = (
    ConfigError, ModelError, ReplayRefused, RunLocked, EnvironmentFailure, UnsupportedOption, BackendUnavailable,
)  # fmt: skip


def report(error: HeadwayError, debug: bool) -> int:
    """Prints an error to standard error.

    Args:
        debug: with its traceback.

    Returns:
        The exit status.
    """
    from headway.telemetry.sanitise import printable  # with numpy, which --help must not wait for

    text = "".join(traceback.format_exception(error)).rstrip("\n") if debug else block(error)
    # An error may quote a completion, a reward's message or a peer.
    print("\n".join(printable(line) for line in text.split("\n")), file=sys.stderr)
    return EXIT_USER_ERROR if isinstance(error, _USER_ERRORS) else EXIT_FAILED


def block(error: HeadwayError) -> str:
    """The error as lines for people."""
    if isinstance(error, ConfigError):
        count = len(error.faults)
        head = "the recipe is wrong:" if count == 1 else f"the recipe is wrong in {count} places:"
        lines = [f"  {path}: {message}" if path else f"  {message}" for path, message in error.faults]
        return "\n".join((f"headway: {head}", *lines))
    first, *rest = str(error).splitlines() or [""]
    return "\n".join((f"headway: {type(error).__name__}: {first}", *(f"  {line}" for line in rest)))
