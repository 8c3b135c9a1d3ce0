"""Where sockets bind: ipc paths that only we can reach, or loopback ports that the kernel picks.

Binding any other address is refused, unless the socket demands keys (headway.stream.security) or the caller
says by name that it goes without.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket as unix
import stat
import sys
import tempfile
from pathlib import Path

import msgspec
import zmq

from headway.config.address import is_loopback, split_tcp
from headway.errors import StreamError
from headway.stream.transport import Socket

# sun_path with its terminating NUL: 108 bytes on Linux, 104 on macOS and the BSDs.
MAX_IPC_PATH = 107 if sys.platform.startswith("linux") else 103
LOOPBACK = "tcp://127.0.0.1:0"


class Endpoints(msgspec.Struct, frozen=True):
    """Where a learner really listens, as generators connect to it; str() and `parse` are inverse."""

    data: str
    heartbeat: str

    def __str__(self) -> str:
        return f"{self.data},{self.heartbeat}"

    @classmethod
    def parse(cls, text: str) -> Endpoints:
        """From "DATA,HEARTBEAT", or from "tcp://HOST:PORT" when the heartbeat's port is the next one.

        Raises:
            StreamError: neither.
        """
        parts = [part.strip() for part in text.split(",")]
        alone = split_tcp(parts[0]) if len(parts) == 1 else None
        if alone is not None and alone[1]:
            parts.append(f"tcp://{alone[0]}:{alone[1] + 1}")
        if len(parts) != 2 or not all(part.startswith(("tcp://", "ipc://")) for part in parts):
            raise StreamError(
                f'got endpoints {text!r}; expected "DATA,HEARTBEAT", each tcp://... or ipc://..., or one tcp://HOST:PORT'
            )
        return cls(*parts)


def ipc_directory(run_id: str) -> Path:
    """A directory of this run and this user with mode 0700; created when missing.

    Raises:
        StreamError: it exists and others own it or can enter it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    path = Path(base) / f"headway-{os.getuid()}-{run_id}"
    path.mkdir(mode=0o700, exist_ok=True)
    _check_private(path)
    return path


def _check_private(path: Path) -> None:
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise StreamError(
            f"{path} must be a directory of user {os.getuid()} with mode 0700; it has owner {info.st_uid} "
            f"and mode {stat.S_IMODE(info.st_mode):04o}. Remove it, or choose another run id"
        )


def ipc_endpoint(directory: Path, name: str) -> str:
    """The endpoint of a socket file in a directory.

    Raises:
        StreamError: the path is too long for a Unix socket.
    """
    return f"ipc://{_ipc_path(f'ipc://{directory / name}')}"


def _ipc_path(endpoint: str) -> Path:
    path = endpoint.removeprefix("ipc://")
    size = len(os.fsencode(path))
    if not path.startswith("/"):
        raise StreamError(f"{endpoint}: expected an absolute path after ipc://")
    if size > MAX_IPC_PATH:
        raise StreamError(
            f"{endpoint}: its path has {size} bytes, and a Unix socket takes at most {MAX_IPC_PATH}; "
            "use a shorter run id or set TMPDIR to a shorter directory"
        )
    return Path(path)


def bind(socket: Socket, endpoint: str, *, insecure: bool = False) -> str:
    """Bind to an ipc path or a TCP address; port 0 lets the kernel choose.

    Args:
        endpoint: "ipc:///absolute/path" (its directory is created with mode 0700 when missing) or
            "tcp://HOST:PORT".
        insecure: allow an address that other machines can reach although the socket demands no keys.

    Returns:
        The endpoint that peers connect to, with the real port.

    Raises:
        StreamError: refused address, path too long, or in use by a live process.
    """
    if endpoint.startswith("ipc://"):
        _prepare_ipc(_ipc_path(endpoint))
    else:
        endpoint = _prepare_tcp(socket, endpoint, insecure)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise StreamError(f"cannot bind {endpoint}: {error}") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def _prepare_tcp(socket: Socket, endpoint: str, insecure: bool) -> str:
    address = split_tcp(endpoint)
    if address is None:
        raise StreamError(f"cannot bind {endpoint!r}: expected ipc:///path or tcp://HOST:PORT")
    host, port = address
    if not (insecure or is_loopback(host) or socket.get(zmq.CURVE_SERVER)):
        raise StreamError(
            f"refused to bind {endpoint}: other machines could reach it and nothing authenticates them. "
            "Bind 127.0.0.1, give keys (`headway keys new DIR`, stream.keys), or set stream.insecure on a "
            "network that you trust"
        )
    if host.startswith("["):
        socket.ipv6 = True
    # A fixed port must be free again right after its owner was killed; libzmq sets SO_REUSEADDR.
    return f"tcp://{'127.0.0.1' if host == 'localhost' else host}:{port or '*'}"


def check_connect(endpoint: str, *, secured: bool) -> None:
    """Refuse to send samples over a network in the clear, to whoever answers there.

    Raises:
        StreamError: another machine's address, and neither keys nor an insecure flag.
    """
    if not (secured or is_local(endpoint)):
        raise StreamError(
            f"refused to connect to {endpoint}, which is another machine, without keys: give the client's key file "
            "(--keys, made by `headway keys new` where the learner runs), or set stream.insecure on a network "
            "that you trust"
        )


def host_of(endpoint: str) -> str:
    """The host by which an endpoint is reached; loopback for ipc."""
    address = split_tcp(endpoint)
    return address[0] if address is not None else "127.0.0.1"


def is_local(endpoint: str) -> bool:
    """Whether only this machine can be at the other end: ipc, or loopback TCP."""
    address = split_tcp(endpoint)
    return endpoint.startswith("ipc://") or (address is not None and is_loopback(address[0]))


def _prepare_ipc(path: Path) -> None:
    """libzmq unlinks whatever lies at the path before it binds: look first whether somebody lives there."""
    if not path.parent.exists():
        path.parent.mkdir(mode=0o700)
    _check_private(path.parent)
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise StreamError(f"cannot bind ipc://{path}: the path exists and is not a socket")
    if listening(path):
        raise StreamError(f"cannot bind ipc://{path}: a live process listens there; use another run id")
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def listening(path: Path) -> bool:
    """Whether a process listens on this socket file. One that is stopped, with a full backlog, counts."""
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(os.fsencode(path)) not in (errno.ECONNREFUSED, errno.ENOENT)
