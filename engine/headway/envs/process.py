"""One worker process as the pool sees it: its socket, its lifeline, its death."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import msgspec

from headway.envs.messages import FrameReader, Setup, ToPool, ToWorker, frame

_decoder = msgspec.msgpack.Decoder(ToPool)


class WorkerProcess:
    """A started worker. No method blocks but `stop`, which ends the object's life.

    The process is spawned, never forked: it inherits the socket and the lifeline and nothing else. It leads a
    process group of its own, so that what the user's code starts dies with it.
    """

    def __init__(self, setup: Setup) -> None:
        ours, theirs = socket.socketpair()
        read_end, write_end = os.pipe()
        options = ["--socket", str(theirs.fileno()), "--lifeline", str(read_end)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "headway.envs.worker", *options],
                pass_fds=[theirs.fileno(), read_end],
                stdin=subprocess.DEVNULL,
                stdout=2,
                process_group=0,
                env=_environment_variables(),
            )
        except BaseException:
            ours.close()
            os.close(write_end)
            raise
        finally:
            theirs.close()
            os.close(read_end)
        ours.setblocking(False)
        self._socket = ours
        self._lifeline = write_end
        self._reader = FrameReader()
        self._outgoing = bytearray()
        self._ended = False
        self.send(setup)

    def fileno(self) -> int:
        """The socket's, for selectors."""
        return self._socket.fileno()

    @property
    def pid(self) -> int:
        """The process's, which is also its group's."""
        return self._process.pid

    @property
    def num_unsent(self) -> int:
        """Bytes that the socket has not taken yet; the worker cannot have begun."""
        return len(self._outgoing)

    def send(self, message: ToWorker) -> None:
        """Queues a message and sends what the socket takes."""
        self._outgoing += frame(message)
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes of what is queued."""
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError:
            self._outgoing.clear()  # it is dead: receive() will say so, after its last verdicts

    def receive(self) -> tuple[list[ToPool], bool]:
        """All messages that have arrived, and whether the worker has ended (or speaks nonsense)."""
        while not self._ended:
            try:
                data = self._socket.recv(1 << 18)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._ended = not data
            self._reader.feed(data)
        messages: list[ToPool] = []
        try:
            while (body := self._reader.take()) is not None:
                messages.append(_decoder.decode(body))
        except (ValueError, msgspec.DecodeError):
            self._ended = True
        return messages, self._ended

    def hang_up(self) -> None:
        """Closes the socket: a worker that is not busy ends by itself."""
        self._socket.close()
        self._ended = True

    def stop(self, grace_s: float) -> str:
        """Ends the process and its group, and reaps it. Returns how it ended, for messages.

        Waits for: the process to end by itself, up to grace_s; then it is killed.
        """
        self.hang_up()
        give_up = time.monotonic() + grace_s
        while not self._has_exited() and time.monotonic() < give_up:
            time.sleep(0.005)
        # before it is reaped: afterwards its id may belong to somebody else
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        os.close(self._lifeline)
        return f"exit status {status}" if status >= 0 else f"killed by {_signal_name(-status)}"

    def _has_exited(self) -> bool:
        """Whether the process is dead; leaves it to be reaped."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _environment_variables() -> dict[str, str]:
    """This process's, with its import path; one compute thread, since several that spin starve the others."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
