"""Where a learner listens, as its recipe says."""

from __future__ import annotations

from pathlib import Path

from headway.config import RunConfig
from headway.config.address import split_tcp
from headway.stream import LearnerSocket, ServerSecurity, ipc_directory, ipc_endpoint
from headway.stream.endpoint import LOOPBACK


def open_stream(config: RunConfig, run_id: str) -> LearnerSocket:
    """Bind both sockets of the stream; to be called on the thread that will own them.

    Raises:
        StreamError: an address is taken or refused, or the keys cannot be used.
    """
    stream = config.stream
    if stream.transport == "ipc":
        directory = ipc_directory(run_id)
        data, heartbeat = ipc_endpoint(directory, "data"), ipc_endpoint(directory, "beat")
    else:
        data, heartbeat = tcp_endpoints(stream.bind)
    return LearnerSocket(
        data,
        heartbeat,
        security=ServerSecurity(Path(stream.keys)) if stream.keys else None,
        insecure=stream.insecure,
        heartbeat_s=stream.heartbeat_s,
    )


def tcp_endpoints(bind: str) -> tuple[str, str]:
    """The data and the heartbeat endpoint of stream.bind: the same host, and the next port unless it is 0."""
    address = split_tcp(bind)
    if address is None:
        return LOOPBACK, LOOPBACK
    host, port = address
    return f"tcp://{host}:{port}", f"tcp://{host}:{port + 1 if port else 0}"
