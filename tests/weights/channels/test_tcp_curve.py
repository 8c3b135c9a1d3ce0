"""The tcp channel with keys: who is on the list gets weights, from the learner and from relays; nobody else does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.errors import DeadlineExceeded, StreamError, WeightError
from headway.stream.keys import new_keys
from headway.stream.security import ClientSecurity, ServerSecurity
from headway.weights import Publication

Start = Callable[..., Any]
pytestmark = pytest.mark.parametrize("plain", ["plain"], indirect=True)  # which is for those without keys
SIZE = 300_000


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    new_keys(folder, ["a", "b", "c"])
    return folder


def test_weights_travel_encrypted_and_through_relays(
    keys: Path, sender: Start, receiver: Start, publication: Callable[..., Publication], read: Start
) -> None:
    learner = sender(security=ServerSecurity(keys), fan_out=1)
    ends = [receiver(learner.address, name, security=ClientSecurity(keys / f"{name}.key")) for name in "abc"]
    readers = [read(end, 2) for end in ends]
    for step in (1, 2):
        learner.publish(publication(step, SIZE), 10)
        learner.settle(20, num_receivers=3)
    for reader in readers:
        reader.join()
        assert reader.failures == []
    assert learner.bytes_sent == 2 * SIZE, "the others were served by relays, whose keys their children know"
    assert sum(end.bytes_relayed for end in ends) == 4 * SIZE


def test_a_client_that_is_not_on_the_list_is_refused_at_the_learner(
    keys: Path, tmp_path: Path, sender: Start, receiver: Start
) -> None:
    learner = sender(security=ServerSecurity(keys))
    lines = (keys / "allowed").read_text().splitlines()
    stranger = ClientSecurity(keys / "b.key")
    (keys / "allowed").write_text("\n".join(line for line in lines if not line.endswith(" b")) + "\n")
    with pytest.raises((StreamError, DeadlineExceeded), match=r"CURVE key|no answer"):
        receiver(learner.address, security=stranger, join_s=3.0)
    with pytest.raises(DeadlineExceeded, match="no answer"):
        receiver(learner.address, join_s=0.5)  # no keys at all
    assert learner.num_receivers == 0
    receiver(learner.address, security=ClientSecurity(keys / "a.key"))


def test_a_stranger_is_refused_by_a_relay(keys: Path, sender: Start, receiver: Start, tmp_path: Path) -> None:
    import zmq

    learner = sender(security=ServerSecurity(keys))
    relay = receiver(learner.address, security=ClientSecurity(keys / "a.key"))
    context: Any = zmq.Context()
    with context:
        stranger = context.socket(zmq.DEALER)
        stranger.linger = 0
        public, secret = zmq.curve_keypair()
        stranger.curve_serverkey = relay._hello.key.encode()
        stranger.curve_publickey, stranger.curve_secretkey = public, secret
        watch = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        stranger.connect(relay._hello.endpoint)
        assert watch.poll(10_000)
        assert zmq.utils.monitor.recv_monitor_message(watch)["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        stranger.disable_monitor()
        watch.close()
        stranger.close()
    assert relay._relay.rejected["key"] >= 1


def test_another_learners_key_is_no_way_in(
    keys: Path, tmp_path: Path, sender: Start, receiver: Start
) -> None:
    new_keys(tmp_path / "other", ["a"])
    learner = sender(security=ServerSecurity(keys))
    with pytest.raises((DeadlineExceeded, StreamError, WeightError)):
        receiver(learner.address, security=ClientSecurity(tmp_path / "other" / "a.key"), join_s=1.0)
    assert learner.num_receivers == 0
