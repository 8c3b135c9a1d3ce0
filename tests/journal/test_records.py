"""Entries survive the journal; the frames of a message come back byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.errors import JournalError
from headway.journal import (
    BatchSelected,
    Entry,
    Journal,
    LiveChange,
    MessageReceived,
    Opened,
    RecordKind,
    StepTrained,
    TicketEnded,
    TicketIssued,
    read,
    unpack,
)
from headway.types import PolicyVersion, Sampling, Ticket

TICKET = Ticket(7, 3, [1, 2], 4, Sampling(1.0, 8, [0]), 99, PolicyVersion(0, 2), 60.0)
ENTRIES: list[Entry] = [
    Opened("run", 1, 2, 3.5),
    TicketIssued(TICKET, "g0-1", 4.5),
    TicketEnded(7, "stale", 5.5),
    BatchSelected(3, [4, 7], 6.5),
    StepTrained(PolicyVersion(1, 3), [4, 7], False),
    LiveChange(3, "staleness.max_lag", "2"),
]


def test_entries_come_back_as_they_went_in(tmp_path: Path) -> None:
    frames = [b"head", memoryview(b"\0\1\2\3").cast("i"), b"", bytes(range(256))]
    with Journal.open(tmp_path) as journal:
        for entry in ENTRIES:
            journal.log(entry)
        journal.log(MessageReceived("g0-1", 1.5, 9, frames))
    *entries, message = [unpack(record.kind, record.payload) for _, record in read(tmp_path)]
    assert entries == ENTRIES
    assert isinstance(message, MessageReceived)
    assert (message.incarnation, message.time_s, message.step) == ("g0-1", 1.5, 9)
    assert [bytes(frame) for frame in message.frames] == [bytes(frame) for frame in frames]


@pytest.mark.parametrize(
    "payload", [b"", b"\x01", b"\x01\x00\xff\xff\xff\xff", b"\x00\x00", b"\x02\x00" + b"\0" * 8 + b"x"]
)
def test_a_payload_that_is_no_message_is_refused(payload: bytes) -> None:
    with pytest.raises(JournalError, match="MESSAGE_RECEIVED cannot be read"):
        unpack(RecordKind.MESSAGE_RECEIVED, payload)


def test_a_payload_of_another_kind_is_refused() -> None:
    with pytest.raises(JournalError, match="BATCH_SELECTED cannot be read"):
        unpack(RecordKind.BATCH_SELECTED, b"\x80")
