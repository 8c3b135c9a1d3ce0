"""The rules of [telemetry]."""

from __future__ import annotations

import ipaddress

from headway.config.rule import Rule
from headway.config.schema import RunConfig


def _host_is_an_address(config: RunConfig) -> str:
    host = config.telemetry.prometheus_host
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return f"expected an address of this machine such as 127.0.0.1 or ::1, got {host!r}"
    return ""


TELEMETRY_RULES = (Rule(("telemetry.prometheus_host",), _host_is_an_address),)
