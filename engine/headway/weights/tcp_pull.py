"""Fetching chunks through ZeroMQ, which is how they travel with keys: asked for ahead, a bounded number at a time.

Belongs to a receiver's node, whose thread calls all of it but `complete`; that one waits, on the thread that fetches,
for the last chunk. Unblocked by: the node, which adds chunks, hears of other parents, and notices silence.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from headway.errors import StreamError, WireError
from headway.weights.channel import PayloadHeader
from headway.weights.chunks import Assembly
from headway.weights.tcp_link import Link, TcpTiming
from headway.weights.tcp_plain import MAX_BAD_CHUNKS
from headway.weights.tcp_wire import Absent, Chunk, Complain, Held, Want, payload_key


@dataclass
class Transfer:
    """One fetch. `assembly`, `error` and `ended` are shared under the node's `changed`; the rest is its thread's.

    Attributes:
        asked: chunks asked for so far; heard_at: of a chunk or a sign of life; moved_at: of a chunk.
    """

    header: PayloadHeader
    assembly: Assembly
    key: str = field(init=False)
    error: str = ""
    ended: bool = False
    asked: int = 0
    heard_at: float = field(default_factory=time.monotonic)
    moved_at: float = field(default_factory=time.monotonic)
    num_bad: int = 0

    def __post_init__(self) -> None:
        self.key = payload_key(self.header)


@dataclass(frozen=True)
class Links:
    """What the node lends: the link to the learner, and how others are opened and closed (endpoint, key)."""

    up: Link
    open: Callable[[str, str], Link]
    close: Callable[[Link], None]


class ZeroMqFetch:
    """Fetches one payload at a time.

    Args:
        links: of the node; changed, rejected: the node's. in_flight: chunks asked for and not there.
        offered: whether the learner still offers a payload.

    Attributes:
        transfer: the present one, set by the receiver under `changed`; parent: the relay asked, None: the learner.
    """

    def __init__(
        self,
        links: Links,
        changed: threading.Condition,
        rejected: Counter[str],
        *,
        timing: TcpTiming,
        in_flight: int,
        offered: Callable[[str], bool],
    ) -> None:
        self.transfer: Transfer | None = None
        self.parent: Link | None = None
        self._parent_key = ""
        self._links, self._changed, self._rejected = links, changed, rejected
        self._timing, self._in_flight, self._offered = timing, in_flight, offered
        self._complained_at = 0.0

    def complete(self, transfer: Transfer, deadline: float, stopped: Callable[[], bool]) -> None:
        """Wait until it is there, will never be, or has taken too long."""
        with self._changed:
            self._changed.wait_for(
                lambda: transfer.assembly.complete or transfer.error or stopped(),
                timeout=deadline - time.monotonic(),
            )

    def follow(self, up_is_new: bool) -> None:
        """Ask again on new connections; make a refused one anew: its relay may not have heard of us yet."""
        if up_is_new and self.parent is None:
            self.rewind()
        if self.parent is not None and self.parent.reconnected():
            self.rewind()
        if self.parent is not None and self.parent.refused:
            self.change_parent(self.parent.endpoint, self._parent_key)

    def change_parent(self, endpoint: str, key: str) -> None:
        """Ask another relay, or with "" the learner, for what is still missing.

        Raises:
            WireError: it is no endpoint that can be connected to.
        """
        if self.parent is not None:
            self._links.close(self.parent)
            self.parent = None
        if endpoint:
            self._parent_key = key
            try:
                self.parent = self._links.open(endpoint, key)
            except StreamError as error:
                raise WireError("parent", f"cannot ask {endpoint[:80]!r}: {error}") from None
        self.rewind()

    def rewind(self) -> None:
        """What was asked for and is not there is asked for again."""
        if self.transfer is not None:
            self.transfer.asked = self.transfer.assembly.num_ready
            self.transfer.heard_at = time.monotonic()

    def handle(self, link: Link, message: Chunk | Held | Absent, body: memoryview | None) -> None:
        """An answer to a Want."""
        transfer = self.transfer
        if transfer is None or transfer.ended or transfer.key != message.payload:
            return
        if isinstance(message, Held):
            self._wait_for_parent(transfer, message)
        elif isinstance(message, Absent):
            self._absent(transfer, link)
        elif body is not None and link is (self.parent or self._links.up):
            self._add(transfer, link, message, body)

    def _add(self, transfer: Transfer, link: Link, chunk: Chunk, body: memoryview) -> None:
        assembly = transfer.assembly
        if chunk.index != assembly.num_ready or assembly.complete:
            return  # sent twice, after a cut
        transfer.heard_at = transfer.moved_at = time.monotonic()
        with self._changed:
            good = not transfer.ended and assembly.add(chunk.digest, body)
            if assembly.complete:
                self._changed.notify_all()
        if good or transfer.ended:
            return
        self._rejected["digest"] += 1
        transfer.num_bad += 1
        if link is not self._links.up:
            self._complain(silent=True)
        elif transfer.num_bad >= MAX_BAD_CHUNKS:
            self._fail(transfer, f"chunk {chunk.index} of {transfer.key} from {link.endpoint} is damaged")
        self.rewind()

    def _wait_for_parent(self, transfer: Transfer, held: Held) -> None:
        now = time.monotonic()
        transfer.heard_at = now
        if not held.fetching and now - transfer.moved_at > self._timing.stall_s:
            self._complain(silent=False)

    def _absent(self, transfer: Transfer, link: Link) -> None:
        if link is self.parent and self._offered(transfer.key):
            self._complain(silent=False)
        else:
            self._fail(transfer, f"weights {transfer.header.version} have been replaced by newer ones")

    def _fail(self, transfer: Transfer, error: str) -> None:
        with self._changed:
            transfer.error = error
            self._changed.notify_all()

    def _complain(self, *, silent: bool) -> None:
        """Once per stall: the answer, an offer with another parent, needs its time."""
        transfer, now = self.transfer, time.monotonic()
        if transfer is None or self.parent is None or now - self._complained_at < self._timing.stall_s / 2:
            return
        if self._links.up.send(Complain(self.parent.endpoint, transfer.key, silent)):
            self._complained_at = now

    def pump(self, now: float) -> None:
        """Ask for chunks, as many as may be in flight; complain and ask again when none come."""
        transfer = self.transfer
        if transfer is None or transfer.ended or transfer.assembly.complete:
            return
        link = self.parent or self._links.up
        if now - transfer.heard_at > self._timing.stall_s:
            self._complain(silent=True)
            self.rewind()
        last = min(transfer.assembly.plan.num_chunks, transfer.assembly.num_ready + self._in_flight)
        while transfer.asked < last:
            if not link.send(Want(transfer.key, transfer.header.version, transfer.asked)):
                return
            transfer.asked += 1
