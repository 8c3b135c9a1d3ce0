"""Channels that a program opens by itself, without a recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.errors import ConfigError, UnsupportedOption
from headway.stream.keys import new_keys
from headway.types import Manifest, PolicyVersion, TensorSpec
from headway.weights import FlatServed, Stager, publish_through, receive_from

NUM_ELEMENTS = 70_000
MANIFEST = Manifest(
    "float32", [TensorSpec("a", [], [NUM_ELEMENTS], 0, NUM_ELEMENTS, True)], NUM_ELEMENTS, 0, {}
)
Keep = Callable[[Any], Any]


class Engine:
    """The least engine there is."""

    def __init__(self) -> None:
        self.flat = torch.zeros(NUM_ELEMENTS)

    def apply(self, copy: Callable[[torch.Tensor], PolicyVersion]) -> None:
        copy(self.flat)

    def swap(self, flat: torch.Tensor, version: PolicyVersion) -> None:
        raise AssertionError("receive_from serves no engine from the channel's memory")


def pushed(publisher: Any, closing: Keep, **here: Any) -> None:
    """A push arrives bit for bit, proved."""
    flat = torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(3))
    published = publisher.publish(flat, PolicyVersion(0, 7))
    engine = Engine()
    receiver = closing(receive_from(publisher.address, MANIFEST, "run", **here))
    stager = Stager(receiver, FlatServed(engine, MANIFEST), MANIFEST)
    while stager.staged() is None:
        stager.turn()
        assert not stager.last_failure
    assert stager.commit() == PolicyVersion(0, 7)
    stager.turn()
    assert [proof.digest for proof in stager.proofs()] == [published.digest]
    assert torch.equal(engine.flat, flat)


@pytest.mark.parametrize("channel", ["shm", "tcp", "store"])
def test_a_push_through_a_channel_of_ones_own(channel: str, tmp_path: Path, closing: Keep) -> None:
    store = {"store": str(tmp_path)} if channel == "store" else {}
    pushed(closing(publish_through(channel, MANIFEST, "run", **store)), closing, **store)


def test_keys_let_their_holder_in_and_nobody_else(tmp_path: Path, closing: Keep) -> None:
    new_keys(tmp_path / "keys")
    publisher = closing(publish_through("tcp", MANIFEST, "run", keys=str(tmp_path / "keys")))
    pushed(publisher, closing, keys=str(tmp_path / "keys" / "generator.key"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"channel": "auto"}, "channel = 'auto': allowed: shm, tcp, store, collective"),
        ({"channel": "shm", "bind": "tcp://127.0.0.1:0"}, "bind: given, but channel 'shm' does not read it"),
        ({"channel": "tcp", "readers": 2}, "readers: given, but channel 'tcp' does not read it; shm would"),
        ({"channel": "shm", "compression": "zstd"}, "compression: given"),
        ({"channel": "collective", "keys": "keys"}, "keys: given"),
        ({"channel": "store"}, "store: empty"),
    ],
)
def test_arguments_that_the_channel_cannot_follow_are_refused(arguments: dict[str, Any], says: str) -> None:
    channel = arguments.pop("channel")
    with pytest.raises(UnsupportedOption, match=says):
        publish_through(channel, MANIFEST, "run", **arguments)


def test_values_that_are_wrong_are_refused_as_in_a_recipe() -> None:
    with pytest.raises(ConfigError, match="anchor"):
        publish_through("tcp", MANIFEST, "run", anchor=0)
    with pytest.raises(UnsupportedOption, match="begins with one of shm, tcp, store, collective"):
        receive_from("pigeon:7", MANIFEST, "run")
