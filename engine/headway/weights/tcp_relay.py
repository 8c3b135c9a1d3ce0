"""The socket on which a receiver relays: Wants of other receivers in, chunks out.

With CURVE, those get in whose keys the learner has named; the learner let them in itself before it did so.
Owned by the receiver's node, whose thread calls it; nothing in it waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import zmq
from zmq.utils import z85

from headway.errors import WireError
from headway.stream.endpoint import bind
from headway.stream.security import ClientSecurity
from headway.stream.transport import Context, Socket, receive_frames
from headway.weights.serving import ChunkServer, Finder
from headway.weights.tcp_link import configure
from headway.weights.tcp_wire import MAX_HEAD_BYTES, Want, decode

_ZAP = "inproc://zeromq.zap.01"
_MAX_MESSAGES = 64


class RelaySocket:
    """A bound ROUTER.

    Args:
        host: to bind on, any free port; find: what is served; security: whose pair the socket has.

    Attributes:
        endpoint, key: what others connect with. rejected: messages that were none, by reason.

    Raises:
        StreamError: the host may not be bound without keys, or cannot be.
    """

    def __init__(
        self, context: Context, host: str, find: Finder, *, security: ClientSecurity | None, insecure: bool
    ) -> None:
        self.rejected: Counter[str] = Counter()
        self.key = "" if security is None else security.public
        self._allowed: frozenset[str] = frozenset()
        self._door: Socket | None = None
        if security is not None:
            self._door = context.socket(zmq.REP)
            self._door.linger = 0
            self._door.bind(_ZAP)
        self._socket: Socket = context.socket(zmq.ROUTER)
        configure(self._socket, f"tcp://{host}:0", MAX_HEAD_BYTES, 1000)
        self._socket.router_mandatory = True
        self._socket.router_handover = True
        if security is not None:
            security.lend(self._socket)
        self.endpoint = bind(self._socket, f"tcp://{host}:0", insecure=insecure)
        self.server = ChunkServer(self._socket, find)

    @property
    def sockets(self) -> list[Socket]:
        """To be polled."""
        return [self._socket] if self._door is None else [self._socket, self._door]

    def allow(self, keys: Iterable[str]) -> None:
        """Let the owners of these keys in, from their next connection on."""
        self._allowed = frozenset(keys)

    def turn(self) -> None:
        """Handle input, and answer what has become answerable."""
        self._answer_door()
        for _ in range(_MAX_MESSAGES):
            try:
                frames = receive_frames(self._socket, 3)
                if frames is None:
                    break
                message, _ = decode(frames[1:])
                if not isinstance(message, Want):
                    raise WireError("direction", f"{type(message).__name__} is not for a relay")
                self.server.want(frames[0], message)
            except WireError as fault:
                self.rejected[fault.reason] += 1
        self.server.advance()

    def _answer_door(self) -> None:
        """ZAP 1.0: version, request id, domain, address, identity, mechanism, credentials."""
        if self._door is None:
            return
        while (frames := receive_frames(self._door, 16)) is not None:
            credentials = frames[6] if len(frames) == 7 and frames[5] == b"CURVE" else b""
            known = len(credentials) == 32 and z85.encode(credentials).decode() in self._allowed
            if not known:
                self.rejected["key"] += 1
            code, text = (b"200", b"OK") if known else (b"400", b"no access")
            self._door.send_multipart([b"1.0", frames[1] if len(frames) > 1 else b"", code, text, b"", b""])
