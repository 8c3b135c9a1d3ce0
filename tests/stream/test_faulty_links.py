"""Links that are slow, silent or cut: what was acked is there, the rest comes again, and both ends notice."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from headway.stream import Endpoints, GeneratorSocket, HeartbeatThread, LearnerSocket
from headway.types import MemberFailure, PolicyVersion, TimeSplit
from headway.wire.messages import (
    SCHEMA,
    DataMessage,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Received,
    Trajectories,
    WeightAck,
    Welcome,
)
from headway_bench.chaos.proxy import Proxy, ask

BEAT_S = 0.2
DEADLINE_S = 20.0


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    made = Proxy()
    yield made
    made.close()


def behind(proxy: Proxy, endpoints: Endpoints) -> Endpoints:
    data, heartbeat = (
        f"tcp://127.0.0.1:{ask(proxy.control, endpoint.removeprefix('tcp://'))}"
        for endpoint in (endpoints.data, endpoints.heartbeat)
    )
    return Endpoints(data, heartbeat)


def hello() -> Hello:
    return Hello(
        run_id="run",
        schema=SCHEMA,
        generator=0,
        incarnation="g0",
        pid=1,
        host="here",
        max_running=1,
        serving=None,
    )


def message(seq: int) -> Trajectories:
    failure = MemberFailure(seq, 0, "reward_failed", "x" * 500, 1)
    return Trajectories(incarnation="g0", seq=seq, trajectories=[], failures=[failure], generated=seq)


class Learner:
    """Answers as a learner does, and counts."""

    def __init__(self) -> None:
        self.socket = LearnerSocket("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", heartbeat_s=BEAT_S)
        self.seen: Counter[int] = Counter()
        self.hellos = 0
        self.acks: list[PolicyVersion] = []
        self.answers_beats = True

    def turn(self, timeout_s: float = 0.01) -> None:
        for peer, said in self.socket.poll(timeout_s):
            answer: DataMessage | None = None
            if isinstance(said, Hello):
                self.hellos += 1
                answer = Welcome(
                    manifest_digest="m", weight_channel="", version=PolicyVersion(0, 0), heartbeat_s=1.0
                )
            elif isinstance(said, Trajectories):
                self.seen[said.seq] += 1
                answer = Received(seq=said.seq)
            elif isinstance(said, WeightAck):
                self.acks.append(said.version)
            elif isinstance(said, Heartbeat) and self.answers_beats:
                answer = HeartbeatAck(seq=said.seq)
            if answer is not None:
                self.socket.send(peer, answer)


@pytest.fixture
def learner() -> Iterator[Learner]:
    made = Learner()
    yield made
    made.socket.close()


def generator(endpoints: Endpoints) -> GeneratorSocket:
    return GeneratorSocket.connect(endpoints, hello, heartbeat_s=BEAT_S)


def wait(done: Callable[[], object], *turns: Callable[[], object]) -> float:
    """Run the turns until `done`; returns the seconds that took."""
    began = time.monotonic()
    while not done():
        assert time.monotonic() - began < DEADLINE_S
        for turn in turns:
            turn()
    return time.monotonic() - began


def test_whatever_is_cut_each_message_is_acknowledged_in_the_end_and_the_last_version_is_known(
    proxy: Proxy, learner: Learner
) -> None:
    with generator(behind(proxy, learner.socket.endpoints)) as stream:
        wait(lambda: stream.connected, learner.turn, lambda: stream.receive(0.0))
        for seq in range(1, 301):
            stream.send(message(seq))
            if seq % 60 == 0:
                version = PolicyVersion(0, seq)
                stream.send(WeightAck(incarnation="g0", version=version, digest="d", pause_s=0.0))
                cuts = seq // 60
                wait(lambda n=cuts: learner.hellos == n, learner.turn, lambda: stream.receive(0.0))
                assert proxy.cut() > 0
            learner.turn(0.0)
            stream.receive(0.0)
        wait(lambda: not stream.unacked, learner.turn, lambda: stream.receive(0.01))
        # What was sent before a cut may be acknowledged over the next connection before its Hello is out.
        wait(lambda: learner.hellos == 6, learner.turn, lambda: stream.receive(0.01))
        wait(
            lambda: learner.acks and learner.acks[-1].step == 300, learner.turn, lambda: stream.receive(0.01)
        )
    assert sorted(learner.seen) == list(range(1, 301))
    assert learner.hellos == 6


def test_a_half_open_link_is_noticed_by_the_generator_and_heals(proxy: Proxy, learner: Learner) -> None:
    with generator(behind(proxy, learner.socket.endpoints)) as stream:
        wait(lambda: stream.connected, learner.turn, lambda: stream.receive(0.0))
        proxy.silent = True  # both connections stay open; nothing comes through any more
        stream.send(message(1))
        noticed_s = wait(lambda: not stream.connected, learner.turn, lambda: stream.receive(0.01))
        assert noticed_s < 10 * BEAT_S
        assert stream.unacked == 1
        proxy.silent = False
        wait(lambda: not stream.unacked, learner.turn, lambda: stream.receive(0.01))
    assert set(learner.seen) == {1}


def test_slow_links_only_make_it_slow(proxy: Proxy, learner: Learner) -> None:
    proxy.delay_s = 0.03
    with generator(behind(proxy, learner.socket.endpoints)) as stream:
        wait(lambda: stream.connected, learner.turn, lambda: stream.receive(0.0))
        for seq in range(1, 21):
            stream.send(message(seq))
        wait(lambda: not stream.unacked, learner.turn, lambda: stream.receive(0.01))
    assert learner.seen == Counter(range(1, 21))
    assert learner.hellos == 1


def beat() -> Heartbeat:
    return Heartbeat(
        incarnation="g0", seq=1, stalled_s=0.0, serving=None, running=0, waiting=0, tickets=0, generated=0, unsent=0,
        split=TimeSplit(0, 0, 0, 0),
    )  # fmt: skip


def test_heartbeats_are_answered_and_silence_is_measured_from_the_last_answer(learner: Learner) -> None:
    thread = HeartbeatThread(learner.socket.endpoints.heartbeat, beat, BEAT_S / 4)
    try:
        wait(lambda: learner.socket.poll(0.0) or thread.silent_s > 4 * BEAT_S, lambda: time.sleep(0.001))
        learner.turn()
        wait(lambda: thread.silent_s < BEAT_S / 2, learner.turn)
        for _ in range(20):
            wait(lambda: thread.silent_s < BEAT_S / 4, learner.turn)
        learner.answers_beats = False  # it is there and reads, but the thread that answers is stuck
        wait(lambda: thread.silent_s > 2 * BEAT_S, learner.turn)
        learner.answers_beats = True
        wait(lambda: thread.silent_s < BEAT_S, learner.turn)
    finally:
        thread.stop()


def test_a_connection_given_up_is_made_anew_and_what_was_on_it_goes_out_again(learner: Learner) -> None:
    with generator(learner.socket.endpoints) as stream:
        wait(lambda: stream.connected, learner.turn, lambda: stream.receive(0.0))
        stream.send(message(1))
        stream.reconnect("a test")
        assert not stream.connected
        assert stream.unacked_tickets == {1}
        wait(lambda: not stream.unacked, learner.turn, lambda: stream.receive(0.01))
        wait(lambda: learner.hellos == 2, learner.turn, lambda: stream.receive(0.01))
        assert stream.unacked_tickets == set()
