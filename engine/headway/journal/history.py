"""What became of each trajectory, read back from a journal.

The heads of the messages are read with a MessagePack decoder that is not ours and knows none of our types, so that
a message is shown as it was sent even where this version would refuse it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import msgpack
import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.errors import JournalError, WireError
from headway.journal.position import Position
from headway.journal.reader import Reader
from headway.journal.records import (
    BatchSelected,
    Entry,
    MessageReceived,
    Opened,
    StepTrained,
    TicketEnded,
    TicketIssued,
    unpack,
)
from headway.types import DropReason, Ticket
from headway.wire import decode
from headway.wire.check import validate_trajectory
from headway.wire.messages import Trajectories

OPEN, TRAINED = "open", "trained"
_PREFIX = struct.Struct("<4sHH")


class Row(msgspec.Struct):
    """One member of one group, as it was received.

    Attributes:
        oldest, newest: (epoch, step) of the versions that sampled it; None for a failed member.
        num_sampled: sampled tokens. received_s: Unix time.
        state: "open", "trained", or the reason for which it was dropped; detail: more of it, for people.
        step: the optimizer step that consumed it; lag: of its oldest token then; queue_s: from its arrival to then.
        attempt: which start of the learner received it, from 1.
        received_step: optimizer steps that the learner's weights had seen when it arrived.
        issued_s: Unix time at which its ticket went out last; None where the journal does not hold it any more.
        position, index: the message in the journal, and its place among the message's trajectories.
    """

    trajectory_id: str
    ticket_id: int
    member: int
    prompt_index: int
    oldest: tuple[int, int] | None
    newest: tuple[int, int] | None
    num_sampled: int
    reward: float | None
    finish_reason: str
    received_s: float
    position: Position
    index: int
    state: str = OPEN
    detail: str = ""
    attempt: int = 0
    step: int | None = None
    lag: int | None = None
    queue_s: float | None = None
    received_step: int = 0
    issued_s: float | None = None


class Shown(msgspec.Struct, frozen=True):
    """The content of one trajectory.

    Attributes:
        prompt_ids, completion_ids: int32; logprobs: float32, of the completion.
    """

    row: Row
    prompt_ids: NDArray[np.int32]
    completion_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


class History:
    """Rows, in the order in which they were received. Feed it entries, then read `rows`."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._by_ticket: dict[int, list[Row]] = {}
        self._tickets: dict[int, Ticket] = {}
        self._issued: dict[int, float] = {}
        self._ended: dict[int, str] = {}
        self._attempt = 0

    @classmethod
    def of(cls, reader: Reader) -> History:
        """Everything that a reader yields.

        Raises:
            JournalError: as the reader, and for a record that cannot be read.
        """
        history = cls()
        for position, record in reader:
            history.add(position, unpack(record.kind, record.payload))
        return history

    def add(self, position: Position, entry: Entry) -> None:
        """One more entry; they come in the journal's order."""
        match entry:
            case Opened():
                self._roll_back(entry.step)
            case TicketIssued():
                self._tickets[entry.ticket.ticket_id] = entry.ticket
                self._issued[entry.ticket.ticket_id] = entry.time_s
                self._ended.pop(entry.ticket.ticket_id, None)
            case MessageReceived():
                self._received(position, entry)
            case TicketEnded():
                self._ended[entry.ticket_id] = entry.reason
                for row in self._open([entry.ticket_id]):
                    row.state = entry.reason
            case BatchSelected():
                for row in self._open(entry.ticket_ids):
                    row.step = entry.step
                    row.queue_s = entry.time_s - row.received_s
                    row.lag = None if row.oldest is None else entry.step - 1 - row.oldest[1]
            case StepTrained():
                for row in self._open(entry.ticket_ids):
                    row.state = TRAINED
                    row.detail = "the step was skipped: its gradient was not finite" if entry.skipped else ""
                self._ended.update(dict.fromkeys(entry.ticket_ids, TRAINED))
            case _:
                pass

    def _open(self, ticket_ids: Iterable[int]) -> list[Row]:
        rows = (row for ticket_id in ticket_ids for row in self._by_ticket.get(ticket_id, ()))
        return [row for row in rows if row.state == OPEN]

    def _roll_back(self, step: int) -> None:
        """A learner goes on from `step`: what later steps had trained is open again, or was sampled in vain."""
        for row in self.rows:
            if row.step is not None and row.step > step:
                row.state, row.step, row.lag, row.queue_s = OPEN, None, None, None
                row.detail = "trained once in a step that was rolled back"
                self._ended.pop(row.ticket_id, None)
        self._attempt += 1

    def _received(self, position: Position, entry: MessageReceived) -> None:
        head = read_head(entry)
        faults = _faults(entry, self._tickets)
        for index, item in enumerate(head.get("trajectories", ())):
            spans = item["spans"]
            fault = faults.get(index, "")
            row = Row(
                trajectory_id=str(item["trajectory_id"]),
                ticket_id=int(item["ticket_id"]),
                member=int(item["member"]),
                prompt_index=int(item["prompt_index"]),
                oldest=min((_version(span) for span in spans), default=None),
                newest=max((_version(span) for span in spans), default=None),
                num_sampled=sum(int(end) - int(start) for start, end, _ in spans),
                reward=item["reward"],
                finish_reason=str(item["finish_reason"]),
                received_s=entry.time_s,
                received_step=entry.step,
                position=position,
                index=index,
            )
            if fault:
                row.state, row.detail = DropReason.INVALID.value, fault
            elif row.reward is None or not np.isfinite(row.reward):
                row.state = DropReason.REWARD_FAILED.value
            self._arrived(row)
        for item in head.get("failures", ()):
            name = f"{entry.incarnation}.{item['ticket_id']}.{item['member']}"
            row = Row(
                trajectory_id=name,
                ticket_id=int(item["ticket_id"]),
                member=int(item["member"]),
                prompt_index=-1,
                oldest=None,
                newest=None,
                num_sampled=int(item["num_tokens"]),
                reward=None,
                finish_reason="",
                received_s=entry.time_s,
                received_step=entry.step,
                position=position,
                index=-1,
                state=str(item["reason"]),
                detail=str(item["detail"]),
            )
            self._arrived(row)

    def _arrived(self, row: Row) -> None:
        row.attempt = self._attempt
        row.issued_s = self._issued.get(row.ticket_id)
        before = self._by_ticket.setdefault(row.ticket_id, [])
        if row.state == OPEN:
            if row.ticket_id in self._ended:
                row.state = DropReason.TICKET_CLOSED.value
            elif row.ticket_id not in self._tickets:
                row.state = DropReason.UNKNOWN_TICKET.value
        for other in [other for other in before if other.member == row.member and other.state == OPEN]:
            if other.attempt == row.attempt:
                row.state = DropReason.DUPLICATE.value
            else:  # a resume had taken the ticket back, and it was generated anew
                other.state = DropReason.ABANDONED_VERSION.value
        self.rows.append(row)
        before.append(row)


def read_head(entry: MessageReceived) -> dict[str, Any]:
    """The head of a Trajectories message as plain values.

    Raises:
        JournalError: it is none.
    """
    try:
        head = msgpack.unpackb(bytes(entry.frames[0])[_PREFIX.size :])
    except (ValueError, IndexError, msgpack.UnpackException) as error:
        raise JournalError(f"a message of {entry.incarnation} cannot be read: {error}") from None
    if not isinstance(head, dict) or head.get("kind") != "Trajectories":
        raise JournalError(f"a message of {entry.incarnation} is not one of trajectories")
    return head


def show(entry: MessageReceived, row: Row) -> Shown:
    """The content of a row of this message.

    Raises:
        JournalError: the row is a failed member, which has none, or is not of this message.
    """
    items = read_head(entry)["trajectories"]
    if not 0 <= row.index < len(items) or items[row.index]["trajectory_id"] != row.trajectory_id:
        raise JournalError(f"{row.trajectory_id} has no content: {row.state} {row.detail}".rstrip())
    start = sum(int(item["token_ids"]) for item in items[: row.index])
    length, prompt = int(items[row.index]["token_ids"]), int(items[row.index]["prompt_length"])
    ids = np.frombuffer(bytes(entry.frames[1]), "<i4")[start : start + length]
    logprobs = np.frombuffer(bytes(entry.frames[3]), "<f4")[start : start + length]
    return Shown(row, ids[:prompt], ids[prompt:], logprobs[prompt:])


def _version(span: Any) -> tuple[int, int]:
    _, _, (epoch, step) = span
    return int(epoch), int(step)


def _faults(entry: MessageReceived, tickets: dict[int, Ticket]) -> dict[int, str]:
    """Why trajectories of the message were invalid, by their place in it."""
    try:
        message = decode(entry.frames)
    except WireError as fault:
        return {index: str(fault) for index in range(1 << 16)}
    if not isinstance(message, Trajectories):
        return {}
    found: dict[int, str] = {}
    for index, trajectory in enumerate(message.trajectories):
        ticket = tickets.get(trajectory.ticket_id)
        fault = validate_trajectory(trajectory, ticket) if ticket is not None else None
        if fault is not None:
            found[index] = fault
    return found
