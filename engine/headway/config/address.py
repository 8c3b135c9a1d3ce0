"""Network addresses as recipes and sockets write them: tcp://HOST:PORT."""

from __future__ import annotations

import ipaddress
import re

_TCP = re.compile(r"tcp://(?P<host>\[[^\]]+\]|[^:\[\]/]+):(?P<port>\d{1,5}|\*)")


def split_tcp(endpoint: str) -> tuple[str, int] | None:
    """Host (an IPv6 one in brackets) and port of a TCP endpoint, "*" as 0; None when it is none."""
    match = _TCP.fullmatch(endpoint)
    if match is None:
        return None
    port = 0 if match["port"] == "*" else int(match["port"])
    return (match["host"], port) if port < 1 << 16 else None


def is_loopback(host: str) -> bool:
    """Whether a host can only mean this machine; a name other than localhost is not ours to resolve."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
