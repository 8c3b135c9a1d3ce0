"""`headway watch`: the page of a run, served to this machine while the run goes on.

Requests are answered one at a time, on the thread that calls `serve`; each reads only what the run has written
since the one before.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from headway.errors import ConfigError
from headway.report.document import document
from headway.report.page import as_json, page
from headway.report.rows import RunReader

_PATHS = {"/": "text/html; charset=utf-8", "/data.json": "application/json"}


class Watch:
    """A server for one run, on a loopback address; bound when this returns."""

    def __init__(self, run: Path, host: str = "127.0.0.1", port: int = 0, every_ms: int = 2000) -> None:
        """
        Args:
            run: folder of the run. host: an address of the loopback interface. port: 0: a free one.
            every_ms: how often the page asks for what is new.

        Raises:
            ConfigError: not a run's folder, not a loopback address, or the port is taken.
            UnsupportedOption: Plotly is not installed.
        """
        address = _loopback(host)
        self._reader = RunReader(run)
        self._every_ms = every_ms
        page(document(self._reader.read()), every_ms)  # what is missing shows now, not in the browser
        try:
            self._server = _server(address, port, self._content)
        except OSError as error:
            raise ConfigError([("--port", f"{host}:{port} cannot be served on: {error}")]) from None

    @property
    def url(self) -> str:
        """Where the page is."""
        host, port = self._server.server_address[:2]
        return f"http://[{host!s}]:{port}/" if ":" in str(host) else f"http://{host!s}:{port}/"

    def serve(self) -> None:
        """Answers until `stop` is called, from another thread, or the thread is interrupted."""
        self._server.serve_forever(poll_interval=0.1)

    def stop(self) -> None:
        """Ends `serve`; waits for it."""
        self._server.shutdown()

    def close(self) -> None:
        """Gives the port back."""
        self._server.server_close()

    def _content(self, path: str) -> str:
        shown = document(self._reader.read())
        return page(shown, self._every_ms) if path == "/" else as_json(shown)


def _loopback(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    text = "127.0.0.1" if host == "localhost" else host
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise ConfigError(
            [("--host", f"{host!r} is not an address; expected one such as 127.0.0.1")]
        ) from None
    if not address.is_loopback:
        fault = (
            f"{host} is not a loopback address: the page has no password, so it is served to this machine only; "
            "forward the port (ssh -L) to see it from another"
        )
        raise ConfigError([("--host", fault)])
    return address


def _server(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int, content: Callable[[str], str]
) -> HTTPServer:
    class Server(HTTPServer):
        address_family = socket.AF_INET6 if address.version == 6 else socket.AF_INET

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0  # a client that says nothing must not keep the others waiting

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if not _ours(self.headers.get("Host", "")):
                self.send_error(403, "only for this machine")
            elif path not in _PATHS:
                self.send_error(404)
            else:
                self._answer(content(path).encode(), _PATHS[path])

        def _answer(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            for name, value in (
                ("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store"),
                ("X-Content-Type-Options", "nosniff"), ("Cross-Origin-Resource-Policy", "same-origin"),
            ):  # fmt: skip
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass  # a line every two seconds says nothing

    return Server((str(address), port), Handler)


def _ours(host: str) -> bool:
    """Whether a Host header names this machine: a foreign name that resolves to it is another site's trick."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    name = name.strip("[]")
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
