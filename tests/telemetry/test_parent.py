"""A child does not outlive its parent, however the parent ends."""

import subprocess
import sys

CHILD = """
import sys, threading
from headway.telemetry import watch_parent
print(watch_parent(grace_s={grace}), flush=True)
{then}
"""


def start(then: str, grace: float, pipe: str) -> subprocess.Popen[bytes]:
    import os

    environ = {**os.environ, "HEADWAY_PARENT_PIPE": pipe}
    code = CHILD.format(grace=grace, then=then)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ
    )


def test_the_end_of_the_pipe_ends_the_child() -> None:
    with start("threading.Event().wait(30)", grace=20.0, pipe="1") as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == b"True\n"
        child.stdin.close()
        assert child.wait(10) == -15


def test_a_child_that_ignores_sigterm_is_ended_after_the_grace_time() -> None:
    stubborn = (
        "import signal; signal.signal(15, signal.SIG_IGN); print('set', flush=True); "
        "threading.Event().wait(30)"
    )
    with start(stubborn, grace=0.2, pipe="1") as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == b"True\n"
        assert child.stdout.readline() == b"set\n"
        child.stdin.close()
        assert child.wait(10) == 1


def test_a_process_started_by_hand_is_left_alone() -> None:
    with start("sys.exit(0)", grace=0.1, pipe="") as child:
        assert child.communicate()[0] == b"False\n"
        assert child.returncode == 0
