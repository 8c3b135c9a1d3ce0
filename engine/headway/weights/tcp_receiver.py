"""A generator's end of the tcp channel: fetches payloads, and relays to other receivers what it has of them.

Its node's thread keeps the connections to the learner, to the receiver that it was told to ask (its parent), and
from those that ask it, whatever the generator does meanwhile. Chunks go from the socket's buffer straight into
the caller's memory once their digest is right. The destination of the last fetch is served to others until the
next fetch begins: it should hold still until then. If it does not, those who ask notice by the digests and are
sent elsewhere.

Chunks come over plain data connections, read by the thread that fetches; with CURVE through ZeroMQ, by the node's.
"""

from __future__ import annotations

import logging
import time
import uuid

from headway.errors import DeadlineExceeded, StreamError, WeightError, WireError
from headway.stream.security import ClientSecurity
from headway.types import PolicyVersion
from headway.weights.channel import PayloadHeader
from headway.weights.chunks import Assembly, ChunkPlan
from headway.weights.serving import ChunkSource, NotYet
from headway.weights.tcp_data import DataServer
from headway.weights.tcp_link import (
    DEFAULT_TIMING,
    Link,
    TcpAddress,
    TcpTiming,
    local_host,
)
from headway.weights.tcp_node import Node
from headway.weights.tcp_plain import PlainFetch, Sources
from headway.weights.tcp_pull import Links, Transfer, ZeroMqFetch
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
JOIN_S = 30.0


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
        self._transfer: Transfer | None = None
        self._asks: list[AskWhole | Outcome | Complain] = []
        self._due_at = 0.0
        self._relay: RelaySocket | None = None  # one of these two serves others
        self._data: DataServer | None = None
        self._plain = self._plain_fetch() if self._address.data and security is None else None
        try:
            self._up = self._link(self._address.endpoint)
            self._pull = self._zeromq_fetch() if self._plain is None else None
            self._hello = Join(run_id, manifest_digest, *(self._open_relay() if relay else ("", "")))
        except BaseException:
            self.close()
            raise
        self.start()
        self._await_join(join_s)

    def _offers(self, key: str) -> bool:
        return self._offer is not None and key in map(payload_key, self._offer.headers)

    def _zeromq_fetch(self) -> ZeroMqFetch:
        def close(link: Link) -> None:
            self._unwatch(link.socket, link.monitor)
            link.close()

        return ZeroMqFetch(
            Links(self._up, self._link, close),
            self.changed,
            self.rejected,
            timing=self._timing,
            in_flight=self._address.chunks_in_flight,
            offered=self._offers,
        )

    def _plain_fetch(self) -> PlainFetch:
        def complain(relay: str, key: str, silent: bool) -> None:
            with self.changed:
                self._asks.append(Complain(relay, key, silent))
            self._waker.wake()

        sources = Sources(
            parent=lambda: "" if self._offer is None else self._offer.parent,
            offered=self._offers,
            complain=complain,
            stopped=lambda: self._stopping,
        )
        return PlainFetch(self._address.data, sources, self.changed, self._timing, self.rejected)

    def _open_relay(self) -> tuple[str, str]:
        """Listen for other receivers; where, and with which key."""
        host = local_host(self._address.endpoint)
        if self._plain is not None:
            timing = self._timing
            self._data = DataServer(
                host, 0, self._find, self.changed, alive_s=timing.alive_s, stall_s=2 * timing.stall_s
            )
            return self._data.endpoint, ""
        self._relay = RelaySocket(
            self._context, host, self._find, security=self._security, insecure=self._insecure
        )
        self._watch(*self._relay.sockets)
        return self._relay.endpoint, self._relay.key

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
        plain = 0 if self._data is None else self._data.bytes_sent
        return plain + (0 if self._relay is None else self._relay.server.bytes_sent)

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
        transfer = Transfer(header, assembly)
        with self.changed:
            self._check_usable()
            self._set(transfer)
            self._waker.wake()
            self.changed.notify_all()  # others may have asked for it here already
        self._complete(transfer, time.monotonic() + deadline_s)
        with self.changed:
            # The node adds chunks only under this lock and only to a transfer that has not ended.
            transfer.ended = True
            complete, error = assembly.complete, transfer.error
            if not complete and not error:
                error = (
                    f"{assembly.num_bytes} of {header.num_bytes} bytes of weights {header.version} came from "
                    f"{self._address.endpoint} in {deadline_s:.1f} s"
                )
            if not complete:
                self._set(None)  # what is in `into` is nobody's any more
            self._asks.append(Outcome(transfer.key, short(error)))
        self._waker.wake()
        if not complete:
            self._check_usable()
            raise WeightError(error) if transfer.error else DeadlineExceeded(error)

    def _set(self, transfer: Transfer | None) -> None:
        self._transfer = transfer
        if self._pull is not None:
            self._pull.transfer = transfer

    def _complete(self, transfer: Transfer, deadline: float) -> None:
        """Wait until it is there, will never be, or has taken too long."""
        if self._plain is not None:
            version = transfer.header.version
            transfer.error = self._plain.run(transfer.key, version, transfer.assembly, deadline)
        elif self._pull is not None:
            self._pull.complete(transfer, deadline, lambda: self._stopping)

    def ask_whole(self, reason: str) -> None:
        """Tell the learner that what came did not verify or fit; its next offer says what there is."""
        with self.changed:
            self._asks.append(AskWhole(short(reason)))
            if self._transfer is not None:
                self._asks.append(Outcome(self._transfer.key, short(reason)))
                self._set(None)  # others should not get it from here either
        self._waker.wake()

    def close(self) -> None:
        """Leave and close."""
        self.stop()
        if self._data is not None:
            self._data.close()
        if self._plain is not None:
            self._plain.close()

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
        if up_is_new := self._up.reconnected():
            self._due_at = now
        if self._pull is not None:
            self._guarded(self._pull.follow, up_is_new)
        for link in (self._up, None if self._pull is None else self._pull.parent):
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
        if self._pull is not None:
            self._pull.pump(now)

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
        if isinstance(message, Chunk | Held | Absent) and self._pull is not None:
            self._pull.handle(link, message, body)
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
        pull = self._pull
        if pull is not None and offer.parent != ("" if pull.parent is None else pull.parent.endpoint):
            pull.change_parent(offer.parent, offer.key)

    def _farewell(self) -> None:
        self._up.send(Leave())
