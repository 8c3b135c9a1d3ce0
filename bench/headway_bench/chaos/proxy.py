"""A TCP proxy whose connections can be slow, silent, or cut. One thread per direction; nothing is parsed."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

_CHUNK = 1 << 16


class Proxy:
    """Stands between connecting peers and the addresses that they ask for.

    Peers ask at `control` with one line, "HOST:PORT", and get the port to connect to instead.

    Attributes:
        control: port of the control socket, on 127.0.0.1.
        delay_s: that every chunk waits; silent: nothing passes, connections stay open.
    """

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.silent = False
        self._lock = threading.Lock()
        self._ports: dict[str, int] = {}
        self._open: set[socket.socket] = set()
        self._listeners: list[socket.socket] = []
        self._closed = False
        self.control = self._listen(self._answer)

    def cut(self) -> int:
        """Close every connection that passes through now; returns how many sockets that were."""
        with self._lock:
            sockets, self._open = self._open, set()
        for each in sockets:
            _close(each)
        return len(sockets)

    def close(self) -> None:
        """Cut everything and listen no more."""
        self._closed = True
        for listener in self._listeners:
            _close(listener)
        self.cut()

    def _listen(self, serve: object) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        self._listeners.append(listener)
        port: int = listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(listener, serve), daemon=True).start()
        return port

    def _accept(self, listener: socket.socket, serve: object) -> None:
        assert callable(serve)
        while not self._closed:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError, ValueError):
            target = peer.makefile().readline().strip()
            with self._lock:
                known = self._ports.get(target)
            port = known or self._listen(lambda from_peer: self._join(from_peer, target))
            with self._lock:
                self._ports[target] = port
            peer.sendall(f"{port}\n".encode())

    def _join(self, peer: socket.socket, target: str) -> None:
        host, _, port = target.rpartition(":")
        try:
            onward = socket.create_connection((host, int(port)), timeout=5.0)
        except OSError:
            _close(peer)
            return
        onward.settimeout(None)
        with self._lock:
            self._open |= {peer, onward}
        for source, sink in ((peer, onward), (onward, peer)):
            threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(_CHUNK):
                if self.delay_s:
                    time.sleep(self.delay_s)
                while self.silent and not self._closed:
                    time.sleep(0.02)
                sink.sendall(chunk)
        for each in (source, sink):
            _close(each)
            with self._lock:
                self._open.discard(each)


def ask(control: int, target: str) -> int:
    """The port that stands for `target`, "HOST:PORT", at a proxy's control port."""
    with socket.create_connection(("127.0.0.1", control), timeout=10.0) as connection:
        connection.sendall(f"{target}\n".encode())
        return int(connection.makefile().readline())


def _close(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
