"""Weight channels without a recipe: for a trainer that is not headway's, and for an inference engine that is not.

    trainer     publisher = publish_through("tcp", manifest, "my-run", bind="tcp://10.0.0.1:7000", keys="keys")
                publisher.publish(flat, PolicyVersion(0, step))
    engine      receiver = receive_from(publisher.address, manifest, "my-run", keys="generator.key")

The channels are those of headway.weights.open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headway.config import GeneratorConfig, PushConfig, StreamConfig
from headway.errors import ConfigError, UnsupportedOption
from headway.stream.security import ClientSecurity
from headway.types import Manifest
from headway.weights.channel import ChannelReceiver
from headway.weights.open import open_publisher, open_receiver
from headway.weights.publisher import WeightPublisher

READ_BY = {
    "readers": ("shm",),
    "bind": ("tcp", "collective"),
    "keys": ("tcp",),
    "insecure": ("tcp", "collective"),
    "store": ("store",),
    "compression": ("tcp", "store", "collective"),
}
"""Which channels read an argument; given to another one it is refused."""
CHANNELS = ("shm", "tcp", "store", "collective")


@dataclass(frozen=True)
class _Settings:
    """The sections of a recipe that opening a channel reads."""

    push: PushConfig
    stream: StreamConfig
    generator: GeneratorConfig


def publish_through(
    channel: str,
    manifest: Manifest,
    run_id: str,
    *,
    readers: int = 1,
    bind: str = "",
    keys: str = "",
    insecure: bool = False,
    store: str = "",
    anchor: int = 8,
    compression: str = "none",
) -> WeightPublisher:
    """A publisher for a trainer of one's own.

    Args:
        channel: "shm" (this host), "tcp", "store" or "collective"; docs/channels.md.
        manifest: of the weights (headway.model.load_policy gives it).
        run_id: receivers must name it; short, unique among the runs that they can reach.
        readers: that will read at once (shm). bind: tcp://HOST:PORT; empty: loopback, a free port (tcp, collective).
        keys: folder made by `headway keys new`; needed by other addresses than loopback, unless `insecure` (tcp).
        store: directory or fsspec URL (store). anchor, compression: as push.anchor and push.compression.

    Raises:
        ConfigError, UnsupportedOption: an argument that this channel cannot follow, by name.
        WeightError, StreamError: the channel cannot be opened.
    """
    if channel not in CHANNELS:
        raise UnsupportedOption(f"channel = {channel!r}: allowed: {', '.join(CHANNELS)}")
    given = {"readers": readers - 1, "bind": bind, "keys": keys, "insecure": insecure, "store": store}
    _check_read(channel, {**given, "compression": compression.removeprefix("none")})
    push = {
        "channel": channel,
        "dtype": manifest.dtype,
        "store": store,
        "anchor": anchor,
        "compression": compression,
    }
    if channel == "tcp":
        push["bind"] = bind
    stream = {"keys": keys, "insecure": insecure, "bind": bind}
    return open_publisher(_settings(push, stream, readers), manifest, run_id)


def receive_from(
    address: str,
    manifest: Manifest,
    run_id: str,
    *,
    learner_host: str = "127.0.0.1",
    keys: str = "",
    insecure: bool = False,
    store: str = "",
) -> ChannelReceiver:
    """A receiver for an engine of one's own; used by one thread, the one that opens it.

    Args:
        address: as the publisher's; manifest, run_id: must equal the trainer's.
        learner_host: by which it is reached here, for an address that is bound to every interface.
        keys: a client's file of `headway keys new` (tcp). store: where the store is mounted here (store).

    Raises:
        ConfigError, UnsupportedOption: an argument that this channel cannot follow, by name.
        WeightError, StreamError, DeadlineExceeded: as headway.weights.open_receiver.
    """
    channel = address.partition(":")[0]
    if channel not in CHANNELS:
        raise UnsupportedOption(
            f"address = {address!r}: begins with one of {', '.join(CHANNELS)} and a colon"
        )
    _check_read(channel, {"keys": keys, "insecure": insecure, "store": store})
    settings = _settings({"store": store, "apply": "copy"}, {"insecure": insecure}, 1)
    security = ClientSecurity(Path(keys)) if keys else None
    return open_receiver(address, settings, manifest, run_id, security=security, learner_host=learner_host)


def _check_read(channel: str, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if value and channel not in READ_BY[name]:
            raise UnsupportedOption(
                f"{name}: given, but channel {channel!r} does not read it; {' and '.join(READ_BY[name])} would"
            )
    if channel == "store" and not given["store"]:
        raise UnsupportedOption(
            "store: empty; the channel 'store' needs the directory or URL that both sides reach"
        )


def _settings(push: dict[str, Any], stream: dict[str, Any], readers: int) -> _Settings:
    try:
        return _Settings(
            PushConfig.model_validate(push),
            StreamConfig.model_validate(stream),
            GeneratorConfig(replicas=readers),
        )
    except ValidationError as error:
        faults = [(".".join(map(str, each["loc"])), str(each["msg"])) for each in error.errors()]
        raise ConfigError(faults) from None
