"""What the journal records, typed: one struct per kind, MessagePack, except that messages keep their raw frames."""

from __future__ import annotations

import enum
import struct

import msgspec

from headway.errors import JournalError
from headway.journal.disk import Buffer
from headway.types import PolicyVersion, Ticket


class RecordKind(enum.IntEnum):
    """The kinds; a number never changes its meaning."""

    OPENED = 1
    TICKET_ISSUED = 2
    MESSAGE_RECEIVED = 3
    TICKET_ENDED = 4
    BATCH_SELECTED = 5
    STEP_TRAINED = 6
    LIVE_CHANGE = 7
    SEALED = 8
    PUBLISHED = 9


class Opened(msgspec.Struct, frozen=True):
    """A learner began to write. First record of every attempt at a run.

    Attributes:
        run_id: of the run; epoch: of the versions that follow.
        step: optimizer steps that the weights have seen when it starts.
        time_s: Unix time.
    """

    run_id: str
    epoch: int
    step: int
    time_s: float


class TicketIssued(msgspec.Struct, frozen=True):
    """A ticket goes out to one generator (its incarnation); recorded before the Grant is sent."""

    ticket: Ticket
    incarnation: str
    time_s: float


class MessageReceived(msgspec.Struct, frozen=True):
    """A Trajectories message as it came; recorded before its Received is sent.

    Attributes:
        incarnation: of the generator that sent it; time_s: Unix time.
        step: optimizer steps that the learner's weights had seen.
        frames: of the message, undecoded; headway.wire.decode reads them.
    """

    incarnation: str
    time_s: float
    step: int
    frames: list[Buffer]


class TicketEnded(msgspec.Struct, frozen=True):
    """A ticket ended without being trained; `reason` is a DropReason value."""

    ticket_id: int
    reason: str
    time_s: float


class BatchSelected(msgspec.Struct, frozen=True):
    """These groups, in this order, are trained in the optimizer step that makes `step`.

    Attributes:
        trajectory_ids: per group, those that are trained.
        masked_below: per group: tokens sampled by weights of an older step carry no loss; 0: all do.
    """

    step: int
    ticket_ids: list[int]
    time_s: float
    trajectory_ids: list[list[str]] = []
    masked_below: list[int] = []


class StepTrained(msgspec.Struct, frozen=True):
    """An optimizer step is done; `version` is the newest after it.

    Attributes:
        ticket_ids: trained in it; skipped: the gradient was not finite, so the weights are as before.
    """

    version: PolicyVersion
    ticket_ids: list[int]
    skipped: bool


class Published(msgspec.Struct, frozen=True):
    """A version's weights were pushed; `digest` is that of the published bytes."""

    version: PolicyVersion
    digest: str


class LiveChange(msgspec.Struct, frozen=True):
    """A key of the recipe took another value, in force for everything recorded after this."""

    step: int
    key: str
    value: str


Entry = (
    Opened
    | TicketIssued
    | MessageReceived
    | TicketEnded
    | BatchSelected
    | StepTrained
    | LiveChange
    | Published
)

_KINDS: dict[type[Entry], RecordKind] = {
    Opened: RecordKind.OPENED,
    TicketIssued: RecordKind.TICKET_ISSUED,
    MessageReceived: RecordKind.MESSAGE_RECEIVED,
    TicketEnded: RecordKind.TICKET_ENDED,
    BatchSelected: RecordKind.BATCH_SELECTED,
    StepTrained: RecordKind.STEP_TRAINED,
    LiveChange: RecordKind.LIVE_CHANGE,
    Published: RecordKind.PUBLISHED,
}
_TYPES = {kind: entry for entry, kind in _KINDS.items()}
_ENCODER = msgspec.msgpack.Encoder()
_COUNT = struct.Struct("<H")
_LENGTH = struct.Struct("<I")


class _MessageHead(msgspec.Struct, frozen=True, array_like=True):
    incarnation: str
    time_s: float
    step: int


def pack(entry: Entry) -> tuple[RecordKind, list[Buffer]]:
    """What Journal.append takes. The frames of a MessageReceived are not copied."""
    if not isinstance(entry, MessageReceived):
        return _KINDS[type(entry)], [_ENCODER.encode(entry)]
    head = _ENCODER.encode(_MessageHead(entry.incarnation, entry.time_s, entry.step))
    views = [memoryview(frame).cast("B") for frame in entry.frames]
    lengths = b"".join(_LENGTH.pack(view.nbytes) for view in (memoryview(head), *views))
    return RecordKind.MESSAGE_RECEIVED, [_COUNT.pack(1 + len(views)) + lengths + head, *entry.frames]


def unpack(kind: RecordKind, payload: bytes) -> Entry:
    """The entry of a record; the frames of a MessageReceived are views of `payload`.

    Raises:
        JournalError: the payload is no entry of this kind (a seal has none).
    """
    entry = _TYPES.get(kind)
    try:
        if entry is MessageReceived:
            return _unpack_message(payload)
        if entry is not None:
            return msgspec.msgpack.decode(payload, type=entry)
    except (msgspec.MsgspecError, struct.error, ValueError) as error:
        raise JournalError(f"a record of kind {kind.name} cannot be read: {str(error)[:200]}") from None
    raise JournalError(f"a record of kind {kind.name} has no entry")


def _unpack_message(payload: bytes) -> MessageReceived:
    (count,) = _COUNT.unpack_from(payload)
    at = _COUNT.size + count * _LENGTH.size
    pieces: list[memoryview] = []
    whole = memoryview(payload)
    for index in range(count):
        (length,) = _LENGTH.unpack_from(payload, _COUNT.size + index * _LENGTH.size)
        pieces.append(whole[at : at + length])
        at += length
    if at != len(payload) or not pieces:
        raise ValueError(f"{count} pieces end at byte {at} of {len(payload)}")
    head = msgspec.msgpack.decode(pieces[0], type=_MessageHead)
    return MessageReceived(head.incarnation, head.time_s, head.step, [*pieces[1:]])
