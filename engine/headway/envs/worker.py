"""A reward worker: `python -m headway.envs.worker --socket FD --lifeline FD`, started by a RewardPool.

Builds one environment and scores completions in order, answering after each, until the socket closes. Waits
for: the pool's next batch. The user's code has this process to itself: it may print (standard output is the
parent's standard error), set alarms, hang or die; only its own completion pays.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback

import msgspec

from headway.envs.loading import load_environment
from headway.envs.messages import Batch, FrameReader, Ready, Refused, Scored, Setup, ToPool, ToWorker, frame
from headway.envs.protocol import Completion, Environment
from headway.errors import EnvironmentFailure

MAX_TRACEBACKS = 3
MAX_ERROR_CHARACTERS = 500


def main(arguments: list[str] | None = None) -> int:
    """Serves one pool until it closes the socket. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="headway.envs.worker")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--lifeline", type=int, required=True)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    _die_with_parent(options.lifeline)
    # what the environment starts must not hold the socket open after this process has died
    os.set_inheritable(options.socket, False)
    with socket.socket(fileno=options.socket) as channel:
        # a fork that lives on would hide this process's death, and one that returns would answer a second time
        os.register_at_fork(after_in_child=channel.close)
        return _Server(channel).run()


class _Server:
    """The loop of one worker."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._reader = FrameReader()
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._num_tracebacks = 0

    def run(self) -> int:
        setup = self._receive()
        if not isinstance(setup, Setup):
            return 1
        try:
            environment = load_environment(setup.spec)
        except EnvironmentFailure as error:
            if error.__cause__ is not None and not isinstance(error.__cause__, EnvironmentFailure):
                traceback.print_exception(error.__cause__)
            self._send(Refused(str(error)))
            return 1
        self._send(Ready())
        while isinstance(batch := self._receive(), Batch):
            for completion in batch.completions:
                began = time.perf_counter()
                scored = self._score(environment, batch.index, completion)
                self._send(msgspec.structs.replace(scored, seconds=time.perf_counter() - began))
        return 0

    def _score(self, environment: Environment, index: int, completion: Completion) -> Scored:
        try:
            return verdict(environment.reward(index, completion), environment)
        except BaseException as error:  # SystemExit too: the process is ours to end
            if self._num_tracebacks < MAX_TRACEBACKS:
                self._num_tracebacks += 1
                traceback.print_exc()
            return Scored(None, f"raised: {type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)  # left over, it would hit the next completion

    def _receive(self) -> ToWorker | None:
        """The next message; None when the pool has closed the socket."""
        while (body := self._reader.take()) is None:
            data = self._channel.recv(1 << 16)
            if not data:
                return None
            self._reader.feed(data)
        return self._decoder.decode(body)

    def _send(self, message: ToPool) -> None:
        self._channel.sendall(frame(message))


def verdict(value: object, environment: object) -> Scored:
    """The reward as a float, or why it is none.

    Finite int, float, bool, numpy scalars and 0-d tensors are rewards. Text, None, NaN, infinities and
    anything with dimensions are not.
    """
    number = None
    if not isinstance(value, str | bytes | bytearray) and not getattr(value, "shape", ()):
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            number = None
    if number is not None and math.isfinite(number):
        return Scored(number)
    shown = repr(value)[:80]
    return Scored(
        None,
        f"bad value: {type(environment).__name__}.reward returned {shown} ({type(value).__name__}); "
        f"expected a finite number",
    )


def _die_with_parent(lifeline: int) -> None:
    """Kills this process group when the other end of the pipe `lifeline` closes, whatever runs here.

    The kernel sends the signal, so neither a loop in C nor a held interpreter lock delays it.
    PR_SET_PDEATHSIG would fire when the parent's *thread* ends.
    """
    os.set_inheritable(lifeline, False)
    if not hasattr(fcntl, "F_SETSIG"):
        threading.Thread(target=_watch, args=(lifeline,), daemon=True).start()
        return
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    try:
        closed = os.read(lifeline, 1) == b""
    except BlockingIOError:
        closed = False
    if closed:
        os._exit(1)  # the parent died before the signal was armed


def _watch(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
