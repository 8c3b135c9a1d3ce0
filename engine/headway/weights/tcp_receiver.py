"""A generator's end of the tcp channel: fetches payloads, and relays to other receivers what it has of them.

Its node's thread keeps the connections to the learner, to the receiver that it was told to ask (its parent), and
from those that ask it, whatever the generator does meanwhile. Chunks go from the socket's buffer straight into
the caller's memory once their digest is right. The destination of the last fetch is served to others until the
next fetch begins: it should hold still until then. If it does not, those who ask notice by the digests and are
sent elsewhere.
"""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass, field

from headway.errors import DeadlineExceeded, StreamError, WeightError, WireError
from headway.stream.security import ClientSecurity
from headway.types import PolicyVersion
from headway.weights.channel import PayloadHeader
from headway.weights.chunks import Assembly, ChunkPlan
from headway.weights.serving import ChunkSource, NotYet
from headway.weights.tcp_link import (
    DEFAULT_TIMING,
    Link,
    TcpAddress,
    TcpTiming,
    local_host,
)
from headway.weights.tcp_node import Node
from headway.weights.tcp_relay import RelaySocket
from headway.weights.tcp_wire import (
    Absent,
    AskWhole,
    Chunk,
    Complain,
    Denied,
    Held,
    Join,
    Leave,
    Offer,
    Outcome,
    Want,
    decode,
    payload_key,
    short,
)

_log = logging.getLogger(__name__)
MAX_BAD_CHUNKS = 5
JOIN_S = 30.0


@dataclass
class _Transfer:
    """One fetch. `assembly`, `error` and `ended` are shared under the node's `changed`; the rest is the node's."""

    header: PayloadHeader
    assembly: Assembly
    key: str = field(init=False)
    asked: int = 0
    heard_at: float = field(default_factory=time.monotonic)
    moved_at: float = field(default_factory=time.monotonic)
    num_bad: int = 0
    error: str = ""
    ended: bool = False

    def __post_init__(self) -> None:
        self.key = payload_key(self.header)


class TcpReceiver(Node):
    """A ChannelReceiver over TCP.

    Args:
        address: the sender's; run_id, manifest_digest: must equal the learner's.
        name: for logs and errors; learner_host: in place of an address's 0.0.0.0 or [::].
        relay: serve other receivers; security, insecure: as in TcpSender.
        join_s: to wait for the learner's first answer.

    Raises:
        StreamError: no address of this channel, or the learner's CURVE refuses this process.
        WeightError: the learner refuses this receiver, in its words.
        DeadlineExceeded: no answer after join_s.
    """

    def __init__(
        self,
        address: str,
        run_id: str,
        manifest_digest: str,
        *,
        name: str = "receiver",
        learner_host: str = "127.0.0.1",
        relay: bool = True,
        security: ClientSecurity | None = None,
        insecure: bool = False,
        timing: TcpTiming = DEFAULT_TIMING,
        join_s: float = JOIN_S,
    ) -> None:
        super().__init__(f"headway-weights-tcp-{name}")
        self._address = TcpAddress.parse(address).reached_by(learner_host)
        self._timing = timing
        self._security = security
        self._insecure = insecure
        self._identity = f"{name}-{uuid.uuid4().hex[:12]}".encode()
        self._offer: Offer | None = None  # shared, under `changed`, with the next four
        self._news = 0
        self._seen = 0
        self._denied = ""
        self._transfer: _Transfer | None = None
        self._asks: list[AskWhole | Outcome] = []
        self._parent: Link | None = None
        self._complained_at = 0.0
        self._due_at = 0.0
        try:
            self._up = self._link(self._address.endpoint)
            self._relay: RelaySocket | None = None
            self._hello = Join(run_id, manifest_digest, "", "")
            if relay:
                host = local_host(self._address.endpoint)
                self._relay = RelaySocket(
                    self._context, host, self._find, security=security, insecure=insecure
                )
                self._watch(*self._relay.sockets)
                self._hello = Join(run_id, manifest_digest, self._relay.endpoint, self._relay.key)
        except BaseException:
            self.stop()
            raise
        self.start()
        self._await_join(join_s)

    def _link(self, endpoint: str, server: str = "") -> Link:
        link = Link(
            self._context,
            endpoint,
            identity=self._identity,
            address=self._address,
            security=self._security,
            insecure=self._insecure,
            server=server,
        )
        self._watch(link.socket, link.monitor)
        return link

    def _await_join(self, join_s: float) -> None:
        deadline = time.monotonic() + join_s
        with self.changed:
            while self._offer is None and not self._denied and not self._stopping:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self.changed.wait(left)
            joined, denied = self._offer is not None, self._denied
        if joined:
            return
        self.close()
        if self._up.refused:
            raise StreamError(f"the learner at {self._address.endpoint} refused this process's CURVE key")
        if denied:
            raise WeightError(f"the learner at {self._address.endpoint} refused this receiver: {denied}")
        raise DeadlineExceeded(
            f"no answer from the weight channel at {self._address.endpoint} after {join_s:.1f} s"
        )

    @property
    def bytes_relayed(self) -> int:
        """Payload bytes sent to other receivers."""
        return 0 if self._relay is None else self._relay.server.bytes_sent

    def wait(self, timeout_s: float) -> None:
        """Return when another offer has come since the last call (ChannelReceiver.wait)."""
        with self.changed:
            self.changed.wait_for(lambda: self._news != self._seen or self._stopping, timeout_s)
            self._seen = self._news

    def newest(self, held: PolicyVersion | None, base_digest: str) -> PayloadHeader | None:
        """A delta from `base_digest`, else the whole state, else None (ChannelReceiver.newest)."""
        with self.changed:
            headers = [] if self._offer is None else self._offer.headers
        if not headers or (base_digest and held is not None and headers[-1].version <= held):
            return None
        return next(
            (header for header in headers if base_digest and header.base_digest == base_digest), headers[-1]
        )

    def fetch(self, header: PayloadHeader, into: memoryview, deadline_s: float) -> None:
        """Fill `into` with a payload (ChannelReceiver.fetch).

        Raises:
            WeightError: it is gone, or what came did not match its digests.
            DeadlineExceeded: not complete in time.
        """
        assembly = Assembly(into, ChunkPlan(header.num_bytes, self._address.chunk_bytes))
        transfer = _Transfer(header, assembly)
        with self.changed:
            self._check_usable()
            self._transfer = transfer
            self._waker.wake()
            self.changed.wait_for(
                lambda: assembly.complete or transfer.error or self._stopping, timeout=deadline_s
            )
            # The node adds chunks only under this lock and only to a transfer that has not ended.
            transfer.ended = True
            complete, error = assembly.complete, transfer.error
            if not complete and not error:
                error = (
                    f"{assembly.num_bytes} of {header.num_bytes} bytes of weights {header.version} came from "
                    f"{self._address.endpoint} in {deadline_s:.1f} s"
                )
            if not complete:
                self._transfer = None  # what is in `into` is nobody's any more
            self._asks.append(Outcome(transfer.key, short(error)))
        self._waker.wake()
        if not complete:
            self._check_usable()
            raise WeightError(error) if transfer.error else DeadlineExceeded(error)

    def ask_whole(self, reason: str) -> None:
        """Tell the learner that what came did not verify or fit; its next offer says what there is."""
        with self.changed:
            self._asks.append(AskWhole(short(reason)))
            if self._transfer is not None:
                self._asks.append(Outcome(self._transfer.key, short(reason)))
                self._transfer = None  # others should not get it from here either
        self._waker.wake()

    def close(self) -> None:
        """Leave and close."""
        self.stop()

    def _check_usable(self) -> None:
        try:
            self._check_alive()
        except Exception as error:
            raise WeightError(f"the tcp channel has ended: {error}") from error
        if self._denied:
            raise WeightError(
                f"the learner at {self._address.endpoint} refuses this receiver: {self._denied}"
            )

    # ---- the node's thread from here on

    def _turn(self) -> None:
        self._poll(max(0.0, min(self._due_at - time.monotonic(), self._timing.stall_s)))
        now = time.monotonic()
        if self._up.reconnected():
            self._due_at = now
            if self._parent is None:
                self._rewind()
        if self._parent is not None and self._parent.reconnected():
            self._rewind()
        if self._parent is not None and self._parent.refused and self._offer is not None:
            self._change_parent(self._offer)  # it may not have heard of us yet
        for link in (self._up, self._parent):
            for _ in range(64):
                if link is None or link.socket.closed or (frames := link.receive()) is None:
                    break
                self._guarded(self._handle, link, frames)
        if self._up.refused:
            with self.changed:
                self._denied = self._denied or "its CURVE key is not on the list there"
                self.changed.notify_all()
        if self._relay is not None:
            self._relay.turn()
        if now >= self._due_at:
            self._due_at = now + self._timing.alive_s
            self._up.send(self._hello)
            if self._relay is not None:
                self._relay.server.reassure()
        self._say()
        self._pump(now)

    def _say(self) -> None:
        with self.changed:
            asks, self._asks = self._asks, []
        while asks and self._up.send(asks[0]):
            asks.pop(0)
        with self.changed:
            self._asks[:0] = asks[-64:]

    def _find(self, want: Want) -> ChunkSource | NotYet | None:
        """What is being fetched or was fetched last; what may be fetched later; else None."""
        with self.changed:
            transfer, offer = self._transfer, self._offer
        if transfer is not None and transfer.key == want.payload:
            return transfer.assembly
        held = PolicyVersion(-1, -1) if transfer is None else transfer.header.version
        newest = offer.headers[-1].version if offer is not None and offer.headers else PolicyVersion(-1, -1)
        if want.version <= held or want.version < newest:
            return None  # this version came, or will come, in another form or not at all
        return NotYet.IDLE if transfer is None or transfer.ended else NotYet.FETCHING

    def _handle(self, link: Link, frames: list[memoryview]) -> None:
        message, body = decode(frames)
        if isinstance(message, Chunk) and body is not None:
            self._add(link, message, body)
        elif isinstance(message, Held):
            self._wait_for_parent(message)
        elif isinstance(message, Absent):
            self._absent(link, message)
        elif link is self._up and isinstance(message, Offer):
            self._take_offer(message)
        elif link is self._up and isinstance(message, Denied):
            with self.changed:
                self._denied = short(message.reason)
                self.changed.notify_all()
        else:
            raise WireError("direction", f"{type(message).__name__} is not for a receiver")

    def _take_offer(self, offer: Offer) -> None:
        with self.changed:
            self._news += offer.headers != ([] if self._offer is None else self._offer.headers)
            self._offer = offer
            self.changed.notify_all()
        if self._relay is not None:
            self._relay.allow(offer.allowed)
        if offer.parent != ("" if self._parent is None else self._parent.endpoint):
            self._change_parent(offer)

    def _change_parent(self, offer: Offer) -> None:
        if self._parent is not None:
            self._unwatch(self._parent.socket, self._parent.monitor)
            self._parent.close()
            self._parent = None
        if offer.parent:
            try:
                self._parent = self._link(offer.parent, offer.key)
            except StreamError as error:
                raise WireError("parent", f"cannot ask {offer.parent[:80]!r}: {error}") from None
        self._rewind()

    def _current(self, payload: str) -> _Transfer | None:
        transfer = self._transfer
        return transfer if transfer and not transfer.ended and transfer.key == payload else None

    def _add(self, link: Link, chunk: Chunk, body: memoryview) -> None:
        transfer = self._current(chunk.payload)
        if transfer is None or link is not (self._parent or self._up):
            return  # of a transfer that has ended, or of a parent that was left
        now = time.monotonic()
        assembly = transfer.assembly
        if chunk.index != assembly.num_ready or assembly.complete:
            return  # sent twice, after a cut
        transfer.heard_at = transfer.moved_at = now
        with self.changed:
            good = not transfer.ended and assembly.add(chunk.digest, body)
            if assembly.complete:
                self.changed.notify_all()
        if good or transfer.ended:
            return
        self.rejected["digest"] += 1
        transfer.num_bad += 1
        if link is not self._up:
            self._complain(silent=True)
        elif transfer.num_bad >= MAX_BAD_CHUNKS:
            self._fail(transfer, f"chunk {chunk.index} of {transfer.key} from {link.endpoint} is damaged")
        self._rewind()

    def _wait_for_parent(self, held: Held) -> None:
        transfer = self._current(held.payload)
        if transfer is None:
            return
        now = time.monotonic()
        transfer.heard_at = now
        if not held.fetching and now - transfer.moved_at > self._timing.stall_s:
            self._complain(silent=False)

    def _absent(self, link: Link, absent: Absent) -> None:
        transfer = self._current(absent.payload)
        if transfer is None:
            return
        offered = {payload_key(header) for header in self._offer.headers} if self._offer else set[str]()
        if link is self._parent and transfer.key in offered:
            self._complain(silent=False)
        else:
            self._fail(transfer, f"weights {transfer.header.version} have been replaced by newer ones")

    def _fail(self, transfer: _Transfer, error: str) -> None:
        with self.changed:
            transfer.error = error
            self.changed.notify_all()

    def _complain(self, *, silent: bool) -> None:
        """Once per stall: the answer, an offer with another parent, needs its time."""
        transfer, now = self._transfer, time.monotonic()
        if transfer is None or self._parent is None or now - self._complained_at < self._timing.stall_s / 2:
            return
        if self._up.send(Complain(self._parent.endpoint, transfer.key, silent)):
            self._complained_at = now

    def _rewind(self) -> None:
        if self._transfer is not None:
            self._transfer.asked = self._transfer.assembly.num_ready
            self._transfer.heard_at = time.monotonic()

    def _pump(self, now: float) -> None:
        """Ask for chunks, as many as may be in flight; complain and ask again when none come."""
        transfer = self._transfer
        if transfer is None or transfer.ended or transfer.assembly.complete:
            return
        link = self._parent or self._up
        if now - transfer.heard_at > self._timing.stall_s:
            self._complain(silent=True)
            self._rewind()
        last = min(
            transfer.assembly.plan.num_chunks,
            transfer.assembly.num_ready + self._address.chunks_in_flight,
        )
        while transfer.asked < last:
            if not link.send(Want(transfer.key, transfer.header.version, transfer.asked)):
                return
            transfer.asked += 1

    def _farewell(self) -> None:
        self._up.send(Leave())
