"""After a crash: what the journal holds beyond the checkpoint is attached to the state of the checkpoint.

The checkpoint is the past that counts. What came later is treated by these rules, in this order:

1. Every ticket in flight is taken back; it goes out again under its id, with its seed, as long as its content is
   not there.
2. A trajectory with a token of weights that were rolled back ends as abandoned_version.
3. Every other trajectory goes to its ticket, if that is open, is for the same prompt and lacks this member.
   Tickets of after the checkpoint are issued again for it, in their order; ids and prompts follow from the
   checkpoint, so they come out the same unless a generator was lost in between.
4. With max_lag = 0 a round that is not complete is sampled again as a whole: fewer rows in a batch would round
   differently. What is there of it ends as duplicate, for the same tokens come again.
5. Failures are only counted: their members have another chance. Drops and batches of after the checkpoint did
   not happen; they are decided again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headway.buffer import Buffer
from headway.config import RunConfig
from headway.journal import Entry, MessageReceived, TicketIssued
from headway.learner.judge import GroupJudge
from headway.learner.prompts import PromptSource
from headway.learner.receipts import Receipts
from headway.learner.tickets import TicketMaker
from headway.staleness import UNASSIGNED
from headway.types import DropReason, Trajectory
from headway.wire import decode
from headway.wire.check import validate_trajectory
from headway.wire.messages import Trajectories


@dataclass
class Recovered:
    """What became of the journal's content.

    Attributes:
        kept: trajectories in the buffer again; abandoned, refused: ended, as abandoned_version or otherwise.
        taken_back: tickets to go out again.
    """

    kept: int = 0
    abandoned: int = 0
    refused: int = 0
    taken_back: int = 0

    def __str__(self) -> str:
        return (
            f"{self.kept} trajectories recovered from the journal, {self.abandoned} of steps that are rolled back "
            f"dropped, {self.refused} refused; {self.taken_back} tickets go out again"
        )


class Recovery:
    """Attaches the journal to a restored desk, before any generator joins.

    Args:
        config: the recipe; buffer: restored, as the gate is; prompts, tickets: make the tickets again.
        receipts: of the checkpoint. round_start: first ticket of the newest grant that it knows.
    """

    def __init__(
        self,
        config: RunConfig,
        buffer: Buffer,
        prompts: PromptSource,
        tickets: TicketMaker,
        receipts: Receipts,
        round_start: int,
    ) -> None:
        self._gate = buffer.gate
        self._receipts = receipts
        self._buffer = buffer
        self._prompts = prompts
        self._tickets = tickets
        self._judge = GroupJudge(config)
        self._rounds = {round_start}
        self._found = Recovered()

    def run(self, entries: Iterable[Entry]) -> Recovered:
        """Attach the entries that follow the checkpoint's position in the journal."""
        messages = self._read(entries)
        kept = [t for message in messages for t in message.trajectories if not self._is_abandoned(t)]
        self._issue_up_to(max((t.ticket_id for t in kept), default=-1))
        for message in messages:
            self._take(message)
        self._gate.ledger.retire()
        if self._gate.policy.max_lag == 0:
            self._give_up_partial_round()
        self._found.taken_back = len(self._gate.ledger.unassigned)
        return self._found

    def _read(self, entries: Iterable[Entry]) -> list[Trajectories]:
        messages: list[Trajectories] = []
        granting = False
        for entry in entries:
            issued = isinstance(entry, TicketIssued)
            if issued and not granting:  # the tickets of one grant follow each other
                self._rounds.add(entry.ticket.ticket_id)
            granting = issued
            message = decode(entry.frames) if isinstance(entry, MessageReceived) else None
            if isinstance(message, Trajectories) and self._receipts.is_new(message.seq, message.incarnation):
                messages.append(message)
        return messages

    def _issue_up_to(self, ticket_id: int) -> None:
        ledger = self._gate.ledger
        while ledger.next_ticket_id <= ticket_id:
            prompt = self._prompts.next()
            if prompt is None:
                return
            ticket = self._tickets.make(ledger.next_ticket_id, prompt, self._gate.version)
            self._buffer.issued(ticket, UNASSIGNED)

    def _take(self, message: Trajectories) -> None:
        ledger = self._gate.ledger
        for trajectory in message.trajectories:
            reason = self._refusal(trajectory)
            if reason is not None:
                ledger.refuse(reason, message.incarnation, trajectory.num_sampled)
                self._found.abandoned += reason is DropReason.ABANDONED_VERSION
                self._found.refused += reason is not DropReason.ABANDONED_VERSION
                continue
            ticket_id = trajectory.ticket_id
            ledger.assign(ticket_id, message.incarnation, ledger.admitted[ticket_id])
            arrival = self._buffer.add(trajectory, message.incarnation)
            if arrival.refused is not None:
                self._found.refused += 1
                continue
            self._found.kept += 1
            if arrival.finished is not None and self._judge.too_long(arrival.finished):
                self._buffer.drop(ticket_id, DropReason.ROW_TOO_SHORT)
        for failure in message.failures:
            ledger.fail(DropReason.ABANDONED_VERSION, message.incarnation, failure.num_tokens)
        ledger.report(message.incarnation, message.generated)

    def _refusal(self, trajectory: Trajectory) -> DropReason | None:
        if self._is_abandoned(trajectory):
            return DropReason.ABANDONED_VERSION
        ticket = self._buffer.ticket(trajectory.ticket_id)
        if ticket is None:
            known = trajectory.ticket_id < self._gate.ledger.next_ticket_id
            return DropReason.TICKET_CLOSED if known else DropReason.ABANDONED_VERSION
        if trajectory.prompt_index != ticket.prompt_index:
            return DropReason.ABANDONED_VERSION
        return DropReason.INVALID if validate_trajectory(trajectory, ticket) is not None else None

    def _is_abandoned(self, trajectory: Trajectory) -> bool:
        return any(self._gate.abandoned(span.version) for span in trajectory.spans)

    def _give_up_partial_round(self) -> None:
        unassigned = self._gate.ledger.unassigned
        if not unassigned:
            return
        start = max((first for first in self._rounds if first <= unassigned[0]), default=0)
        for ticket_id in sorted(self._gate.ledger.unended):
            if ticket_id >= start:
                self._buffer.give_up_content(ticket_id, DropReason.DUPLICATE)
