"""The intake: the thread that owns the learner's sockets and drives the desk.

The main loop and the intake share one desk under one lock. The intake waits for messages or a wake-up; the main
loop, in `take`, waits for a complete batch and is unblocked by the arrivals that complete it.

A turn reads what has come, lets the desk answer, puts the turn's records on the disk with one fsync, and only then
sends the answers. On a full disk the turn waits for space, at most `full_wait_s`: nothing more is read, so nothing
is acknowledged and what can pile up is what the tickets allow; the main loop goes on with what it has.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from headway.buffer import Group
from headway.errors import DeadlineExceeded, HeadwayError, JournalFull, StreamError
from headway.learner.desk import Desk
from headway.stream import Endpoints, LearnerSocket
from headway.types import PolicyVersion
from headway.wire.messages import Bye, Stop

_log = logging.getLogger(__name__)
POLL_S = 0.05
STOP_GRACE_S = 1.0


class Intake:
    """Runs the desk behind a LearnerSocket.

    Args:
        desk: from now on only used under this object's lock.
        open_socket: makes the socket, on the intake's thread; patience_s: longest wait for a batch.
        full_wait_s: longest wait for space on the journal's disk.

    Raises:
        StreamError: the socket cannot be made.
    """

    def __init__(
        self,
        desk: Desk,
        open_socket: Callable[[], LearnerSocket],
        patience_s: float,
        full_wait_s: float = 60.0,
    ) -> None:
        self.desk = desk
        self._open_socket = open_socket
        self._patience_s = patience_s
        self._full_wait_s = full_wait_s
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._socket: LearnerSocket | None = None
        self._stopping = ""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="headway-intake", daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._socket is not None or self._error is not None, 30.0)
        self._check()

    @property
    def endpoints(self) -> Endpoints:
        """Where generators connect."""
        assert self._socket is not None
        return self._socket.endpoints

    @property
    def lock(self) -> threading.Condition:
        """Held by whoever looks at the desk."""
        return self._changed

    @property
    def rejected(self) -> Counter[str]:
        """Messages dropped so far, by reason: no valid message, or from nobody that belongs to the run."""
        with self._changed:
            # The socket's thread may count meanwhile: copied whole, not while it grows.
            invalid = {} if self._socket is None else dict(self._socket.rejected)
            return Counter(invalid) + self.desk.refused

    def take(self, interrupted: Callable[[], bool]) -> list[Group]:
        """The next batch; empty when the prompts are used up and nothing is left, or when interrupted.

        Args:
            interrupted: asked a few times a second.

        Raises:
            DeadlineExceeded: no batch for `patience_s`; says what is missing.
            HeadwayError: the intake failed, or training must stop.
        """
        deadline = time.monotonic() + self._patience_s
        with self._changed:
            while True:
                self._check()
                if interrupted() or self.desk.drained:
                    return []
                batch = self.desk.take()
                if batch.groups:
                    return batch.groups
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(self._missing())
                self._changed.wait(0.2)

    def trained(self, groups: list[Group], version: PolicyVersion) -> None:
        """See Desk.trained."""
        with self._changed:
            self.desk.trained(groups, version)
        self._wake()

    def published(self, version: PolicyVersion, digest: str) -> None:
        """See Desk.published."""
        with self._changed:
            self.desk.published(version, digest)
        self._wake()

    def close(self, reason: str) -> None:
        """Tell the generators to stop, close the sockets, and end the thread. Idempotent."""
        with self._changed:
            self._stopping = self._stopping or reason
        self._closing.set()
        self._wake()
        self._thread.join(STOP_GRACE_S + 2.0)
        if rejected := self.rejected:
            told = ", ".join(f"{reason} {num}" for reason, num in sorted(rejected.items()))
            _log.warning("%d messages from peers were dropped: %s", rejected.total(), told)

    def _wake(self) -> None:
        if self._socket is not None and self._thread.is_alive():
            self._socket.wake()

    def _check(self) -> None:
        if isinstance(self._error, HeadwayError):
            raise self._error
        if self._error is not None:
            raise StreamError(f"the intake failed: {self._error!r}") from self._error

    def _missing(self) -> str:
        ledger = self.desk.gate.ledger
        peers = ", ".join(f"{p.index} ({len(p.tickets)} tickets)" for p in self.desk.peers) or "none"
        return (
            f"no complete batch for {self._patience_s:.0f} s: {ledger.buffered} groups finished, "
            f"{ledger.in_flight} in flight; live generators: {peers}"
        )

    def _run(self) -> None:
        try:
            socket = self._open_socket()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            return
        with self._changed:
            self._socket = socket
            self._changed.notify_all()
        try:
            while not self._stopping:
                self._turn(socket)
            self._say_stop(socket)
        except BaseException as error:
            _log.exception("the intake failed")
            with self._changed:
                self._error = error
                self._changed.notify_all()
            self._stopping = self._stopping or "the learner failed"
            self._say_stop(socket)
        finally:
            socket.close()

    def _turn(self, socket: LearnerSocket) -> None:
        messages = socket.receive(POLL_S)
        with self._changed:
            for address, message, frames in messages:
                self.desk.on_message(address, message, frames)
            self.desk.tick()
            outgoing = list(self.desk.outbox)
            self.desk.outbox.clear()
            self._changed.notify_all()
        if not self._commit():
            return
        for address, message in outgoing:
            if not socket.send(address, message):
                _log.debug("a message for %s was not sent: it is gone", address.decode(errors="replace"))

    def _commit(self) -> bool:
        """Put the turn's records on the disk; False when the run ends before that could be done.

        Waits for: the disk; while it is full, for space.

        Raises:
            JournalFull: there was none for `full_wait_s`. JournalError: the disk failed.
        """
        deadline: float | None = None
        while True:
            try:
                self.desk.chronicle.commit()
            except JournalFull as full:
                now = time.monotonic()
                if deadline is None:
                    deadline = now + self._full_wait_s
                    _log.error("%s; waiting for space, at most %.0f s", full, self._full_wait_s)
                if now >= deadline:
                    raise JournalFull(f"{full}; there was none for {self._full_wait_s:g} s") from None
                if self._closing.wait(0.1):
                    return False
            else:
                if deadline is not None:
                    _log.info("there is space for the journal again")
                return True

    def _say_stop(self, socket: LearnerSocket) -> None:
        """Tell the generators to stop, those that only now speak up too.

        Waits for: the Bye of everybody who was told, at most STOP_GRACE_S. The desk has its last counts
        already and hears nothing of this.
        """
        stop = Stop(reason=self._stopping)
        staying = {peer.address for peer in self.desk.peers if socket.send(peer.address, stop)}
        told = set(staying)
        end = time.monotonic() + STOP_GRACE_S
        while staying and time.monotonic() < end:
            for address, message in socket.poll(POLL_S):
                if isinstance(message, Bye):
                    staying.discard(address)
                elif address not in told and socket.send(address, stop):
                    told.add(address)
                    staying.add(address)
