"""CURVE on sockets that other machines can reach: encrypted, and only for clients on the list.

    server:  with ServerSecurity(folder).guard(context) as guard:
                 security.protect(socket); bind(socket, endpoint)
    client:  ClientSecurity(file).protect(socket); socket.connect(endpoint)

For every channel that binds: the trajectory stream and the weight channels use the same key files
(headway.stream.keys). A socket that is protected cannot be reached by a peer without keys, nor one that is not
on the list; a protected client talks to no server but its own. ipc and loopback sockets need none of this: the
system's own users are kept out by file modes, and the run id in the handshake keeps runs apart.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from pathlib import Path

import zmq
from zmq.utils import z85

from headway.errors import StreamError
from headway.stream.keys import ClientKeys, read_allowed, read_client_keys, read_server_keys
from headway.stream.transport import Context, Socket
from headway.stream.waker import Waker

_log = logging.getLogger(__name__)
_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = "headway"
_ALLOWED, _DENIED, _FAILED = b"200", b"400", b"500"
_MAX_NAMES = 64


class ServerSecurity:
    """What binding sockets need.

    Raises:
        StreamError: the folder has no server key or list, or others can read them.
    """

    def __init__(self, folder: Path) -> None:
        _check_library()
        self.folder = folder
        self._keys = read_server_keys(folder)
        read_allowed(folder)

    @property
    def public(self) -> str:
        """The public key that clients must know."""
        return self._keys.public

    def protect(self, socket: Socket) -> None:
        """Before the bind. Without a guard in the same context nobody gets in."""
        socket.curve_server = True
        socket.curve_secretkey = self._keys.secret.encode()
        socket.curve_publickey = self._keys.public.encode()
        socket.zap_domain = _DOMAIN.encode()
        # A missing guard must shut the door, not leave it open to everybody who knows the server's public key.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def guard(self, context: Context) -> Guard:
        """Start answering for the sockets of a context; before the first bind, closed before its term()."""
        return Guard(context, self.folder)


class ClientSecurity:
    """What connecting sockets need.

    Raises:
        StreamError: the file holds no keys, or others can read it.
    """

    def __init__(self, file: Path) -> None:
        _check_library()
        self.file = file
        self._keys: ClientKeys = read_client_keys(file)

    @property
    def name(self) -> str:
        """Of the client, as its server's list has it."""
        return self._keys.name

    @property
    def public(self) -> str:
        """The client's own public key: what others need to connect to a socket that it lends."""
        return self._keys.public

    def protect(self, socket: Socket, server: str = "") -> None:
        """Before the connect.

        Args:
            server: public key of another client that relays; empty: the server that the keys are for.
        """
        socket.curve_serverkey = (server or self._keys.server).encode()
        socket.curve_secretkey = self._keys.secret.encode()
        socket.curve_publickey = self._keys.public.encode()

    def lend(self, socket: Socket) -> None:
        """Before the bind of a socket on which this client serves others; who may come is up to its context's ZAP."""
        socket.curve_server = True
        socket.curve_secretkey = self._keys.secret.encode()
        socket.curve_publickey = self._keys.public.encode()
        socket.zap_domain = _DOMAIN.encode()
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


class Guard:
    """The thread that says who may connect (ZeroMQ's authentication protocol, ZAP 1.0).

    It reads the list when it changes; one that cannot be read lets nobody in.

    Attributes:
        admitted: connections by client name; refused: by reason ("key", "mechanism", "domain", "list", "request").
    """

    def __init__(self, context: Context, folder: Path) -> None:
        self.admitted: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._folder = folder
        self._stamp: tuple[int, int] | None = None
        self._clients: dict[str, str] = {}
        self._waker = Waker()
        self._closed = False
        self._socket: Socket = context.socket(zmq.REP)
        self._socket.linger = 0
        try:
            self._socket.bind(_ZAP)
        except zmq.ZMQError as error:
            self._socket.close()
            self._waker.close()
            raise StreamError(f"this context is guarded already: {error}") from error
        # The thread owns the socket from its start on: a thread's start is a full barrier.
        self._thread = threading.Thread(target=self._run, name="headway-guard", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker.fd, zmq.POLLIN)
        try:
            while not self._closed:
                if (self._socket, zmq.POLLIN) in poller.poll():
                    request = self._socket.recv_multipart()
                    self._socket.send_multipart(self._answer(request))
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, request_id, domain, address, _, mechanism = (*request, *[b""] * 6)[:6]
        code, text, user = _DENIED, "no access", ""
        if version != b"1.0" or len(request) < 6:
            code, text, reason = _FAILED, "bad request", "request"
        elif domain != _DOMAIN.encode():
            reason = "domain"
        elif mechanism != b"CURVE" or len(request) != 7 or len(request[6]) != 32:
            reason = "mechanism"
        else:
            user, reason = self._client(z85.encode(request[6]).decode())
            code, text = (_ALLOWED, "OK") if user else (_DENIED, "no access")
        if code == _ALLOWED:
            self._count(self.admitted, user)
        else:
            self._count(self.refused, reason)
            if self.refused[reason] == 1:
                _log.warning(
                    "refused a connection from %s: %s (more are only counted)", _shown(address), reason
                )
        return [b"1.0", request_id, code, text.encode(), user.encode(), b""]

    def _client(self, key: str) -> tuple[str, str]:
        try:
            info = (self._folder / "allowed").stat()
            stamp = (info.st_mtime_ns, info.st_size)
            if stamp != self._stamp:
                self._clients = read_allowed(self._folder)
                self._stamp = stamp
        except (OSError, StreamError) as error:
            if self._stamp is not None or not self.refused["list"]:
                _log.error("nobody can connect: %s", error)
            self._stamp, self._clients = None, {}
            return "", "list"
        return self._clients.get(key, ""), "key"

    def _count(self, counter: Counter[str], name: str) -> None:
        counter[name if name in counter or len(counter) < _MAX_NAMES else "others"] += 1

    def close(self) -> None:
        """End the thread and its socket. Idempotent."""
        self._closed = True
        self._waker.wake()
        self._thread.join(5.0)
        self._waker.close()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _shown(address: bytes) -> str:
    return ascii(address[:64].decode("latin-1"))[1:-1]


def _check_library() -> None:
    if not zmq.has("curve"):
        raise StreamError("this build of libzmq has no CURVE; install a pyzmq wheel that has it")
