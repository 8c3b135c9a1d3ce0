"""Who is alive: beats over real sockets, and the judgement on a virtual clock."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.stream import HeartbeatThread, LearnerSocket, LivenessMonitor
from headway.types import TimeSplit
from headway.wire.messages import Heartbeat


def beat(seq: int, stalled_s: float = 0.0) -> Heartbeat:
    return Heartbeat(
        incarnation="g0", seq=seq, stalled_s=stalled_s, serving=None, running=0, waiting=0, tickets=0,
        generated=0, unsent=0, split=TimeSplit(0.0, 0.0, 0.0, 0.0),
    )  # fmt: skip


def test_it_beats_while_the_main_thread_hangs(until: Callable[..., None]) -> None:
    turned = time.monotonic()
    seq = iter(range(1, 1000))
    with LearnerSocket() as learner:
        thread = HeartbeatThread(
            learner.endpoints.heartbeat, lambda: beat(next(seq), time.monotonic() - turned), 0.02
        )
        beats: list[Heartbeat] = []

        def turn() -> None:
            beats.extend(m for p, m in learner.poll(0.5) if p == b"g0" and isinstance(m, Heartbeat))

        until(lambda: len(beats) >= 5, turn)
        thread.stop()
        assert not thread.alive
        assert [b.seq for b in beats] == sorted({b.seq for b in beats})
        assert beats[-1].stalled_s > beats[0].stalled_s


def test_without_a_learner_it_ends_when_told() -> None:
    thread = HeartbeatThread("tcp://127.0.0.1:9", lambda: beat(1), 0.05)
    started = time.monotonic()
    thread.stop()
    assert not thread.alive
    assert time.monotonic() - started < 1.0


def test_a_learner_that_starts_later_hears_only_fresh_beats(until: Callable[..., None]) -> None:
    with LearnerSocket() as probe:
        endpoint = probe.endpoints.heartbeat
    count = [0]

    def snapshot() -> Heartbeat:
        count[0] += 1
        return beat(count[0])

    thread = HeartbeatThread(endpoint, snapshot, 0.01)
    try:
        until(lambda: count[0] > 20, lambda: threading.Event().wait(0.01))
        missed = count[0]
        with LearnerSocket(heartbeat=endpoint) as learner:
            heard: list[Heartbeat] = []
            until(lambda: heard, lambda: heard.extend(m for _, m in learner.poll(0.5)))
            assert heard[0].seq > missed
    finally:
        thread.stop()


def test_a_snapshot_that_raises_ends_the_beats_and_says_why(
    caplog: pytest.LogCaptureFixture, until: Callable[..., None]
) -> None:
    calls = iter([beat(1)])
    with LearnerSocket() as learner:
        thread = HeartbeatThread(learner.endpoints.heartbeat, lambda: next(calls), 0.01)
        until(lambda: not thread.alive, lambda: threading.Event().wait(0.01))
    assert "the heartbeat ends" in caplog.text


def test_a_stopped_process_is_noticed_and_comes_back(
    start_peer: Callable[..., object], until: Callable[..., None]
) -> None:
    with LearnerSocket() as learner:
        monitor = LivenessMonitor(interval_s=0.5, stall_limit_s=60.0)
        generator = start_peer("generator", learner.endpoints, "g0", 0)
        heard = [0]

        def turn() -> None:
            for name, message in learner.poll(0.05):
                if isinstance(message, Heartbeat):
                    heard[0] += 1
                    monitor.beat(name, time.monotonic(), message.stalled_s)

        until(lambda: heard[0] > 2, turn)
        assert monitor.lost(time.monotonic()) == {}
        os.kill(generator.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        until(lambda: b"g0" in monitor.lost(time.monotonic()), turn)
        assert 0.5 < time.monotonic() - stopped < 5.0
        os.kill(generator.pid, signal.SIGCONT)
        until(lambda: monitor.lost(time.monotonic()) == {}, turn)


def watch(monitor: LivenessMonitor, start: float, end: float, every: float = 0.5) -> dict[bytes, str]:
    """Look regularly until `end`; the last answer."""
    looks = int((end - start) / every)
    for i in range(looks):
        monitor.lost(start + i * every)
    return monitor.lost(end)


def test_silence_is_noticed_after_two_intervals() -> None:
    monitor = LivenessMonitor(interval_s=2.0, stall_limit_s=60.0)
    monitor.beat(b"a", 0.0)
    monitor.beat(b"b", 3.0)
    assert watch(monitor, 0.0, 4.0) == {}
    assert list(monitor.lost(4.01)) == [b"a"]
    assert "silent for 4.0 s" in monitor.lost(4.01)[b"a"]
    monitor.beat(b"a", 4.5)
    assert monitor.lost(5.0) == {}
    monitor.forget(b"a")
    monitor.forget(b"unknown")
    assert list(watch(monitor, 5.0, 20.0)) == [b"b"]


@pytest.mark.parametrize(
    ("stalled_s", "lost"), [(60.0, False), (60.1, True), (math.inf, True), (math.nan, True)]
)
def test_a_loop_that_no_longer_turns_is_lost_though_it_beats(stalled_s: float, lost: bool) -> None:
    monitor = LivenessMonitor(interval_s=2.0, stall_limit_s=60.0)
    monitor.beat(b"a", 100.0, stalled_s)
    assert (b"a" in monitor.lost(100.0)) is lost


def test_a_watcher_that_was_stopped_blames_nobody() -> None:
    monitor = LivenessMonitor(interval_s=2.0, stall_limit_s=60.0)
    monitor.beat(b"a", 0.0)
    monitor.lost(1.0)
    assert monitor.lost(1000.0) == {}
    assert watch(monitor, 1000.0, 1000.9) == {}
    assert list(watch(monitor, 1001.0, 1004.0)) == [b"a"]


@given(st.lists(st.floats(0.01, 2.0), max_size=60), st.integers(0, 59))
def test_regular_beats_are_never_lost_and_silence_always_is(looks: list[float], dies_at: int) -> None:
    monitor = LivenessMonitor(interval_s=2.0, stall_limit_s=60.0)
    now = last = 0.0
    monitor.beat(b"a", now)
    for i, wait in enumerate(looks):
        now += wait
        if i < dies_at:
            monitor.beat(b"a", now)
            last = now
        assert (b"a" in monitor.lost(now)) is (now - last > 4.0)
