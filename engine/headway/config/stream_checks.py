"""The rules of [stream]: where the learner listens, and who may come."""

from __future__ import annotations

from headway.config.address import is_loopback, split_tcp
from headway.config.rule import Rule
from headway.config.schema import RunConfig


def _bind_is_an_address(config: RunConfig) -> str:
    bind = config.stream.bind
    if not bind:
        return ""
    if config.stream.transport != "tcp":
        return f"{bind!r} is for transport = 'tcp', this is {config.stream.transport!r}; nearest: transport = 'tcp'"
    address = split_tcp(bind)
    if address is None:
        return f"expected tcp://HOST:PORT, got {bind!r}"
    if address[1] == (1 << 16) - 1:
        return "the heartbeats take the next port, and there is none after 65535; nearest: 65534"
    return ""


def _reachable_only_with_keys(config: RunConfig) -> str:
    stream = config.stream
    address = split_tcp(stream.bind)
    if address is None or is_loopback(address[0]) or stream.keys or stream.insecure:
        return ""
    return (
        f"{stream.bind!r} can be reached from other machines: set stream.keys to a folder made by "
        "`headway keys new`, or stream.insecure = true on a network that you trust; nearest: tcp://127.0.0.1:0"
    )


def _keys_need_tcp(config: RunConfig) -> str:
    if not config.stream.keys or config.stream.transport == "tcp":
        return ""
    return (
        "keys are for transport = 'tcp'; ipc is kept to this user by file modes; nearest: transport = 'tcp'"
    )


def _not_both(config: RunConfig) -> str:
    if not (config.stream.keys and config.stream.insecure):
        return ""
    return "true contradicts stream.keys, which lets nobody in without one; take one of the two out"


STREAM_RULES = (
    Rule(("stream.bind", "stream.transport"), _bind_is_an_address),
    Rule(("stream.bind", "stream.keys", "stream.insecure"), _reachable_only_with_keys),
    Rule(("stream.keys", "stream.transport"), _keys_need_tcp),
    Rule(("stream.insecure", "stream.keys"), _not_both),
)
