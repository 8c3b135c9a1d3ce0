"""A child process that outlives its parent ends itself: no learner or generator is left behind.

The supervisor holds the writing end of each child's standard input and never writes; the child waits for its
end of file. That works for SIGKILL too, needs no polling, and no file or port that could go stale.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

PARENT_PIPE = "HEADWAY_PARENT_PIPE"
GRACE_S = 4.0


def watch_parent(on_gone: Callable[[], None] | None = None, grace_s: float = GRACE_S) -> bool:
    """Starts the watch, when the supervisor started this process; a process started by hand is left alone.

    Waits for: end of file on standard input, on a daemon thread. Then calls `on_gone` (default: SIGTERM to
    this process) and, should the process still live `grace_s` later, exits with status 1.

    Returns:
        Whether a watch was started.
    """
    if os.environ.pop(PARENT_PIPE, "") != "1":
        return False
    arguments = (on_gone or _terminate_self, grace_s)
    threading.Thread(target=_wait_for_end, args=arguments, name="parent", daemon=True).start()
    return True


def _wait_for_end(on_gone: Callable[[], None], grace_s: float) -> None:
    try:
        while os.read(0, 4096):
            pass
    except OSError:
        pass  # a closed descriptor says the same as its end
    ended = threading.Timer(grace_s, os._exit, (1,))
    ended.daemon = True
    ended.start()
    on_gone()


def _terminate_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
