"""Acked means on the disk. A full disk acks nothing, loses nothing, and in the end stops the run."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headway.errors import DeadlineExceeded, JournalFull
from headway.journal import (
    BatchSelected,
    Disk,
    Entry,
    Journal,
    MessageReceived,
    Published,
    StepTrained,
    TicketEnded,
    TicketIssued,
    read,
    unpack,
)
from headway.learner.intake import Intake
from headway.stream import GeneratorSocket, LearnerSocket
from headway.types import DropReason, PolicyVersion, Ticket, Trajectory
from headway.wire import decode
from headway.wire.messages import (
    SCHEMA,
    DataMessage,
    Grant,
    Hello,
    Received,
    Trajectories,
    WeightAck,
    Welcome,
)

DEADLINE_S = 10.0


class SmallDisk(Disk):
    """One that is full while `full` is set."""

    full = False

    def write(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, buffers, offset)


def entries(folder: Path) -> list[Entry]:
    return [unpack(record.kind, record.payload) for _, record in read(folder)]


@contextmanager
def served(place: Any, folder: Path, disk: Disk, **options: Any) -> Iterator[Intake]:
    with Journal.open(folder, disk=disk) as journal:
        place.desk.chronicle.journal = journal
        intake = Intake(place.desk, LearnerSocket, patience_s=60.0, **options)
        try:
            yield intake
        finally:
            intake.close("over")


class Peer:
    """A generator's socket, and every message that came on it."""

    def __init__(self, place: Any, intake: Intake, name: str = "g0-a") -> None:
        self.name = name
        self.heard: list[DataMessage] = []
        said = Hello(
            run_id="run", schema=SCHEMA, generator=0, incarnation=name, pid=os.getpid(), host="here", max_running=1,
            serving=None,
        )  # fmt: skip
        self.stream = GeneratorSocket.connect(intake.endpoints, lambda: said)
        version = PolicyVersion(0, 0)
        self.hear(Welcome)
        self.stream.send(
            WeightAck(incarnation=name, version=version, digest=place.digest_of(version), pause_s=0.0)
        )

    def hear(self, kind: type[DataMessage], num: int = 1) -> list[Any]:
        end = time.monotonic() + DEADLINE_S
        while len(found := [message for message in self.heard if isinstance(message, kind)]) < num:
            assert time.monotonic() < end, f"{len(found)} {kind.__name__} of {num}"
            self.heard.extend(self.stream.receive(0.05))
        return found

    def tickets(self, num: int) -> list[Ticket]:
        end = time.monotonic() + DEADLINE_S
        while len(found := [t for m in self.heard if isinstance(m, Grant) for t in m.tickets]) < num:
            assert time.monotonic() < end
            self.heard.extend(self.stream.receive(0.05))
        return found

    def send(self, seq: int, trajectories: list[Trajectory]) -> None:
        self.stream.send(
            Trajectories(
                incarnation=self.name, seq=seq, trajectories=trajectories, failures=[], generated=6 * seq
            )
        )


def test_a_run_of_one_step_is_all_in_the_journal_and_in_order(
    office: Callable[..., Any], make_trajectory: Callable[..., Trajectory], tmp_path: Path
) -> None:
    place = office()
    with served(place, tmp_path, Disk()) as intake:
        peer = Peer(place, intake)
        tickets = peer.tickets(2)
        on_disk = [entry for entry in entries(tmp_path) if isinstance(entry, TicketIssued)]
        assert [entry.ticket for entry in on_disk][:2] == tickets[:2]  # recorded before they were granted
        for seq, ticket in enumerate(tickets[:2], 1):
            members = [make_trajectory(ticket, k, reward=float(k), incarnation=peer.name) for k in range(2)]
            peer.send(seq, members)
        peer.hear(Received, 2)
        messages = [decode(entry.frames) for entry in entries(tmp_path) if isinstance(entry, MessageReceived)]
        assert [t.trajectory_id for m in messages if isinstance(m, Trajectories) for t in m.trajectories] == [
            f"g0-a.{ticket.ticket_id}.{k}" for ticket in tickets[:2] for k in range(2)
        ]
        groups = intake.take(lambda: False)
        intake.trained(groups, PolicyVersion(0, 1))
        intake.published(PolicyVersion(0, 1), "0123456789abcdef")
        with intake.lock:
            place.desk.buffer.drop(tickets[2].ticket_id, DropReason.DEADLINE)
        peer.stream.close()
    kinds = [type(entry) for entry in entries(tmp_path)]
    ids = [ticket.ticket_id for ticket in tickets[:2]]
    assert [
        entry for entry in entries(tmp_path) if isinstance(entry, (BatchSelected, StepTrained, Published))
    ] == [
        BatchSelected(
            step=1,
            ticket_ids=ids,
            time_s=pytest.approx(time.time(), abs=60),
            trajectory_ids=[[f"g0-a.{ticket_id}.{member}" for member in range(2)] for ticket_id in ids],
            masked_below=[0, 0],
        ),
        StepTrained(PolicyVersion(0, 1), ids, False),
        Published(PolicyVersion(0, 1), "0123456789abcdef"),
    ]
    assert kinds.index(MessageReceived) < kinds.index(BatchSelected) < kinds.index(StepTrained)
    (ended,) = [entry for entry in entries(tmp_path) if isinstance(entry, TicketEnded)][:1]
    assert (ended.ticket_id, ended.reason) == (tickets[2].ticket_id, "deadline")


def test_a_full_disk_acknowledges_nothing_until_there_is_space_and_then_everything(
    office: Callable[..., Any], make_trajectory: Callable[..., Trajectory], tmp_path: Path
) -> None:
    place, disk = office(), SmallDisk()
    with served(place, tmp_path, disk) as intake:
        peer = Peer(place, intake)
        tickets = peer.tickets(2)
        disk.full = True
        before = len(entries(tmp_path))
        peer.send(
            1, [make_trajectory(tickets[0], k, reward=float(k), incarnation=peer.name) for k in range(2)]
        )
        peer.send(
            2, [make_trajectory(tickets[1], k, reward=float(k), incarnation=peer.name) for k in range(2)]
        )
        end = time.monotonic() + DEADLINE_S
        while not place.desk.arrivals.num_sampled:  # it has read them
            assert time.monotonic() < end
            peer.heard.extend(peer.stream.receive(0.02))
        peer.heard.extend(peer.stream.receive(0.3))
        assert not any(isinstance(message, Received) for message in peer.heard)
        assert len(entries(tmp_path)) == before
        assert peer.stream.unacked == 2
        disk.full = False
        assert [message.seq for message in peer.hear(Received, 2)] == [1, 2]
        assert peer.stream.unacked == 0
        assert sum(isinstance(entry, MessageReceived) for entry in entries(tmp_path)) == 2
        peer.stream.close()


def test_a_disk_that_stays_full_stops_the_run_with_the_cause(
    office: Callable[..., Any], make_trajectory: Callable[..., Trajectory], tmp_path: Path
) -> None:
    place, disk = office(), SmallDisk()
    with pytest.raises(JournalFull), served(place, tmp_path, disk, full_wait_s=0.2) as intake:  # noqa: PT012
        peer = Peer(place, intake)
        tickets = peer.tickets(2)
        disk.full = True
        peer.send(1, [make_trajectory(tickets[0], 0, incarnation=peer.name)])
        with pytest.raises(JournalFull, match=r"no space .* there was none for 0\.2 s"):
            intake.take(lambda: False)
        assert peer.stream.unacked == 1  # it keeps what it was never told is safe
        peer.stream.close()  # and the journal, closed at the end, raises again: it still cannot be written


def test_a_full_disk_does_not_keep_a_run_from_ending(office: Callable[..., Any], tmp_path: Path) -> None:
    place, disk = office(), SmallDisk()
    disk.full = True
    with Journal.open(tmp_path, disk=disk) as journal:
        place.desk.chronicle.journal = journal
        place.desk.chronicle.changed(0, "a", "b")
        intake = Intake(place.desk, LearnerSocket, patience_s=0.3, full_wait_s=3600.0)
        with pytest.raises(DeadlineExceeded, match="no complete batch"):
            intake.take(lambda: False)
        started = time.monotonic()
        intake.close("over")
        assert time.monotonic() - started < DEADLINE_S
        disk.full = False


def test_a_message_sent_again_is_acknowledged_again_and_journalled_once(
    office: Callable[..., Any], make_trajectory: Callable[..., Trajectory], tmp_path: Path
) -> None:
    place = office()
    with served(place, tmp_path, Disk()) as intake:
        peer = Peer(place, intake)
        ticket = peer.tickets(1)[0]
        members = [make_trajectory(ticket, k, reward=float(k), incarnation=peer.name) for k in range(2)]
        peer.send(1, members)
        peer.hear(Received, 1)
        peer.send(1, members)
        peer.hear(Received, 2)
        assert sum(isinstance(entry, MessageReceived) for entry in entries(tmp_path)) == 1
        with intake.lock:
            assert place.check()["buffered"] == 1
        peer.stream.close()
