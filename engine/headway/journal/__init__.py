"""The journal: what happened to every ticket and trajectory of a run, on the learner's disk before it is acked.

    journal = Journal.open(folder, max_bytes=...)
    position = journal.log(BatchSelected(step=4, ticket_ids=[7, 8]))     # or append(kind, *parts)
    journal.commit()                                                      # one fsync for all since the last
    for position, record in read(folder, start): ...

docs/journal.md has the format and what a crash can and cannot do to it.
"""

from headway.journal.disk import Disk
from headway.journal.position import Position
from headway.journal.reader import Reader, TornTail, read
from headway.journal.records import (
    BatchSelected,
    Entry,
    LiveChange,
    MessageReceived,
    Opened,
    Published,
    RecordKind,
    StepTrained,
    TicketEnded,
    TicketIssued,
    pack,
    unpack,
)
from headway.journal.segment import Record
from headway.journal.writer import Journal

__all__ = [
    "BatchSelected",
    "Disk",
    "Entry",
    "Journal",
    "LiveChange",
    "MessageReceived",
    "Opened",
    "Position",
    "Published",
    "Reader",
    "Record",
    "RecordKind",
    "StepTrained",
    "TicketEnded",
    "TicketIssued",
    "TornTail",
    "pack",
    "read",
    "unpack",
]
