"""Whatever bytes come to the tcp channel's sockets: counted and dropped, in bounded memory, and pushes go on."""

from __future__ import annotations

import contextlib
import pickle
import random
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import WireError
from headway.types import PolicyVersion
from headway.weights import Publication
from headway.weights.tcp import TcpSender
from headway.weights.tcp_link import TcpAddress
from headway.weights.tcp_wire import (
    MAGIC,
    AskWhole,
    Chunk,
    Complain,
    Join,
    Leave,
    Outcome,
    Want,
    decode,
    encode,
)

Start = Callable[..., Any]
Publish = Callable[..., Publication]
SIZE = 300_000


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (exec, ("raise SystemExit('the pickle was loaded')",))


def dealer(context: zmq.Context[Any], endpoint: str, name: bytes = b"evil") -> zmq.Socket[bytes]:
    made = context.socket(zmq.DEALER)
    made.linger = 0
    made.routing_id = name
    made.connect(endpoint)
    return made


def endpoint_of(learner: TcpSender) -> str:
    return TcpAddress.parse(learner.address).endpoint


RUBBISH: list[list[bytes]] = [
    [b""],
    [b"\x80\x05rubbish"],
    [pickle.dumps(Bomb())],
    [MAGIC],
    [MAGIC + b"\xc1"],
    [MAGIC + b"\x91" * 9000],
    [MAGIC + b"\xdf\xff\xff\xff\xff"],
    [MAGIC + b"\xc9\xff\xff\xff\xff\x01"],
    [MAGIC + msgspec.msgpack.encode({"kind": "Nothing"})],
    [MAGIC + msgspec.msgpack.encode({"kind": "Want", "payload": 7, "version": [0, 0], "index": 0})],
    [MAGIC + msgspec.msgpack.encode({"kind": "Want", "payload": "x", "version": [0, 0], "index": 1 << 63})],
    [encode(Want("x", PolicyVersion(0, 0), 0)), b"a body"],
    [encode(Leave())] * 20,
    [encode(Want("x", PolicyVersion(0, 0), 0))],
    [encode(Complain("tcp://127.0.0.1:1", "x", True))],
    [encode(Outcome("x", "y" * 10_000))],
    [encode(AskWhole("z" * 10_000))],
    [encode(Chunk("x", 0, 0)), b"bytes"],
    [encode(Join("another run", "manifest", "", ""))],
    [encode(Join("run", "another model", "", ""))],
]


def test_rubbish_is_counted_and_pushes_go_on(
    sender: Start, receiver: Start, publication: Publish, read: Start, until: Callable[..., None]
) -> None:
    learner = sender()
    reader = read(receiver(learner.address), 2)
    learner.publish(publication(1, SIZE), 10)
    learner.settle(10, num_receivers=1)
    with zmq.Context() as context, dealer(context, endpoint_of(learner)) as evil:
        for frames in RUBBISH:
            evil.send_multipart(frames)
        until(lambda: sum(learner.rejected.values()) >= len(RUBBISH))
        assert {"frames", "magic", "head", "unjoined", "run", "manifest"} <= learner.rejected.keys()
        assert learner.num_receivers == 1
    learner.publish(publication(2, SIZE), 10)
    learner.settle(10, num_receivers=1)
    reader.join()


def test_a_member_that_asks_for_what_cannot_be_gets_nothing_and_costs_nothing(
    sender: Start, receiver: Start, publication: Publish, read: Start, until: Callable[..., None]
) -> None:
    learner = sender()
    learner.publish(publication(1, SIZE), 10)
    reader = read(receiver(learner.address), 2)
    with zmq.Context() as context, dealer(context, endpoint_of(learner)) as evil:
        evil.send(encode(Join("run", "manifest", "tcp://127.0.0.1:1", "")))
        evil.send(encode(Join("run", "manifest", "http://nowhere/" + "x" * 20_000, "y" * 10_000)))
        until(lambda: learner.num_receivers == 2)
        payload = next(iter(learner._current))
        for index in (-1, 1 << 40, (1 << 63) - 1):
            evil.send(encode(Want(payload, PolicyVersion(0, 1), index)))
        evil.send(encode(Want("no such payload", PolicyVersion(9, 9), 0)))
        evil.send(encode(Complain("tcp://127.0.0.1:1", payload, True)))
        until(lambda: learner.rejected["index"] == 3)
        learner.publish(publication(2, SIZE), 10)
        reader.join()
        assert all(len(known.endpoint) <= 256 and len(known.key) <= 40 for known in learner._peers.values())


def test_frames_that_announce_more_than_a_head_end_their_connection(sender: Start, receiver: Start) -> None:
    learner = sender()
    with zmq.Context() as context, dealer(context, endpoint_of(learner)) as evil:
        before = psutil.Process().memory_info().rss
        watch = evil.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        evil.send(bytes(50 << 20))
        assert watch.poll(10_000), "the peer that announced 50 MB is still connected"
        evil.disable_monitor()
        watch.close()
        assert psutil.Process().memory_info().rss - before < 80 << 20
    receiver(learner.address)
    assert learner.num_receivers == 1


def test_bytes_that_are_not_even_zeromq_change_nothing(
    sender: Start, receiver: Start, publication: Publish, read: Start
) -> None:
    learner = sender()
    port = int(endpoint_of(learner).rpartition(":")[2])
    dice = random.Random(7)
    for _ in range(30):
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.sendall(dice.randbytes(dice.randrange(1, 3000)))
    reader = read(receiver(learner.address), 1)
    learner.publish(publication(1, SIZE), 10)
    reader.join()


def test_a_flood_of_wants_is_refused_past_what_may_be_in_flight(
    sender: Start, receiver: Start, publication: Publish, read: Start, until: Callable[..., None]
) -> None:
    """A peer that asks on and on, and never reads what it gets."""
    learner = sender()
    learner.publish(publication(1, SIZE), 10)
    with zmq.Context() as context, dealer(context, endpoint_of(learner)) as evil:
        evil.rcvhwm = 1
        evil.send(encode(Join("run", "manifest", "", "")))
        until(lambda: learner.num_receivers == 1)
        want = encode(Want(next(iter(learner._current)), PolicyVersion(0, 1), 3))
        before = psutil.Process().memory_info().rss
        for _ in range(5000):
            evil.send(want)
        until(lambda: learner._server.num_refused > 1000)
        assert psutil.Process().memory_info().rss - before < 60 << 20
        reader = read(receiver(learner.address), 2)
        learner.publish(publication(2, SIZE), 10)
        reader.join()


@pytest.mark.parametrize("plain", ["zeromq"], indirect=True)
def test_a_relay_takes_wants_only(
    sender: Start, receiver: Start, publication: Publish, read: Start, until: Callable[..., None]
) -> None:
    learner = sender(fan_out=1)
    relay, child = receiver(learner.address, "relay"), receiver(learner.address, "child")
    with zmq.Context() as context, dealer(context, relay._hello.endpoint) as evil:
        for frames in RUBBISH:
            evil.send_multipart(frames)
        kinds = relay._relay.rejected
        until(lambda: sum(kinds.values()) >= len(RUBBISH) - 2, kinds)  # all but the two Wants
        readers = [read(end, 1) for end in (relay, child)]
        learner.publish(publication(1, SIZE), 10)
        for reader in readers:
            reader.join()
            assert reader.failures == []


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_decoding_raises_nothing_but_wire_errors(frames: list[bytes]) -> None:
    for prefix in (b"", MAGIC):
        with contextlib.suppress(WireError):
            decode([prefix + frame for frame in frames])


@pytest.mark.parametrize(
    "message",
    [
        Want("p", PolicyVersion(1, 2), 3),
        Join("r", "m", "tcp://x:1", "k"),
        Outcome("p", "why"),
        Complain("e", "p", False),
        Leave(),
    ],
)
def test_messages_survive_the_wire(message: Any) -> None:
    assert decode([encode(message)]) == (message, None)
    head, body = decode([encode(Chunk("p", 1, 2)), b"abc"])
    assert (head, bytes(body or b"")) == (Chunk("p", 1, 2), b"abc")
