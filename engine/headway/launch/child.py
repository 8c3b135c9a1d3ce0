"""One child process.

Its own session, its output in a log with the last lines at hand, a pipe that it watches.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from headway.telemetry import printable

TAIL_LINES = 25
Echo = Callable[[str, str], None]  # name, line
_LOG_LINE = 100_000  # characters


class Child:
    """A running process. Its standard output and error go to `log`, each line also to `echo`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        log: Path,
        echo: Echo | None = None,
    ) -> None:
        """Starts it.

        Args:
            name: for people, such as "generator-0".
            command, environ: of the process.
            log: appended to.
            echo: takes the name and each line, already printable; called on a thread of the child.

        Raises:
            OSError: it cannot be started.
        """
        self.name = name
        self.log = log
        self.started = time.monotonic()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._echo = echo
        self._killed = False
        self._frozen_since: float | None = None
        # a session of its own: Ctrl-C at the terminal reaches only the supervisor, which ends the run in
        # order, and a kill reaches the reward workers too
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
        )
        assert self._process.stdout is not None
        pump = (self._process.stdout, log.open("ab"))
        self._pump = threading.Thread(target=self._keep, args=pump, name=f"log-{name}", daemon=True)
        self._pump.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def age_s(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self.started

    def poll(self) -> int | None:
        """Its exit status (negative: the signal that ended it), None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Waits for: its end, at most `timeout_s`. Returns the exit status, None when it still runs."""
        try:
            return self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Asks it to end (SIGTERM)."""
        if self.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """Ends it and everything it started (SIGKILL); works on a frozen process too."""
        self._killed = self._killed or self.poll() is None
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is gone
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(5.0)

    def is_frozen(self, heartbeat_s: float) -> bool:
        """Stopped for a whole heartbeat: what its end and the news of it take stays within the second."""
        return self.poll() is None and self.frozen_s() > heartbeat_s

    def frozen_s(self) -> float:
        """Seconds since it was first seen stopped (SIGSTOP); 0 when it runs, or where that cannot be seen."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return 0.0
        if stat.rpartition(")")[2].split()[0] != "T":
            self._frozen_since = None
            return 0.0
        self._frozen_since = self._frozen_since or time.monotonic()
        return time.monotonic() - self._frozen_since

    def ending(self) -> str:
        """How it ended and its last lines, for people. Only after its end."""
        self._pump.join(1.0)
        lines = list(self._tail)
        text = self.fate()
        if lines:
            text += f"; the last lines of {self.log}:\n" + "\n".join(f"  {line}" for line in lines)
        return text

    def fate(self) -> str:
        """How it ended, on one line."""
        return f"{self.name} (pid {self.pid}) {self._how()}"

    def close(self) -> None:
        """Kills what is left of it and releases its pipes."""
        self.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._pump.join(1.0)

    def _how(self) -> str:
        status = self.poll()
        if status is None:
            return "still runs"
        if status >= 0:
            return f"exited with status {status}"
        text = f"was ended by {signal.Signals(-status).name}"
        if status == -signal.SIGKILL and not self._killed:
            text += " (did the machine run out of memory?)"
        return text

    def _keep(self, output: IO[bytes], log: IO[bytes]) -> None:
        with output, log:
            for raw in output:
                text = raw.decode("utf-8", "replace").rstrip("\r\n")
                log.write(printable(text, _LOG_LINE).encode() + b"\n")
                log.flush()
                line = printable(text)
                self._tail.append(line)
                if self._echo is not None:
                    self._echo(self.name, line)
