"""The data stream over real sockets and processes: nothing lost, nothing hung, no peer's bytes raise."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket as plain
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import msgpack
import msgspec
import numpy as np
import pytest
import zmq

from headway.errors import DeadlineExceeded, OwnershipError, StreamError
from headway.stream import Endpoints, GeneratorSocket, LearnerSocket
from headway.types import PolicyVersion, VersionSpan
from headway.wire import encode
from headway.wire.messages import (
    Bye,
    DataMessage,
    Grant,
    Hello,
    Received,
    Refused,
    Stop,
    Trajectories,
    WeightAck,
    Welcome,
)

WELCOME = Welcome(manifest_digest="", weight_channel="", version=PolicyVersion(0, 0), heartbeat_s=1.0)
Until = Callable[..., None]


class Pair:
    """A learner and a generator driven by one thread."""

    def __init__(self, peer: ModuleType, data: str, heartbeat: str) -> None:
        self.peer = peer
        self.learner = LearnerSocket(data, heartbeat)
        self.generator = self.connect("g0")
        self.received: list[DataMessage] = []
        self.answered: list[DataMessage] = []
        self.acks = True

    def connect(self, name: str, **options: object) -> GeneratorSocket:
        return GeneratorSocket.connect(self.learner.endpoints, lambda: self.peer.hello(name), **options)

    def turn(self) -> None:
        for peer, message in self.learner.poll(0.01):
            self.received.append(message)
            if isinstance(message, Hello):
                self.learner.send(peer, WELCOME)
            elif isinstance(message, Trajectories) and self.acks:
                self.learner.send(peer, Received(seq=message.seq))
        self.answered += self.generator.receive(0.01)


def short_message(peer: ModuleType, seq: int) -> Trajectories:
    return Trajectories(
        incarnation="g0", seq=seq, trajectories=[peer.trajectory(seq)], failures=[], generated=9
    )


def long_message(peer: ModuleType, seq: int, size: int) -> Trajectories:
    """One trajectory of `size` tokens: 9 bytes each."""
    ids = np.zeros(size, dtype=np.int32)
    item = msgspec.structs.replace(
        peer.trajectory(seq),
        token_ids=ids,
        loss_mask=np.arange(size) >= 5,
        logprobs=ids.astype(np.float32),
        spans=[VersionSpan(5, size, PolicyVersion(0, 0))],
    )
    return Trajectories(incarnation="g0", seq=seq, trajectories=[item], failures=[], generated=9)


@pytest.fixture(params=["tcp", "ipc"])
def pair(request: pytest.FixtureRequest, peer: ModuleType, short_dir: Path) -> Iterator[Pair]:
    ends = ("tcp://127.0.0.1:0",) * 2
    if request.param == "ipc":
        ends = (f"ipc://{short_dir}/d", f"ipc://{short_dir}/h")
    made = Pair(peer, *ends)
    yield made
    made.generator.close()
    made.learner.close()


def sequence(messages: list[DataMessage]) -> list[int]:
    return [message.seq for message in messages if isinstance(message, Trajectories)]


def test_hello_comes_first_and_everything_is_acked(pair: Pair, until: Until) -> None:
    for seq in (1, 2, 3):
        assert not pair.generator.send(short_message(pair.peer, seq))
    assert (pair.generator.unacked, pair.generator.unsent, pair.generator.unacked_tokens) == (3, 3, 27)
    until(lambda: pair.generator.unacked == 0, pair.turn)
    assert [type(message).__name__ for message in pair.received] == ["Hello"] + ["Trajectories"] * 3
    assert sequence(pair.received) == [1, 2, 3]
    assert pair.generator.connected
    assert (pair.generator.unsent, pair.generator.unacked_tokens) == (0, 0)


def test_grants_and_acks_travel_both_ways_in_order(pair: Pair, until: Until) -> None:
    until(lambda: pair.generator.connected, pair.turn)
    for seq in range(20):
        assert pair.learner.send(b"g0", Grant(seq=seq, tickets=[]))
    ack = WeightAck(incarnation="g0", version=PolicyVersion(0, 1), digest="x", pause_s=0.0)
    assert pair.generator.send(ack)
    assert pair.generator.send(Bye(incarnation="g0", unsent=0))
    until(lambda: len(pair.answered) == 21 and len(pair.received) == 3, pair.turn)
    assert [message.seq for message in pair.answered if isinstance(message, Grant)] == list(range(20))
    assert pair.received[1:] == [ack, Bye(incarnation="g0", unsent=0)]


def test_sending_to_a_peer_that_is_gone_says_so(pair: Pair, until: Until) -> None:
    assert not pair.learner.send(b"nobody", Stop(reason=""))
    until(lambda: pair.generator.connected, pair.turn)
    assert pair.learner.send(b"g0", Stop(reason=""))
    pair.generator.close()
    until(lambda: not pair.learner.send(b"g0", Stop(reason="")), lambda: pair.learner.poll(0.01))


def test_a_stopped_learner_is_owed_exactly_the_credits(pair: Pair, until: Until) -> None:
    """High-water marks would admit thousands of small messages and a handful of large ones."""
    for size in (14, 450_000):  # 126 bytes and 4 MB of arrays
        credits = 8
        pair.generator.close()
        pair.generator = pair.connect("g0", max_unacked=credits)
        pair.acks = False
        until(lambda: pair.generator.connected, pair.turn)
        for seq in range(credits):
            pair.generator.send(long_message(pair.peer, seq, size))
        with pytest.raises(StreamError, match="8 unacknowledged"):
            pair.generator.send(long_message(pair.peer, credits, size))
        assert pair.generator.unacked == credits
        pair.received.clear()
        pair.acks = True
        until(lambda: pair.generator.unacked == 0, pair.turn)
        assert sequence(pair.received) == list(range(credits))


def test_a_sequence_number_is_used_once(pair: Pair) -> None:
    pair.generator.send(short_message(pair.peer, 1))
    with pytest.raises(StreamError, match="each seq once"):
        pair.generator.send(short_message(pair.peer, 1))


def test_wake_interrupts_both_waits(pair: Pair) -> None:
    for wait, wake in ((pair.learner.poll, pair.learner.wake), (pair.generator.receive, pair.generator.wake)):
        for _ in range(20):
            woken = threading.Event()
            timer = threading.Timer(0.02, lambda woken=woken, wake=wake: (woken.set(), wake()))
            timer.start()
            started = time.monotonic()
            while not woken.is_set():
                wait(15.0)
            assert time.monotonic() - started < 10.0
            timer.join()
    pair.learner.wake()  # nobody waits yet: the next wait ends at once
    pair.learner.poll(0)
    started = time.monotonic()
    while time.monotonic() - started < 10.0 and pair.learner.poll(15.0):
        pass
    assert time.monotonic() - started < 10.0


def test_use_from_another_thread_is_refused_until_released(pair: Pair) -> None:
    caught: list[BaseException | None] = []

    def use(action: Callable[[], object]) -> None:
        try:
            action()
            caught.append(None)
        except OwnershipError as error:
            caught.append(error)

    def elsewhere(action: Callable[[], object]) -> BaseException | None:
        thread = threading.Thread(target=use, args=(action,), name="intruder")
        thread.start()
        thread.join()
        return caught.pop()

    for action in (
        lambda: pair.learner.poll(0),
        lambda: pair.learner.send(b"g0", Stop(reason="")),
        lambda: pair.generator.receive(0),
        lambda: pair.generator.send(short_message(pair.peer, 1)),
        pair.learner.close,
        pair.generator.close,
    ):
        error = elsewhere(action)
        assert error is not None
        assert "intruder" in str(error)
    assert elsewhere(pair.learner.wake) is None
    pair.learner.release()
    assert elsewhere(lambda: pair.learner.poll(0)) is None  # it belongs to that thread now, which has ended
    with pytest.raises(OwnershipError):
        pair.learner.poll(0)
    pair.learner.close()


def test_invalid_input_is_counted_and_logged_once(
    pair: Pair, until: Until, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Bombs to each bound socket: it stays up, counts them, and goes on serving."""
    caplog.set_level(logging.WARNING)
    target = tmp_path / "exploded"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (os.mkdir, (str(target),))

    bombs = [
        [pickle.dumps(Bomb())],
        [b"HDWY\x01\0\0\0" + msgpack.packb(msgpack.ExtType(42, b"x"))],
        [b"HDWY\x01\0\0\0" + b"\x82\xa4kind\xa4Stop\xa6reason\xdb\xff\xff\xff\xff"],
        [b"HDWY\x01\0\0\0" + b"\x82\xa4kind\xa4Stop\xa1x" + b"\x91" * 10**6],
        [b"HDWY\x09\0\0\0" + b"\x80"],
        [b""] * 3,
        [b"x"] * 20_000,
        encode(Stop(reason="not yours to say")),
        encode(Bye(incarnation="somebody else", unsent=0)),
    ]
    endpoints = pair.learner.endpoints
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        for endpoint in (endpoints.data, endpoints.heartbeat):
            before = pair.learner.rejected.total()
            with context.socket(zmq.DEALER) as attacker:
                attacker.routing_id = b"attacker"
                attacker.connect(endpoint)
                for bomb in bombs * 2:
                    attacker.send_multipart(bomb)
                expected = before + 2 * len(bombs)
                until(lambda n=expected: pair.learner.rejected.total() == n, pair.turn)
    finally:
        context.destroy(linger=0)
    assert not target.exists()
    assert set(pair.learner.rejected) == {
        "magic",
        "head",
        "nesting",
        "schema",
        "frames",
        "direction",
        "identity",
    }
    warned = [record for record in caplog.records if "dropped a message" in record.message]
    assert len(warned) == len(pair.learner.rejected)
    pair.generator.send(short_message(pair.peer, 1))
    until(lambda: pair.generator.unacked == 0, pair.turn)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
_METADATA = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
READY = b"\x04" + bytes([len(_METADATA)]) + _METADATA
LONG = b"\x02"  # flag of a frame with an 8-byte length


@pytest.mark.parametrize(
    ("data", "hung_up_on"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", False),
        (bytes(range(256)) * 16, False),
        (GREETING + b"\x04\xff", False),
        (GREETING + READY + LONG + (1 << 32).to_bytes(8, "big") + b"x", True),
        (GREETING + READY + LONG + b"\xff" * 8 + b"x", True),
    ],
    ids=["http", "noise", "cut", "4-GiB frame", "2^64 frame"],
)
def test_bytes_that_are_no_message_do_not_hurt(
    peer: ModuleType, until: Until, data: bytes, hung_up_on: bool
) -> None:
    with LearnerSocket() as learner:
        host, _, port = learner.endpoints.data.removeprefix("tcp://").partition(":")
        with plain.create_connection((host, int(port)), timeout=15.0) as attacker:
            attacker.sendall(data)
            with GeneratorSocket.connect(learner.endpoints, lambda: peer.hello("g1")) as generator:

                def turn() -> None:
                    for name, message in learner.poll(0.01):
                        assert isinstance(message, Hello)
                        learner.send(name, WELCOME)
                    generator.receive(0.01)

                until(lambda: generator.connected, turn)
            if hung_up_on:  # instead of waiting for the rest of the frame, or making room for it
                with contextlib.suppress(ConnectionResetError):
                    while attacker.recv(4096):
                        pass


def test_one_poll_reads_a_bounded_number(peer: ModuleType, until: Until) -> None:
    with (
        LearnerSocket(max_messages=5) as learner,
        GeneratorSocket.connect(learner.endpoints, lambda: peer.hello("g0")) as generator,
    ):
        sizes: list[int] = []

        def turn() -> None:
            messages = learner.poll(0.01)
            sizes.append(len(messages))
            for name, message in messages:
                if isinstance(message, Hello):
                    learner.send(name, WELCOME)
                elif isinstance(message, Trajectories):
                    learner.send(name, Received(seq=message.seq))
            generator.receive(0)

        for seq in range(100):
            generator.send(short_message(peer, seq))
        until(lambda: generator.unacked == 0, turn)
        assert max(sizes) == 5


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_a_generator_that_starts_first_and_sees_two_learners_loses_nothing(
    start_peer: Callable[..., object], peer: ModuleType, until: Until, short_dir: Path, transport: str
) -> None:
    ends = (f"ipc://{short_dir}/d", f"ipc://{short_dir}/h")
    if transport == "tcp":
        with LearnerSocket() as probe:  # a port that is free: the learner is to be restarted on it
            ends = (probe.endpoints.data, probe.endpoints.heartbeat)
    with GeneratorSocket.connect(Endpoints(*ends), lambda: peer.hello("g0")) as generator:

        def send(seq: int) -> None:
            generator.send(short_message(peer, seq))

        send(1)
        generator.receive(0.2)
        assert generator.unsent == 1
        first = start_peer("learner", *ends, "mute")
        until(lambda: generator.connected, lambda: generator.receive(0.1))
        send(2)
        assert [first.line() for _ in range(4)][1:] == ["hello g0", "got 1", "got 2"]
        assert (generator.unacked, generator.unsent) == (2, 0)
        first.kill()
        until(lambda: not generator.connected, lambda: generator.receive(0.1))
        assert not generator.send(
            WeightAck(incarnation="g0", version=PolicyVersion(0, 1), digest="", pause_s=0)
        )
        send(3)
        assert (generator.unacked, generator.unsent) == (3, 1)
        second = start_peer("learner", *ends)
        until(lambda: generator.unacked == 0, lambda: generator.receive(0.1))
        assert [second.line() for _ in range(5)][1:] == ["hello g0", "got 1", "got 2", "got 3"]


def test_a_restarted_generator_is_a_new_peer_and_the_old_one_is_gone(
    start_peer: Callable[..., object], peer: ModuleType, until: Until
) -> None:
    with LearnerSocket() as learner:
        seen: list[bytes] = []

        def turn() -> None:
            for name, message in learner.poll(0.05):
                if isinstance(message, Hello):
                    seen.append(name)
                    assert learner.send(name, WELCOME)
                elif isinstance(message, Trajectories):
                    learner.send(name, Received(seq=message.seq))

        first = start_peer("generator", learner.endpoints, "g0-a", 3)
        until(lambda: b"g0-a" in seen, turn)
        first.kill()
        until(lambda: not learner.send(b"g0-a", Stop(reason="")), turn)
        second = start_peer("generator", learner.endpoints, "g0-b", 50)
        until(lambda: b"g0-b" in seen, turn)
        thread_done: list[str] = []
        reader = threading.Thread(target=lambda: thread_done.append(second.line()))
        reader.start()
        until(lambda: thread_done, turn)
        reader.join()
        assert thread_done == ["done 0"]


def test_a_reconnecting_generator_takes_its_identity_over(pair: Pair, until: Until) -> None:
    """Its old connection may not be known to be dead yet: half-open TCP, a partition."""
    until(lambda: pair.generator.connected, pair.turn)
    with pair.generator as old:
        pair.generator = pair.connect("g0")
        until(lambda: pair.generator.connected, pair.turn)
        pair.answered.clear()
        assert pair.learner.send(b"g0", Stop(reason="to the new one"))
        until(lambda: pair.answered, pair.turn)
        assert old.receive(0) == []


def test_two_runs_on_one_host_do_not_meet(peer: ModuleType, until: Until) -> None:
    """Ports are the kernel's choice, and a peer of another run is told so and goes on living."""
    with LearnerSocket() as ours, LearnerSocket() as theirs:
        assert len({*str(ours.endpoints).split(","), *str(theirs.endpoints).split(",")}) == 4
        with GeneratorSocket.connect(theirs.endpoints, lambda: peer.hello("g0")) as generator:
            answers: list[DataMessage] = []

            def turn() -> None:
                for name, message in theirs.poll(0.01):
                    assert isinstance(message, Hello)
                    theirs.send(name, Refused(reason=f"run {message.run_id} is not this run"))
                answers.extend(generator.receive(0.01))

            until(lambda: answers, turn)
            assert answers == [Refused(reason="run run is not this run")]
            assert not generator.connected
            assert ours.poll(0) == []


def test_no_learner_is_said_once_and_given_up_on_at_the_deadline(
    peer: ModuleType, caplog: pytest.LogCaptureFixture, short_dir: Path
) -> None:
    now = [0.0]
    nowhere = Endpoints(f"ipc://{short_dir}/none", f"ipc://{short_dir}/none")
    with GeneratorSocket.connect(
        nowhere, lambda: peer.hello("g0"), patience_s=5.0, give_up_s=30.0, clock=lambda: now[0]
    ) as generator:
        for seconds in (1.0, 4.9, 5.1, 6.0, 29.9):
            now[0] = seconds
            assert generator.receive(0) == []
        said = [record.message for record in caplog.records]
        assert said == [f"no learner yet at ipc://{short_dir}/none after 5.1 s; still trying"]
        now[0] = 30.0
        with pytest.raises(DeadlineExceeded, match="no learner at ipc://"):
            generator.receive(0)


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, signal.SIGSTOP, None], ids=["killed", "stopped", "never there"]
)
def test_closing_with_unsent_messages_takes_less_than_a_second(
    start_peer: Callable[..., object],
    peer: ModuleType,
    until: Until,
    caplog: pytest.LogCaptureFixture,
    how: signal.Signals | None,
) -> None:
    endpoints = Endpoints("tcp://127.0.0.1:9", "tcp://127.0.0.1:9")
    if how is not None:
        learner = start_peer("learner", "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", "mute")
        endpoints = Endpoints.parse(learner.line())
    generator = GeneratorSocket.connect(endpoints, lambda: peer.hello("g0"))
    if how is not None:
        until(lambda: generator.connected, lambda: generator.receive(0.1))
        os.kill(learner.pid, how)
    for seq in range(10):
        generator.send(long_message(peer, seq, 450_000))  # beyond what the kernel's buffers take
    started = time.monotonic()
    assert generator.close() == 10
    assert time.monotonic() - started < 1.0
    assert "closing with 10 unacknowledged messages" in caplog.text
    assert generator.close() == 10


def fork_and_use(pair: Pair, results: multiprocessing.queues.SimpleQueue) -> None:
    """In the child: the inherited sockets refuse to work and close without touching the parent's."""
    for action in (lambda: pair.learner.poll(0), lambda: pair.generator.receive(0)):
        try:
            action()
        except OwnershipError as error:
            results.put("fork" in str(error))
    pair.generator.close()
    pair.learner.close()
    results.put("closed")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_process_with_live_sockets_may_fork_and_spawn(pair: Pair, until: Until) -> None:
    """A reward pool or a data loader forks under our feet: a thousand messages still arrive, in order."""
    until(lambda: pair.generator.connected, pair.turn)
    context = multiprocessing.get_context("fork")
    children = []
    for seq in range(1000):
        pair.generator.send(short_message(pair.peer, seq))
        if seq in (250, 500):
            results = context.SimpleQueue()
            child = context.Process(target=fork_and_use, args=(pair, results))
            child.start()
            children.append((child, results))
        if seq % 50 == 0:
            pair.turn()
    for child, results in children:
        assert [results.get() for _ in range(3)] == [True, True, "closed"]
        child.join(10)
        assert child.exitcode == 0
        results.close()
    until(lambda: pair.generator.unacked == 0, pair.turn)
    assert sequence(pair.received) == list(range(1000))


def test_nothing_on_the_way_of_a_trajectory_forgets_the_oldest() -> None:
    """A queue that is full refuses or waits, visibly; `maxlen` would throw away what was acknowledged."""
    import headway.stream

    root = Path(headway.stream.__file__).parent.parent
    packages = ("stream", "wire", "journal", "staleness", "generator", "generate", "weights", "packing")
    paths = [path for package in packages for path in (root / package).rglob("*.py")]
    paths += [root / "buffer.py", *(root / "learner").glob("*.py")]
    windows = {"records.py", "failures.py"}  # the last rewards, the last verdicts: statistics
    assert {path.name for path in paths if "maxlen" in path.read_text()} == windows


def test_nothing_is_published() -> None:
    """PUB drops silently at its high-water mark; CONFLATE forgets. Neither is used anywhere in the engine."""
    import headway.stream

    root = Path(headway.stream.__file__).parent.parent
    for path in root.rglob("*.py"):
        text = path.read_text()
        for word in ("zmq.PUB", "zmq.XPUB", "zmq.PUSH", "zmq.CONFLATE", ".conflate"):
            assert word not in text, f"{path}: {word}"
