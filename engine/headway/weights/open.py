"""Which channel a run pushes through, and how both ends of it are opened: the one place that knows them all.

    learner     open_sender(config, manifest, run_id)             its address goes into every Welcome
    generator   open_receiver(address, config, manifest, run_id)  opens what it was told

An address begins with its channel's name and a colon, so a generator opens what its learner chose. A channel's module
is imported only when it is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headway.config import GeneratorConfig, PushConfig, StreamConfig
from headway.config.address import is_loopback, split_tcp
from headway.errors import UnsupportedOption, WeightError
from headway.stream.security import ClientSecurity, ServerSecurity
from headway.types import Manifest
from headway.weights.blobs import Blobs, open_blobs
from headway.weights.channel import ChannelReceiver, ChannelSender
from headway.weights.publisher import WeightPublisher
from headway.weights.segment import segment_name
from headway.weights.served import Served
from headway.weights.shm import SCHEME as SHM
from headway.weights.shm import ShmReceiver, ShmSender
from headway.weights.stager import Stager


class ChannelConfig(Protocol):
    """What a channel is opened by: a recipe, or the sections of one (headway.weights.own)."""

    @property
    def push(self) -> PushConfig:
        """Which channel, and how."""
        ...

    @property
    def stream(self) -> StreamConfig:
        """Addresses, keys."""
        ...

    @property
    def generator(self) -> GeneratorConfig:
        """How many read."""
        ...


@dataclass(frozen=True)
class ChannelChoice:
    """The channel of a run, and why, for people."""

    name: str
    why: str


def choose_channel(config: ChannelConfig) -> ChannelChoice:
    """What push.channel comes to."""
    if config.push.channel != "auto":
        return ChannelChoice(config.push.channel, "as the recipe says")
    address = split_tcp(config.stream.bind)
    if config.stream.transport == "ipc" or address is None or is_loopback(address[0]):
        return ChannelChoice("shm", "every process is on this host")
    return ChannelChoice(
        "tcp", f"stream.bind = {config.stream.bind!r} lets generators on other machines join"
    )


def swaps(config: ChannelConfig) -> bool:
    """Whether generators serve from the channel's own memory.

    Only fp32 weights are served as they are published, and only shm has memory that both sides map.
    """
    possible = choose_channel(config).name == "shm" and config.push.dtype == "float32"
    if config.push.apply == "swap" and not possible:
        raise UnsupportedOption(
            f"push.apply = 'swap' needs push.channel = 'shm' and push.dtype = 'float32'; this run has "
            f"{choose_channel(config).name!r} and {config.push.dtype!r}: set 'auto' or 'copy'"
        )
    return possible and config.push.apply in ("auto", "swap")


def open_sender(config: ChannelConfig, manifest: Manifest, run_id: str) -> ChannelSender:
    """The learner's end.

    Raises:
        WeightError, StreamError: it cannot be opened. UnsupportedOption: not with this recipe.
    """
    name = choose_channel(config).name
    if name == "shm":
        num_buffers = 3 if config.generator.replicas == 1 else 4
        return ShmSender(segment_name(run_id, os.getpid()), manifest, num_buffers=num_buffers)
    if name == "tcp":
        from headway.weights.tcp import TcpSender

        return TcpSender(
            run_id,
            manifest.digest,
            endpoint=_tcp_endpoint(config),
            chunk_bytes=config.push.chunk_kib << 10,
            chunks_in_flight=config.push.chunks_in_flight,
            fan_out=config.push.fan_out,
            security=ServerSecurity(Path(config.stream.keys)) if config.stream.keys else None,
            insecure=config.stream.insecure,
        )
    if name == "store":
        from headway.weights.store import StoreSender

        blobs = _store_blobs(config, run_id)
        return StoreSender(blobs, run_id, manifest.digest, keep=config.push.store_keep)
    if name == "collective":
        from headway.weights.collective import CollectiveSender

        return CollectiveSender(
            run_id,
            manifest.digest,
            host=_bound_host(config),
            backend=config.push.backend,
            insecure=config.stream.insecure,
        )
    raise UnsupportedOption(f"push.channel = {name!r}: there are auto, shm, tcp, store and collective")


def open_publisher(config: ChannelConfig, manifest: Manifest, run_id: str) -> WeightPublisher:
    """The learner's core over its channel. Raises as open_sender does."""
    mapped = choose_channel(config).name == "shm"
    return WeightPublisher(
        open_sender(config, manifest, run_id),
        manifest,
        anchor=config.push.anchor,
        compression="none" if mapped else config.push.compression,
        merged=0 if mapped else 1,
    )


def open_receiver(
    address: str,
    config: ChannelConfig,
    manifest: Manifest,
    run_id: str,
    *,
    security: ClientSecurity | None = None,
    learner_host: str = "127.0.0.1",
) -> ChannelReceiver:
    """A generator's end.

    Args:
        address: as the learner's Welcome says.
        security: this generator's keys, of a run that has them.
        learner_host: by which this generator reaches the learner, for an address that is bound to all of them.

    Raises:
        WeightError: no such channel, or it is another model's. StreamError, DeadlineExceeded: nobody answers.
    """
    if address.startswith(SHM):
        return ShmReceiver(address.removeprefix(SHM), manifest, whole_only=swaps(config))
    if address.startswith("tcp:"):
        from headway.weights.tcp_receiver import TcpReceiver

        return TcpReceiver(
            address,
            run_id,
            manifest.digest,
            learner_host=learner_host,
            security=security,
            insecure=config.stream.insecure,
        )
    if address.startswith("store:"):
        from headway.weights.store_receiver import StoreReceiver

        # By this side's own recipe: a store may be mounted elsewhere here.
        return StoreReceiver(_store_blobs(config, run_id), run_id, manifest.digest)
    if address.startswith("collective:"):
        from headway.weights.collective_receiver import CollectiveReceiver

        return CollectiveReceiver(address, run_id, manifest.digest, learner_host=learner_host)
    raise WeightError(
        f"weight channel {address!r}: this version opens shm:, tcp:, store: and collective: addresses"
    )


def open_stager(
    address: str,
    config: ChannelConfig,
    served: Served,
    manifest: Manifest,
    run_id: str,
    wake: Callable[[], None],
    *,
    security: ClientSecurity | None = None,
    learner_host: str = "127.0.0.1",
) -> Stager:
    """A generator's core over its channel.

    Args:
        wake: called when something is staged or proved, on the stager's thread. The others as in open_receiver,
            which also says what is raised.
    """
    receiver = open_receiver(address, config, manifest, run_id, security=security, learner_host=learner_host)
    return Stager(receiver, served, manifest, swap=swaps(config), wake=wake)


def _tcp_endpoint(config: ChannelConfig) -> str:
    """push.bind; else a free port of the host that the stream binds."""
    if config.push.bind:
        return config.push.bind
    return f"tcp://{_bound_host(config)}:0"


def _bound_host(config: ChannelConfig) -> str:
    address = split_tcp(config.stream.bind)
    return address[0] if address else "127.0.0.1"


def _store_blobs(config: ChannelConfig, run_id: str) -> Blobs:
    return open_blobs(f"{config.push.store.rstrip('/')}/{run_id}")
