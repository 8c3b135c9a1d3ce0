"""One connecting DEALER socket, and the news of its connection."""

from __future__ import annotations

import zmq
from zmq.utils.monitor import parse_monitor_message

from headway.stream.security import ClientSecurity
from headway.stream.transport import SEND_UNBOUNDED, Context, Socket, open_socket, receive_frames
from headway.wire.codec import Limits


class Link:
    """Connects at once, and again whenever the connection is lost.

    To give a connection up, close the link and make another: the news of two connections of one socket overlap,
    and the loss of the old one would be taken for that of the new.

    Attributes:
        socket, monitor: to poll for input.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        identity: bytes,
        *,
        limits: Limits,
        security: ClientSecurity | None,
        heartbeat_s: float | None,
    ) -> None:
        """
        Args:
            identity: by which the other end knows this one, over reconnects.
            limits, heartbeat_s: as open_socket takes them.
        """
        self.socket: Socket = open_socket(
            context, zmq.DEALER, send_mark=SEND_UNBOUNDED, limits=limits, heartbeat_s=heartbeat_s
        )
        if security is not None:
            security.protect(self.socket)
        self.socket.routing_id = identity
        # Only a live connection takes messages: what is not sent stays with the sender, where it is counted.
        self.socket.immediate = True
        self.socket.reconnect_ivl = 50
        self.socket.reconnect_ivl_max = 1000
        self.monitor: Socket = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self.socket.connect(endpoint)

    def news(self) -> list[bool]:
        """What has happened since the last call, in order: True for a new connection, False for a lost one."""
        found: list[bool] = []
        while (report := receive_frames(self.monitor, 2)) is not None:
            found.append(parse_monitor_message(report)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)
        return found

    def close(self, linger_ms: int | None = None) -> None:
        """Close both sockets; what is not sent yet has `linger_ms`, or the socket's own time."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger_ms)
