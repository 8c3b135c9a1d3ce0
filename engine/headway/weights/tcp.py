"""The learner's end of the tcp channel: offers what is newest, and serves chunks to the first of its receivers.

Receivers pull: they ask for chunks by number, a bounded number at a time, so a slow one slows only itself, and
one whose connection was cut goes on at the chunk it lacks. Most of them ask another receiver (headway.weights
.relay says whom). `publish` hands over and returns; `settle` waits until every receiver has what is newest.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from dataclasses import dataclass

import zmq

from headway.config.address import split_tcp
from headway.errors import DeadlineExceeded, UnsupportedOption, WeightError, WireError
from headway.stream.endpoint import LOOPBACK, bind
from headway.stream.security import ServerSecurity
from headway.stream.transport import receive_frames
from headway.weights.channel import PayloadHeader, Publication
from headway.weights.relay import LEARNER, RelayTree
from headway.weights.serving import MAX_PEERS, ChunkServer
from headway.weights.shelf import Shelf
from headway.weights.tcp_data import DataServer
from headway.weights.tcp_link import DEFAULT_TIMING, TcpAddress, TcpTiming, configure
from headway.weights.tcp_node import Node
from headway.weights.tcp_wire import (
    MAX_HEAD_BYTES,
    AskWhole,
    Complain,
    Denied,
    Join,
    Leave,
    Message,
    Offer,
    Outcome,
    Want,
    decode,
    name_of,
    payload_key,
    peer_of,
    short,
)

_log = logging.getLogger(__name__)
CHUNK_BYTES = 1 << 20
CHUNKS_IN_FLIGHT = 16
FAN_OUT = 2
MAX_ALLOWED = 256


@dataclass
class _Peer:
    endpoint: str
    key: str
    heard_at: float


class TcpSender(Node):
    """A ChannelSender over TCP.

    Args:
        run_id, manifest_digest: what receivers must name; endpoint: to bind; port 0 lets the kernel choose.
        chunk_bytes, chunks_in_flight: of every transfer; fan_out: receivers that the learner itself serves, and
            that each receiver relays to.
        security: CURVE; required by addresses other than loopback, unless `insecure`.
        plain: send chunks over data connections of their own, which is faster; never with `security`.

    Raises:
        StreamError: the endpoint is refused or taken.
        UnsupportedOption: a size that no receiver would accept.
    """

    def __init__(
        self,
        run_id: str,
        manifest_digest: str,
        *,
        endpoint: str = LOOPBACK,
        chunk_bytes: int = CHUNK_BYTES,
        chunks_in_flight: int = CHUNKS_IN_FLIGHT,
        fan_out: int = FAN_OUT,
        security: ServerSecurity | None = None,
        insecure: bool = False,
        plain: bool = True,
        timing: TcpTiming = DEFAULT_TIMING,
    ) -> None:
        super().__init__("headway-weights-tcp-sender")
        self._run_id = run_id
        self._manifest_digest = manifest_digest
        self._timing = timing
        self._peers: dict[bytes, _Peer] = {}
        self._shelf = Shelf(chunk_bytes, timing.stall_s)
        self._offered: list[PayloadHeader] = []
        self._due_at = 0.0
        self._data: DataServer | None = None
        self._incoming: Publication | None = None  # from here on: shared, under `changed`
        self._current: frozenset[str] = frozenset()
        self._receivers: frozenset[bytes] = frozenset()
        self._outcomes: dict[bytes, tuple[str, str]] = {}
        try:
            self._tree = RelayTree(fan_out)
            self._socket = self._context.socket(zmq.ROUTER)
            configure(self._socket, endpoint, MAX_HEAD_BYTES, 1000)
            self._socket.router_mandatory = True
            self._socket.router_handover = True
            if security is not None:
                self.guard = security.guard(self._context)
                security.protect(self._socket)
            bound = bind(self._socket, endpoint, insecure=insecure)
            if plain and security is None:
                self._data = self._open_data(bound, endpoint)
            data = "" if self._data is None else self._data.endpoint
            self._address = TcpAddress(bound, chunk_bytes, chunks_in_flight, data)
            if TcpAddress.parse(str(self._address)) != self._address:
                raise UnsupportedOption(f"{self._address} cannot be told to receivers")
        except BaseException:
            self.close()
            raise
        self._server = ChunkServer(self._socket, self._shelf.find)
        self._watch(self._socket)
        self.start()

    def _open_data(self, bound: str, asked: str) -> DataServer:
        """Beside the control port: the next one where that is fixed, else any."""
        found, wanted = split_tcp(bound), split_tcp(asked)
        assert found is not None
        port = found[1] + 1 if wanted is not None and wanted[1] else 0
        return DataServer(
            found[0],
            port,
            self._shelf.find,
            threading.Condition(),
            alive_s=self._timing.alive_s,
            stall_s=2 * self._timing.stall_s,
        )

    @property
    def address(self) -> str:
        """What receivers are opened with."""
        return str(self._address)

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that the learner itself has handed to the transport."""
        return self._server.bytes_sent + (0 if self._data is None else self._data.bytes_sent)

    @property
    def num_receivers(self) -> int:
        """Receivers that have joined and are alive."""
        return len(self._receivers)

    @property
    def num_rescues(self) -> int:
        """Times that a receiver came to the learner beyond its fan-out."""
        return self._tree.num_rescues

    def publish(self, publication: Publication, deadline_s: float) -> None:
        """Make `publication` the newest; returns at once (ChannelSender.publish).

        Raises:
            WeightError: the channel's thread has ended.
        """
        del deadline_s  # nothing here waits
        with self.changed:
            try:
                self._check_alive()
            except Exception as error:
                raise WeightError(f"the tcp channel cannot publish: {error}") from error
            self._incoming = publication
            headers = [delta.header for delta in publication.deltas] + [publication.whole_header]
            self._current = frozenset(payload_key(header) for header in headers)
            self._outcomes.clear()
        self._waker.wake()

    def settle(self, deadline_s: float, num_receivers: int = 0) -> None:
        """Wait until every receiver has staged the newest version.

        Args:
            num_receivers: that must have joined by then, at least.

        Raises:
            WeightError: one has failed; in its own words.
            DeadlineExceeded: not all have it after `deadline_s`; names those that do not.
        """
        deadline = time.monotonic() + deadline_s
        with self.changed:
            while True:
                done = {peer for peer, outcome in self._outcomes.items() if outcome[0] in self._current}
                errors = {peer: text for peer, (_, text) in self._outcomes.items() if peer in done and text}
                if errors:
                    words = "; ".join(f"{name_of(peer)}: {text}" for peer, text in sorted(errors.items()))
                    raise WeightError(f"{len(errors)} of {len(self._receivers)} receivers failed: {words}")
                missing = self._receivers - done
                if not missing and len(self._receivers) >= num_receivers:
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded(self._missing_text(missing, num_receivers, deadline_s))
                self.changed.wait(left)

    def _missing_text(self, missing: frozenset[bytes], num_receivers: int, deadline_s: float) -> str:
        names = ", ".join(sorted(map(name_of, missing))) or "none of those that joined"
        return (
            f"waited {deadline_s:.1f} s for the newest weights to arrive; still missing at {names} "
            f"({len(self._receivers)} receivers have joined, {num_receivers} are expected)"
        )

    def close(self) -> None:
        """Close; receivers keep what they have."""
        self.stop()
        if self._data is not None:
            self._data.close()

    def _turn(self) -> None:
        self._poll(max(0.0, self._due_at - time.monotonic()))
        self._take_publication()
        for _ in range(256):  # bounded: a flood must not keep the offers from going out
            try:
                frames = receive_frames(self._socket, 3)
            except WireError as fault:
                self.rejected[fault.reason] += 1
                continue
            if frames is None:
                break
            self._guarded(self._handle, frames)
        if (now := time.monotonic()) >= self._due_at:
            self._due_at = now + self._timing.alive_s
            self._forget_silent(now)
            self._shelf.clear()

    def _take_publication(self) -> None:
        with self.changed:
            publication, self._incoming = self._incoming, None
        if publication is None:
            return
        self._offered = self._shelf.put(publication)
        self._offer(list(self._peers))

    def _handle(self, frames: list[bytes]) -> None:
        peer = frames[0]
        message, _ = decode(frames[1:])
        if isinstance(message, Join):
            self._join(peer, message)
            return
        known = self._peers.get(peer)
        if known is None:
            raise WireError("unjoined", f"{type(message).__name__} of a peer that has not joined")
        known.heard_at = time.monotonic()
        self._answer(peer, message)

    def _answer(self, peer: bytes, message: Message) -> None:
        name = name_of(peer)
        if isinstance(message, Want):
            self._server.want(peer, message)
        elif isinstance(message, Outcome):
            with self.changed:
                self._outcomes[peer] = (message.payload, short(message.error))
                self.changed.notify_all()
            self._tree.heard(name)
            if message.error:
                _log.warning("weights did not arrive at %s: %s", name, short(message.error))
            if self._tree.served(name):
                self._offer_moved([name])
        elif isinstance(message, Complain):
            self._complain(peer, message)
        elif isinstance(message, AskWhole):
            _log.warning("%s asks for a whole state: %s", name, short(message.reason))
            self._offer([peer])
        elif isinstance(message, Leave):
            self._forget(peer)
        else:
            raise WireError("direction", f"{type(message).__name__} is not for a learner")

    def _join(self, peer: bytes, join: Join) -> None:
        for what, theirs, ours in (
            ("run", join.run_id, self._run_id),
            ("manifest", join.manifest_digest, self._manifest_digest),
        ):
            if theirs != ours:
                reason = f"this learner's {what} is {ours!r}, the receiver's is {theirs[:80]!r}"
                self._server.send(peer, Denied(reason))
                raise WireError(what, reason)
        if len(self._peers) >= MAX_PEERS and peer not in self._peers:
            self._server.send(peer, Denied(f"{MAX_PEERS} receivers have joined already"))
            raise WireError("peers", f"more than {MAX_PEERS} receivers")
        new = peer not in self._peers
        self._peers[peer] = _Peer(join.endpoint[:256], join.key[:40], time.monotonic())
        self._tree.join(name_of(peer), can_relay=join.endpoint.startswith("tcp://"))
        self._share_receivers()
        # A new one's parent hears first whom to let in.
        self._offer([*map(peer_of, {self._tree.parent(name_of(peer))} - {LEARNER} if new else ()), peer])

    def _complain(self, peer: bytes, complaint: Complain) -> None:
        parent = next((key for key, found in self._peers.items() if found.endpoint == complaint.parent), None)
        moved: list[str] = []
        # What is no longer offered is not worth a detour: the newest is, and the tree may well have that.
        if parent is not None and (complaint.silent or complaint.payload in self._current):
            moved = self._tree.complain(name_of(peer), name_of(parent), silent=complaint.silent)
            _log.info(
                "%s gets nothing from %s (silent: %s)", name_of(peer), name_of(parent), complaint.silent
            )
        self._offer_moved([name_of(peer), *moved])

    def _forget_silent(self, now: float) -> None:
        for peer, known in list(self._peers.items()):
            if now - known.heard_at > self._timing.gone_s:
                _log.warning(
                    "receiver %s of weights is silent: forgotten until it joins again", name_of(peer)
                )
                self._forget(peer)

    def _forget(self, peer: bytes) -> None:
        self._peers.pop(peer, None)
        self._server.forget(peer)
        moved = self._tree.leave(name_of(peer))
        self._share_receivers()
        self._offer_moved(moved)

    def _share_receivers(self) -> None:
        with self.changed:
            self._receivers = frozenset(self._peers)
            self.changed.notify_all()

    def _offer_moved(self, names: list[str]) -> None:
        """To receivers with new parents; first to those parents, who must let them in."""
        parents = {self._tree.parent(name) for name in names if name in self._tree} - {LEARNER}
        self._offer([peer_of(name) for name in dict.fromkeys([*sorted(parents), *names])])

    def _allowed(self, peer: bytes) -> list[str]:
        """Keys of a receiver's children; of others too, as it may become their parent."""
        children = [self._peers[peer_of(name)].key for name in self._tree.children(name_of(peer))]
        others = (known.key for known in itertools.islice(self._peers.values(), MAX_ALLOWED))
        return [key for key in dict.fromkeys([*children, *others]) if key][:MAX_ALLOWED]

    def _offer(self, peers: list[bytes]) -> None:
        for peer in peers:
            if peer not in self._peers:
                continue
            parent = self._tree.parent(name_of(peer))
            above = None if parent == LEARNER else self._peers[peer_of(parent)]
            offer = Offer(
                self._offered,
                "" if above is None else above.endpoint,
                "" if above is None else above.key,
                self._allowed(peer),
            )
            self._server.send(peer, offer)
