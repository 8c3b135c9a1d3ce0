"""The tcp channel: right bytes whatever is cut, killed or refused, and the learner's share of the work."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.errors import DeadlineExceeded, StreamError, WeightError
from headway.types import PolicyVersion
from headway.weights import Publication
from headway.weights.tcp import TcpSender
from headway.weights.tcp_data import DataServer
from headway.weights.tcp_link import TcpAddress, TcpTiming, split_port
from headway.weights.tcp_receiver import TcpReceiver
from headway.weights.tcp_wire import Want

Publish = Callable[..., Publication]
Start = Callable[..., Any]
Keep = Callable[[Any], Any]
QUICK = TcpTiming(alive_s=0.1, stall_s=0.5, gone_s=3.0)
CHUNK = 16 << 10
SIZE = 1_000_003


def intercept(learner: TcpSender, proxy: Start) -> tuple[Any, str]:
    """A proxy before the port that chunks come from, and the learner's address by way of it."""
    address = TcpAddress.parse(learner.address)
    if address.data:
        cutter = proxy(split_port(address.data))
        return cutter, str(replace(address, data=f"tcp://127.0.0.1:{cutter.port}"))
    cutter = proxy(split_port(address.endpoint))
    return cutter, str(replace(address, endpoint=f"tcp://127.0.0.1:{cutter.port}"))


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 40 * CHUNK + 17])
def test_a_whole_state_of_any_size_arrives(
    num_bytes: int, sender: Start, receiver: Start, publication: Publish, read: Start
) -> None:
    learner = sender()
    reader = read(receiver(learner.address), 1)
    learner.publish(publication(1, num_bytes), 10)
    reader.join()
    learner.settle(10, num_receivers=1)
    assert learner.bytes_sent == num_bytes


def test_a_holder_of_the_base_gets_the_delta_and_a_joiner_the_whole_state(
    sender: Start, receiver: Start, publication: Publish, read: Start
) -> None:
    learner = sender()
    learner.publish(publication(1, SIZE), 10)
    old = read(receiver(learner.address, "old"), 2)
    while old.held is None:
        time.sleep(0.01)
    learner.publish(publication(2, SIZE, base=1), 10)
    old.join()
    new = read(receiver(learner.address, "new"), 2)
    new.join()
    assert [header.kind for header in old.fetched] == ["whole", "delta"]
    assert [header.kind for header in new.fetched] == ["whole"]


def test_newest_names_nothing_to_those_who_hold_it_and_the_whole_state_to_those_who_distrust_theirs(
    sender: Start, receiver: Start, publication: Publish
) -> None:
    learner = sender()
    end = receiver(learner.address)
    assert end.newest(None, "") is None
    learner.publish(publication(2, 100, base=1), 10)
    end.wait(5)
    one, two = PolicyVersion(0, 1), PolicyVersion(0, 2)
    assert end.newest(two, "s2") is None
    assert end.newest(one, "s1").base_digest == "s1"
    assert end.newest(one, "other").base_digest == ""
    assert end.newest(two, "").base_digest == ""


@pytest.mark.parametrize(("fan_out", "share"), [(1, 1.1), (2, 2.2)])
def test_eight_receivers_cost_the_learner_no_more_than_its_fan_out(
    fan_out: int, share: float, sender: Start, receiver: Start, publication: Publish, read: Start
) -> None:
    learner = sender(fan_out=fan_out, timing=TcpTiming())
    ends = [receiver(learner.address, f"g{index}", timing=TcpTiming()) for index in range(8)]
    readers = [read(end, 3) for end in ends]
    for step in (1, 2, 3):
        before = learner.bytes_sent
        learner.publish(publication(step, SIZE), 10)
        learner.settle(30, num_receivers=8)
        assert learner.bytes_sent - before <= share * SIZE
    for reader in readers:
        reader.join()
    relayed = sum(end.bytes_relayed for end in ends)
    assert learner.bytes_sent + relayed >= 8 * 3 * SIZE
    assert learner.num_rescues == 0


def test_a_transfer_that_is_cut_again_and_again_goes_on_where_it_was(
    plain: bool,
    sender: Start,
    receiver: Start,
    publication: Publish,
    read: Start,
    proxy: Start,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts: list[int] = []
    answer = DataServer.answer

    def noted(server: DataServer, connection: Any, want: Want) -> None:
        starts.append(want.index)
        answer(server, connection, want)

    monkeypatch.setattr(DataServer, "answer", noted)
    learner = sender()
    dice = random.Random(4)
    cutter, address = intercept(learner, proxy)
    cutter.budget = [dice.randrange(2_000, SIZE // 6) for _ in range(12)]
    end = receiver(address)
    reader = read(end, 1, deadline_s=30.0)
    learner.publish(publication(1, SIZE), 10)
    reader.join(40)
    assert reader.failures == [], "a cut is no failure of a fetch"
    assert cutter.num_cut >= 3
    if plain:
        assert starts == sorted(starts)
        assert len(starts) > cutter.num_cut
        assert starts[-1] > len(range(0, SIZE, CHUNK)) // 3, "what had come was asked for again"
    else:  # per cut, what was in flight or in the socket buffers is sent again, and nothing else
        assert learner.bytes_sent <= SIZE + cutter.num_cut * 2 * 8 * CHUNK


def test_a_learner_that_falls_silent_ends_a_fetch_at_its_deadline(
    sender: Start, receiver: Start, publication: Publish, proxy: Start
) -> None:
    learner = sender()
    cutter, address = intercept(learner, proxy)
    end = receiver(address)
    learner.publish(publication(1, SIZE), 10)
    end.wait(5)
    header = end.newest(None, "")
    cutter.frozen.set()
    into = bytearray(SIZE)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=rf"of {SIZE} bytes of weights 0.1 came from tcp://"):
        end.fetch(header, memoryview(into), 1.0)
    assert time.monotonic() - started < 3
    left = bytes(into)
    cutter.frozen.clear()
    time.sleep(0.3)  # whatever comes now must not be written into memory that was given back
    assert bytes(into) == left


def test_a_relay_that_goes_silent_is_routed_around(
    sender: Start, receiver: Start, publication: Publish, read: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = sender(fan_out=1)
    relay, child, grandchild = (receiver(learner.address, name) for name in ("relay", "child", "grandchild"))
    for end in (child, grandchild):
        assert end._offer is not None
        assert end._offer.parent
    over = threading.Event()
    if relay._data is not None:  # as if frozen, towards those who ask it
        relay._data.answer = lambda connection, want: over.wait(20)
    else:
        relay._relay.turn = lambda: None
        relay._relay.server.reassure = lambda: None
    readers = [read(end, 2) for end in (relay, child, grandchild)]
    learner.publish(publication(1, SIZE), 10)
    learner.settle(20, num_receivers=3)
    learner.publish(publication(2, SIZE), 10)
    for reader in readers:
        reader.join()
        assert reader.failures == []
    over.set()


def test_a_relay_whose_generator_does_not_fetch_holds_nobody_up(
    sender: Start, receiver: Start, publication: Publish, read: Start
) -> None:
    learner = sender(fan_out=1)
    idle = receiver(learner.address, "idle")
    child = receiver(learner.address, "child")
    assert child._offer is not None
    assert child._offer.parent == idle._hello.endpoint
    reader = read(child, 1)
    learner.publish(publication(1, SIZE), 10)
    reader.join()
    assert learner.num_rescues == 1
    with pytest.raises(DeadlineExceeded, match="still missing at idle-"):
        learner.settle(0.2)


def test_a_relay_whose_memory_was_reused_hands_nothing_wrong_on(
    sender: Start, receiver: Start, publication: Publish, read: Start
) -> None:
    learner = sender(fan_out=1)
    relay = receiver(learner.address, "relay")
    learner.publish(publication(1, SIZE), 10)
    relay.wait(5)
    into = bytearray(SIZE)
    relay.fetch(relay.newest(None, ""), memoryview(into), 10)
    into[:] = bytes(SIZE)
    child = receiver(learner.address, "child")
    reader = read(child, 1)
    reader.join()
    assert child.rejected["digest"] >= 1
    assert reader.failures == []


def test_settle_raises_a_receivers_own_words_and_the_next_push_works(
    sender: Start, receiver: Start, publication: Publish, read: Start
) -> None:
    learner = sender()
    end = receiver(learner.address, "choosy")
    learner.publish(publication(1, SIZE), 10)
    end.wait(5)
    end.fetch(end.newest(None, ""), memoryview(bytearray(SIZE)), 10)
    learner.settle(10)
    end.ask_whole("the seventh tensor has no home here")
    while not any(text for _, text in learner._outcomes.values()):
        time.sleep(0.01)
    with pytest.raises(WeightError, match=r"choosy-.*the seventh tensor has no home here"):
        learner.settle(1)
    reader = read(end, 2)
    learner.publish(publication(2, SIZE), 10)
    learner.settle(10, num_receivers=1)
    reader.join()


def test_the_words_of_a_fetch_that_failed_reach_the_learner(
    sender: Start, receiver: Start, publication: Publish
) -> None:
    learner = sender(fan_out=1, timing=TcpTiming(alive_s=0.1, stall_s=30))
    receiver(learner.address, "idle", timing=TcpTiming(alive_s=0.1, stall_s=30))
    end = receiver(learner.address, "slow", timing=TcpTiming(alive_s=0.1, stall_s=30))
    learner.publish(publication(1, SIZE), 10)
    end.wait(5)
    with pytest.raises(DeadlineExceeded):
        end.fetch(end.newest(None, ""), memoryview(bytearray(SIZE)), 0.5)
    with pytest.raises(WeightError, match=f"slow-.* 0 of {SIZE} bytes of weights 0.1 came"):
        learner.settle(5, num_receivers=3)


def test_a_transfer_in_progress_is_not_cut_off_by_newer_versions(
    sender: Start, receiver: Start, publication: Publish, until: Callable[..., None]
) -> None:
    learner = sender(chunks_in_flight=1)
    end = receiver(learner.address)
    learner.publish(publication(1, SIZE), 10)
    end.wait(5)
    header = end.newest(None, "")
    into = bytearray(SIZE)
    errors: list[Exception] = []

    def fetch() -> None:
        try:
            end.fetch(header, memoryview(into), 20)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    while learner.bytes_sent == 0:
        time.sleep(0.001)
    for step in (2, 3, 4):
        learner.publish(publication(step, 100), 10)
    thread.join(20)
    assert errors == []
    assert bytes(into) == b"".join(bytes(part) for part in publication(1, SIZE).whole().parts)
    until(lambda: len(learner._shelf) == 1, "an old version's memory is let go of once nobody wants it")


def test_a_version_that_was_replaced_before_its_transfer_began_is_refused_by_name(
    sender: Start, receiver: Start, publication: Publish
) -> None:
    learner = sender()
    end = receiver(learner.address)
    learner.publish(publication(1, SIZE), 10)
    end.wait(5)
    old = end.newest(None, "")
    learner.publish(publication(2, SIZE), 10)
    deadline = time.monotonic() + 10
    while end.newest(None, "").version == old.version and time.monotonic() < deadline:
        end.wait(0.2)  # until the learner offers the new one, the old one may still be fetched
    with pytest.raises(WeightError, match=r"weights 0\.1 have been replaced by newer ones"):
        end.fetch(old, memoryview(bytearray(SIZE)), 10)


@pytest.mark.parametrize(
    ("run", "manifest", "what"), [("other", "manifest", "run"), ("run", "other", "manifest")]
)
def test_another_run_or_model_is_refused_with_both_names(
    run: str, manifest: str, what: str, sender: Start, until: Callable[..., None]
) -> None:
    learner = sender()
    with pytest.raises(WeightError, match=f"this learner's {what} is '{what}', the receiver's is 'other'"):
        TcpReceiver(learner.address, run, manifest, timing=QUICK, join_s=10)
    assert learner.num_receivers == 0
    until(lambda: learner.rejected[what] >= 1)  # counted after the refusal has gone out


def test_nobody_at_the_address_is_said_after_the_deadline() -> None:
    address = str(TcpAddress("tcp://127.0.0.1:9", CHUNK, 8))
    with pytest.raises(
        DeadlineExceeded, match=r"no answer from the weight channel at tcp://127.0.0.1:9 after 0.3 s"
    ):
        TcpReceiver(address, "run", "manifest", join_s=0.3)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "tcp://h:1",
        "ipc:///x?chunk_bytes=9&chunks_in_flight=1",
        "tcp://h:1?chunk_bytes=x&chunks_in_flight=1",
    ]
    + [
        f"tcp://h:1?chunk_bytes={size}&chunks_in_flight={many}"
        for size, many in ((0, 1), (1 << 40, 1), (9, 0))
    ],
)
def test_an_address_that_no_learner_would_give_is_refused(address: str) -> None:
    with pytest.raises(StreamError, match=r"chunks of|no address of the tcp channel"):
        TcpAddress.parse(address)


def test_other_machines_are_kept_out_without_keys(sender: Start) -> None:
    with pytest.raises(StreamError, match=r"refused to bind tcp://0\.0\.0\.0:0"):
        sender(endpoint="tcp://0.0.0.0:0")
    with pytest.raises(StreamError, match=r"refused to connect to tcp://192\.0\.2\.1:5"):
        TcpReceiver(str(TcpAddress("tcp://192.0.2.1:5", CHUNK, 8)), "run", "manifest")


def test_an_address_for_all_interfaces_is_reached_by_the_learners_host(
    sender: Start, receiver: Start, publication: Publish, read: Start
) -> None:
    learner = sender(endpoint="tcp://0.0.0.0:0", insecure=True)
    learner.publish(publication(1, SIZE), 10)
    read(receiver(learner.address, learner_host="127.0.0.1"), 1).join()


def test_a_closed_end_says_so(sender: Start, receiver: Start, publication: Publish) -> None:
    learner = sender()
    end = receiver(learner.address)
    learner.publish(publication(1, SIZE), 10)
    end.wait(5)
    header = end.newest(None, "")
    end.close()
    with pytest.raises(WeightError, match="is closed"):
        end.fetch(header, memoryview(bytearray(SIZE)), 5)
    learner.close()
    with pytest.raises(WeightError, match="is closed"):
        learner.publish(publication(2, SIZE), 10)


MEMBER = Path(__file__).with_name("member.py")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_relaying_process_that_dies_or_hangs_in_a_transfer_takes_nobody_with_it(
    how: signal.Signals,
    sender: Start,
    receiver: Start,
    publication: Publish,
    read: Start,
    until: Callable[..., None],
) -> None:
    learner = sender(fan_out=1)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, MEMBER, learner.address], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "joined\n"
            child, grandchild = receiver(learner.address, "child"), receiver(learner.address, "grandchild")
            readers = [read(end, 1) for end in (child, grandchild)]
            learner.publish(publication(1, 4 * SIZE), 10)
            assert process.stdout.readline() == "half\n"  # it sleeps in the middle of its transfer
            process.send_signal(how)
            for reader in readers:
                reader.join()
                assert reader.failures == []
            until(lambda: learner.num_receivers == 2)
            learner.settle(10, num_receivers=2)
            later = [read(end, 2) for end in (child, grandchild)]
            learner.publish(publication(2, SIZE), 10)
            learner.settle(10, num_receivers=2)
            for reader in later:
                reader.join()
        finally:
            process.kill()


@pytest.mark.slow
def test_a_payload_of_more_than_two_to_the_31_bytes_arrives(sender: Start, receiver: Start) -> None:
    import numpy as np
    import xxhash

    from headway.weights import Payload, PayloadHeader, PayloadKind

    num_bytes = 2_200_000_000
    data = np.arange(num_bytes // 8, dtype=np.uint64).view(np.uint8)
    header = PayloadHeader(PolicyVersion(0, 1), PayloadKind.WHOLE, "", "s", num_bytes, "s")
    whole = Payload(header, (memoryview(data),))
    learner = sender(chunk_bytes=1 << 20, timing=TcpTiming())
    end = receiver(learner.address, timing=TcpTiming())
    learner.publish(Publication(header.version, "s", (), header, lambda: whole, False), 10)
    end.wait(5)
    into = np.zeros(num_bytes, dtype=np.uint8)
    end.fetch(end.newest(None, ""), memoryview(into), 300)
    assert xxhash.xxh3_64_intdigest(into) == xxhash.xxh3_64_intdigest(data)
