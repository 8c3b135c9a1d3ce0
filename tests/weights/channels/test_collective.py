"""The collective channel over gloo: whoever refuses, dies or stalls is named in time, and the next push works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.errors import BackendUnavailable, DeadlineExceeded, StreamError, UnsupportedOption, WeightError
from headway.types import PolicyVersion
from headway.weights import Publication, collective_group
from headway.weights.collective import CollectiveSender
from headway.weights.collective_group import BroadcastGroup, CollectiveTiming
from headway.weights.collective_receiver import CollectiveReceiver

Start = Callable[..., Any]
Keep = Callable[[Any], Any]
Publish = Callable[..., Publication]
QUICK = CollectiveTiming(stall_s=2.0, gone_s=2.0, done_s=5.0)
SIZE = 300_001


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_group, "CHUNK_BYTES", 64 << 10)


@pytest.fixture
def learner(closing: Keep) -> CollectiveSender:
    return closing(CollectiveSender("run", "manifest", timing=QUICK))


@pytest.fixture
def member(learner: CollectiveSender, closing: Keep) -> Start:
    """A receiver that has joined."""

    def make(name: str) -> CollectiveReceiver:
        before = learner.num_receivers
        made = closing(
            CollectiveReceiver(learner.address, "run", "manifest", name=name, timing=QUICK, join_s=10)
        )
        while learner.num_receivers == before:
            time.sleep(0.01)
        return made

    return make


def test_every_member_gets_the_payload_that_fits_it(
    learner: CollectiveSender, member: Start, publication: Publish, read: Start
) -> None:
    learner.publish(publication(1, SIZE), 10)
    old = read(member("old"), 2)
    while old.held is None:
        time.sleep(0.01)
    new = read(member("new"), 2)
    new_has_one = time.monotonic() + 10
    while new.held is None and time.monotonic() < new_has_one:
        time.sleep(0.01)
    learner.publish(publication(2, SIZE, base=1), 10)
    late = read(member("late"), 2)
    for reader, kinds in ((old, ["whole", "delta"]), (new, ["whole", "delta"]), (late, ["whole"])):
        reader.join()
        assert reader.failures == []
        assert [header.kind for header in reader.fetched] == kinds


@pytest.mark.parametrize("num_bytes", [0, 1, 64 << 10, (64 << 10) + 1])
def test_payloads_of_any_size_arrive_with_three_members_at_once(
    num_bytes: int, learner: CollectiveSender, member: Start, publication: Publish, read: Start
) -> None:
    readers = [read(member(f"g{index}"), 3) for index in range(3)]
    for step in (1, 2, 3):
        learner.publish(publication(step, num_bytes), 10)
    for reader in readers:
        reader.join()
        assert reader.failures == []
        assert len(reader.fetched) == 3
    assert learner._num_groups == 1, "the same members meet once"


def test_a_member_that_refuses_is_quoted_and_the_others_have_the_version(
    learner: CollectiveSender, member: Start, publication: Publish, read: Start
) -> None:
    choosy = member("choosy")
    reader = read(member("well"), 2)
    thread = threading.Thread(
        target=lambda: (choosy.wait(10), choosy.newest(None, ""), choosy.ask_whole("no home for tensor 7"))
    )
    choosy.wait(0)
    thread.start()
    with pytest.raises(WeightError, match=r"did not arrive at 1 receivers: choosy-\d+: no home for tensor 7"):
        learner.publish(publication(1, SIZE), 10)
    thread.join()
    again = read(choosy, 2)
    learner.publish(publication(2, SIZE), 10)
    for each in (reader, again):
        each.join()


def test_a_member_that_does_not_take_part_is_named_at_the_deadline_and_joins_again_by_itself(
    learner: CollectiveSender, member: Start, publication: Publish, read: Start
) -> None:
    busy = member("busy")
    reader = read(member("well"), 2)
    done = threading.Event()

    def beat() -> None:  # alive, but its generator does something else
        while not done.wait(0.05):
            busy.wait(0)

    thread = threading.Thread(target=beat)
    thread.start()
    started = time.monotonic()
    with pytest.raises(
        DeadlineExceeded, match=r"waited 0\.5 s for busy-\d+ to take part in the push of weights 0\.1"
    ):
        learner.publish(publication(1, SIZE), 0.5)
    assert time.monotonic() - started < 5
    done.set()
    thread.join()
    again = read(busy, 2)
    while learner.num_receivers < 2:
        time.sleep(0.01)
    learner.publish(publication(2, SIZE), 10)
    for each in (reader, again):
        each.join()


def test_a_member_that_fell_silent_is_forgotten_before_the_deadline(
    learner: CollectiveSender, member: Start, publication: Publish, read: Start
) -> None:
    member("dead")
    reader = read(member("well"), 2)
    started = time.monotonic()
    with pytest.raises(WeightError, match=r"dead-\d+: silent for 2\.0 s"):
        learner.publish(publication(1, SIZE), 60)
    assert time.monotonic() - started < 10
    learner.publish(publication(2, SIZE), 10)
    reader.join()


@pytest.mark.parametrize("stage", ["meeting", "broadcast", "after"])
def test_a_member_that_fails_in_a_broadcast_is_quoted_and_the_next_push_works(
    stage: str,
    learner: CollectiveSender,
    member: Start,
    publication: Publish,
    read: Start,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    victim = member("victim")
    well = read(member("well"), 2)
    receive, broadcast = BroadcastGroup.receive, BroadcastGroup.broadcast
    spoilt = threading.Event()

    def spoil(group: BroadcastGroup, into: memoryview, deadline: float) -> str:
        if threading.current_thread() is not thread or spoilt.is_set():
            return receive(group, into, deadline)
        if stage == "broadcast":
            chunk = torch.zeros(64 << 10, dtype=torch.uint8)
            broadcast(group, chunk, 0)
        spoilt.set()
        if stage == "after":
            return receive(group, into, deadline) + "damaged"
        group.close()
        raise WeightError("out of memory at tensor 3")

    monkeypatch.setattr(BroadcastGroup, "receive", spoil)
    victim_reader = read(victim, 2)
    thread = victim_reader.thread
    words = "came with digest .*damaged" if stage == "after" else "out of memory at tensor 3"
    started = time.monotonic()
    with pytest.raises(WeightError, match=rf"victim-\d+: .*{words}"):
        learner.publish(publication(1, SIZE), 10)
    assert time.monotonic() - started < 10
    learner.publish(publication(2, SIZE), 10)
    for each in (well, victim_reader):
        each.join()


def test_a_version_that_is_replaced_while_a_member_waits_is_refused_by_name(
    learner: CollectiveSender, member: Start, publication: Publish
) -> None:
    end = member("g")
    learner._conduct = lambda push: _end(learner, push)  # type: ignore[method-assign]
    learner.publish(publication(1, SIZE), 10)
    end.wait(5)
    old = end.newest(None, "")
    learner.publish(publication(2, SIZE), 10)
    with pytest.raises(WeightError, match=r"weights 0\.1: these weights have been replaced by newer ones"):
        end.fetch(old, memoryview(bytearray(SIZE)), 10)
    end.fetch(end.newest(None, ""), memoryview(bytearray(SIZE)), 10)


def _end(learner: CollectiveSender, push: Any) -> None:
    """Offer only: nobody is waited for."""
    with learner._changed:
        push.ended = True
        learner._changed.notify_all()


def test_a_fetch_that_no_broadcast_answers_ends_at_its_deadline(
    learner: CollectiveSender, member: Start, publication: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = member("g")
    learner._conduct = lambda push: _end(learner, push)  # type: ignore[method-assign]
    learner._serve = lambda ready: None  # type: ignore[method-assign]
    learner.publish(publication(1, SIZE), 10)
    end.wait(5)
    with pytest.raises(DeadlineExceeded, match=r"no broadcast of weights 0\.1 in 0\.3 s"):
        end.fetch(end.newest(None, ""), memoryview(bytearray(SIZE)), 0.3)


@pytest.mark.parametrize(
    ("run", "manifest", "what"), [("other", "manifest", "run"), ("run", "other", "manifest")]
)
def test_another_run_or_model_is_refused_with_both_names(
    run: str, manifest: str, what: str, learner: CollectiveSender
) -> None:
    with pytest.raises(WeightError, match=f"learner's {what} at .* is '{what}', this receiver's is 'other'"):
        CollectiveReceiver(learner.address, run, manifest, timing=QUICK)
    assert learner.num_receivers == 0


def test_what_cannot_be_is_refused_by_name(learner: CollectiveSender) -> None:
    with pytest.raises(UnsupportedOption, match="'mpi'; there are gloo, nccl"):
        CollectiveSender("run", "manifest", backend="mpi")
    if not torch.cuda.is_available():
        with pytest.raises(BackendUnavailable, match="'nccl' needs a CUDA device"):
            CollectiveSender("run", "manifest", backend="nccl")
    with pytest.raises(
        StreamError, match=r"refused to listen on 0\.0\.0\.0: torch\.distributed authenticates"
    ):
        CollectiveSender("run", "manifest", host="0.0.0.0")
    with pytest.raises(StreamError, match="is no address of the collective channel"):
        CollectiveReceiver("tcp://127.0.0.1:1", "run", "manifest")
    with pytest.raises(StreamError, match=r"no collective weight channel at 127\.0\.0\.1:9"):
        CollectiveReceiver("collective://127.0.0.1:9", "run", "manifest", join_s=0.5)
    learner.close()
    with pytest.raises(WeightError, match="is closed"):
        learner.publish(None, 1)  # type: ignore[arg-type]


def test_it_listens_on_loopback_alone(learner: CollectiveSender) -> None:
    import psutil

    port = learner._rendezvous.port
    heard = [
        each.laddr.ip
        for each in psutil.Process().net_connections("inet")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port
    ]
    assert heard == ["127.0.0.1"]


PARTNER = Path(__file__).with_name("partner.py")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("stage", ["joined", "offered", "half"])
def test_a_member_process_killed_or_stopped_at_each_stage_is_named_in_time(
    stage: str,
    how: signal.Signals,
    learner: CollectiveSender,
    member: Start,
    publication: Publish,
    read: Start,
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, PARTNER, learner.address, stage], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "joined\n"
            while learner.num_receivers == 0:
                time.sleep(0.01)
            well = read(member("well"), 2)
            if stage == "joined":
                process.send_signal(how)
            else:
                lines = process.stdout

                def strike() -> None:
                    assert lines.readline() == f"{stage}\n"
                    process.send_signal(how)

                threading.Thread(target=strike, daemon=True).start()
            started = time.monotonic()
            with pytest.raises((WeightError, DeadlineExceeded), match=r"partner-\d+"):
                learner.publish(publication(1, SIZE), 20)
            assert time.monotonic() - started < 20
            learner.publish(publication(2, SIZE), 20)
            well.join()
        finally:
            process.kill()


@pytest.mark.slow
def test_a_payload_of_more_than_two_to_the_31_bytes_arrives(
    learner: CollectiveSender, member: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np
    import xxhash

    from headway.weights import Payload, PayloadHeader, PayloadKind

    monkeypatch.setattr(collective_group, "CHUNK_BYTES", 16 << 20)
    num_bytes = 2_200_000_000
    data = np.arange(num_bytes // 8, dtype=np.uint64).view(np.uint8)
    header = PayloadHeader(PolicyVersion(0, 1), PayloadKind.WHOLE, "", "s", num_bytes, "s")
    whole = Payload(header, (memoryview(data),))
    end = member("g")
    into = np.zeros(num_bytes, dtype=np.uint8)

    def fetch() -> None:
        end.wait(20)
        end.fetch(end.newest(None, ""), memoryview(into), 300)

    end.wait(0)
    thread = threading.Thread(target=fetch)
    thread.start()
    learner.publish(Publication(header.version, "s", (), header, lambda: whole, False), 300)
    thread.join()
    assert xxhash.xxh3_64_intdigest(into) == xxhash.xxh3_64_intdigest(data)
