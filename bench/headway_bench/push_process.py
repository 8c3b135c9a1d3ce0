"""A receiving process of the push bench, and the line of JSON each way that drives it."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from typing import Any

from headway.errors import DeadlineExceeded, RunFailed

START_S = 120.0


class MemberProcess:
    """push_member.py with a role; commands go in, answers come out.

    Args:
        role: one of push_member.ROLES; arguments: of that role, as JSON.

    Raises:
        RunFailed: it ended. DeadlineExceeded: it did not start in START_S.
    """

    def __init__(self, role: str, **arguments: Any) -> None:
        self._role = role
        self._unread = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headway_bench.push_member", role, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdout is not None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    def send(self, **command: Any) -> None:
        """Hand over a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, deadline_s: float = START_S) -> dict[str, Any]:
        """The next answer.

        Raises:
            RunFailed: the process has ended instead. DeadlineExceeded: none in time.
        """
        assert self._process.stdout is not None
        deadline = time.monotonic() + deadline_s
        while b"\n" not in self._unread:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise DeadlineExceeded(
                    f"the receiving process ({self._role}) said nothing for {deadline_s:.0f} s"
                )
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise RunFailed(f"the receiving process ({self._role}) ended with {self._process.wait(10)}")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End it."""
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
