"""From a recipe to both ends of a channel: every key has its effect, and one lost version is no end of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.config import RunConfig
from headway.config.loading import validate
from headway.errors import ConfigError, DeadlineExceeded, WeightError
from headway.stream.keys import new_keys
from headway.stream.security import ClientSecurity
from headway.types import Manifest, PolicyVersion, TensorSpec
from headway.weights import Publication, WeightPublisher, open_receiver, open_sender, state_digest
from headway.weights.publisher import MAX_LOST
from headway.weights.tcp_receiver import TcpReceiver

NUM_ELEMENTS = 70_000
MANIFEST = Manifest(
    "float32", [TensorSpec("a", [], [NUM_ELEMENTS], 0, NUM_ELEMENTS, True)], NUM_ELEMENTS, 0, {}
)
Keep = Callable[[Any], Any]


def recipe(**sections: dict[str, Any]) -> RunConfig:
    return validate({"model": {"path": "builtin:sort"}, "env": {"name": "sort"}, **sections})


def settings(channel: str, place: Path) -> dict[str, Any]:
    return {"channel": channel, **({"store": str(place)} if channel == "store" else {})}


@pytest.mark.parametrize("channel", ["tcp", "store", "collective"])
def test_a_recipes_channel_carries_a_publishers_state_to_a_receiver(
    channel: str, tmp_path: Path, closing: Keep, read_state: Callable[..., str]
) -> None:
    config = recipe(push=settings(channel, tmp_path))
    sender = open_sender(config, MANIFEST, "run")
    assert sender.address.startswith(f"{channel}:")
    publisher = closing(WeightPublisher(sender, MANIFEST))
    flat = torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(3))
    published = publisher.publish(flat, PolicyVersion(0, 0))
    receiver = closing(open_receiver(sender.address, config, MANIFEST, "run"))
    assert read_state(receiver) == published.digest == state_digest(flat)


@pytest.fixture
def read_state() -> Callable[..., str]:
    """The digest of the whole state that a receiver fetches."""

    def fetch(receiver: Any) -> str:
        header = receiver.newest(None, "")
        while header is None:
            receiver.wait(1.0)
            header = receiver.newest(None, "")
        state = torch.zeros(NUM_ELEMENTS)
        receiver.fetch(header, memoryview(state.numpy()).cast("B"), 20.0)
        return state_digest(state)

    return fetch


def test_keys_of_the_stream_protect_the_weights_too(
    tmp_path: Path, closing: Keep, read_state: Callable[..., str]
) -> None:
    folder = tmp_path / "keys"
    new_keys(folder)
    config = recipe(push={"channel": "tcp"}, stream={"transport": "tcp", "keys": str(folder)})
    sender = closing(open_sender(config, MANIFEST, "run"))
    with pytest.raises(DeadlineExceeded, match="no answer from the weight channel"):
        TcpReceiver(sender.address, "run", MANIFEST.digest, join_s=0.3)
    security = ClientSecurity(folder / "generator.key")
    receiver = closing(open_receiver(sender.address, config, MANIFEST, "run", security=security))
    publisher = WeightPublisher(sender, MANIFEST)
    published = publisher.publish(torch.ones(NUM_ELEMENTS), PolicyVersion(0, 0))
    assert read_state(receiver) == published.digest


def test_chunks_and_fan_out_are_the_recipes(closing: Keep) -> None:
    config = recipe(push={"channel": "tcp", "chunk_kib": 32, "chunks_in_flight": 5, "fan_out": 3})
    sender: Any = closing(open_sender(config, MANIFEST, "run"))
    assert "?chunk_bytes=32768&chunks_in_flight=5" in sender.address
    assert sender._tree.fan_out == 3


def test_the_store_keeps_as_many_whole_states_as_the_recipe_says(
    tmp_path: Path, publication: Callable[..., Publication], closing: Keep
) -> None:
    config = recipe(push={"channel": "store", "store": str(tmp_path), "store_keep": 4})
    sender: Any = closing(open_sender(config, MANIFEST, "run"))
    for step in range(1, 8):
        sender.publish(publication(step, 100), 10)
        sender.flush(10)
    assert len(list((tmp_path / "run" / "markers").iterdir())) == 4


def test_runs_share_a_store_without_meeting(tmp_path: Path, closing: Keep) -> None:
    config = recipe(push={"channel": "store", "store": str(tmp_path)})
    one = closing(open_sender(config, MANIFEST, "one"))
    WeightPublisher(one, MANIFEST).publish(torch.ones(NUM_ELEMENTS), PolicyVersion(0, 5))
    one.flush(10)
    other = closing(open_receiver(one.address, config, MANIFEST, "other"))
    assert other.newest(None, "") is None


@pytest.mark.parametrize(
    ("sections", "path", "words"),
    [
        ({"push": {"channel": "store"}}, "push.store", "needs a directory or a URL"),
        ({"push": {"store": "/x"}}, "push.store", "is for push.channel = 'store', this is 'auto'"),
        (
            {"push": {"channel": "collective"}, "stream": {"transport": "tcp", "keys": "/k"}},
            "push.channel",
            "torch.distributed authenticates nobody",
        ),
        ({"push": {"channel": "tcp", "chunk_kib": 8}}, "push.chunk_kib", "16"),
        ({"push": {"channel": "store", "store": "/x", "store_keep": 1}}, "push.store_keep", "2"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(
    sections: dict[str, Any], path: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe(**sections)
    assert any(where == path and words in message for where, message in caught.value.faults)


def test_an_address_of_no_channel_is_refused() -> None:
    with pytest.raises(WeightError, match="opens shm:, tcp:, store: and collective: addresses"):
        open_receiver("carrier-pigeon:7", recipe(), MANIFEST, "run")


class Unlucky:
    """A sender that fails as often as it is told to."""

    address = "none"

    def __init__(self) -> None:
        self.failing = 0
        self.versions: list[int] = []

    def publish(self, publication: Publication, deadline_s: float) -> None:
        self.versions.append(publication.version.step)
        if self.failing:
            self.failing -= 1
            raise WeightError("g1: out of memory at tensor 3")

    def close(self) -> None:
        pass


def test_one_lost_version_is_a_warning_and_three_in_a_row_are_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sender = Unlucky()
    publisher = WeightPublisher(sender, MANIFEST)
    flat = torch.ones(NUM_ELEMENTS)
    step = 0
    with caplog.at_level(logging.WARNING):
        for failing in (0, MAX_LOST - 1, 0, MAX_LOST - 1, 0):
            sender.failing = failing
            for _ in range(max(1, failing)):
                flat[step] = 2.0
                publisher.publish(flat, PolicyVersion(0, step))
                step += 1
    assert len(caplog.records) == 2 * (MAX_LOST - 1)
    assert "g1: out of memory at tensor 3" in caplog.text
    sender.failing = MAX_LOST
    for _ in range(MAX_LOST - 1):
        publisher.publish(flat, PolicyVersion(0, step))
        step += 1
    with pytest.raises(WeightError, match="out of memory at tensor 3"):
        publisher.publish(flat, PolicyVersion(0, step))
