"""The ledger: every ticket, trajectory and sampled token is counted once when it opens and once when it ends.

    tickets       issued   = trained + dropped(by reason) + in_flight + buffered
    trajectories  received = trained + masked + dropped(by reason) + buffered
    tokens        received = trained + masked + dropped(by reason) + buffered

Tokens are sampled tokens. Those of a failed member arrive as a number only: they count as received and
dropped, their trajectory as `failed`. Tokens that died with a generator before it sent them are
`lost_unsent`, so that generated = received once + lost_unsent + still with a generator.

Ticket ids are admission indices 0, 1, 2, ...: an id below the next one that is not open has ended, so the
memory is that of the open tickets and one entry per generator start. Messages sent again after a reconnect
are dropped by their sequence number before they come here. One owner thread; nothing here blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec

from headway.staleness.accounts import MASKED, TRAINED, Account, GeneratorTokens
from headway.types import DropReason

UNASSIGNED = ""  # the generator of a ticket that a resume has taken back and not handed out again


class OpenTicket(msgspec.Struct):
    """An outstanding ticket and what was received for it so far.

    Attributes:
        generator: incarnation that holds it, or UNASSIGNED; admitted: step of the weights that it had acked then.
    """

    generator: str
    admitted: int = 0
    buffered: bool = False
    trajectories: int = 0
    tokens: int = 0


class LedgerState(msgspec.Struct, frozen=True):
    """A ledger as data, for checkpoints."""

    tickets: Account
    trajectories: Account
    tokens: Account
    open_tickets: dict[int, OpenTicket]
    generators: dict[str, GeneratorTokens]
    failed: int


class LedgerCounts(msgspec.Struct, frozen=True):
    """The counts of a StepRecord. `dropped` is tickets by reason; the other dicts carry "dropped.<reason>"
    too.
    """

    tickets: dict[str, int]
    trajectories: dict[str, int]
    tokens: dict[str, int]
    dropped: dict[str, int]


class Ledger:
    """Counts openings and endings; raises AssertionError when a thing would end twice."""

    def __init__(self, state: LedgerState | None = None) -> None:
        """Start empty, or from a state (which is copied)."""
        source = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=LedgerState) if state else None
        self.on_drop: Callable[[int, DropReason], None] = lambda ticket_id, reason: None
        """Told each ticket that ends untrained."""
        self._tickets = source.tickets if source else Account()
        self._trajectories = source.trajectories if source else Account()
        self._tokens = source.tokens if source else Account()
        self._open = source.open_tickets if source else {}
        self._generators = source.generators if source else {}
        self._failed = source.failed if source else 0
        self._admitted = {ticket_id: ticket.admitted for ticket_id, ticket in self._open.items()}
        self._buffered = {ticket_id for ticket_id, ticket in self._open.items() if ticket.buffered}
        self._num_unassigned = len(self.in_flight_at(UNASSIGNED))

    def state(self) -> LedgerState:
        """The ledger as data, detached from it."""
        state = LedgerState(
            self._tickets, self._trajectories, self._tokens, self._open, self._generators, self._failed
        )
        return msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=LedgerState)

    @property
    def next_ticket_id(self) -> int:
        """Id, and admission index, of the next ticket."""
        return self._tickets.opened

    @property
    def unended(self) -> Collection[int]:
        """Ids of the outstanding tickets, in flight or buffered. A live view."""
        return self._open.keys()

    @property
    def admitted(self) -> Mapping[int, int]:
        """Per outstanding ticket, the step of the weights that its generator had acked. A live view."""
        return self._admitted

    @property
    def in_flight(self) -> int:
        """Outstanding tickets whose group is not finished."""
        return len(self._open) - len(self._buffered)

    @property
    def unassigned(self) -> list[int]:
        """Ids in flight that no generator holds, in order."""
        return self.in_flight_at(UNASSIGNED) if self._num_unassigned else []

    @property
    def assigned(self) -> int:
        """Outstanding tickets that a generator holds."""
        return self.in_flight - self._num_unassigned

    @property
    def buffered(self) -> int:
        """Outstanding tickets whose group is finished and waits to be trained."""
        return len(self._buffered)

    @property
    def frontier(self) -> int:
        """The oldest unended id (the next id when nothing is open): everything below it has ended."""
        return min(self._open, default=self.next_ticket_id)

    def ended_beyond_frontier(self) -> list[int]:
        """Ids above the frontier that have ended already, in order."""
        return [index for index in range(self.frontier, self.next_ticket_id) if index not in self._open]

    def in_flight_at(self, generator: str) -> list[int]:
        """Ids in flight at this generator, in order."""
        open_tickets = self._open.items()
        return sorted(
            i for i, ticket in open_tickets if ticket.generator == generator and not ticket.buffered
        )

    def issue(self, ticket_id: int, generator: str, admitted: int = 0) -> None:
        """Open a ticket that goes out to this generator (its incarnation), whose weights are of step `admitted`."""
        if ticket_id != self.next_ticket_id:
            raise AssertionError(
                f"ticket {ticket_id} issued, the next admission index is {self.next_ticket_id}"
            )
        self._tickets.opened += 1
        self._open[ticket_id] = OpenTicket(generator, admitted)
        self._admitted[ticket_id] = admitted
        self._num_unassigned += generator == UNASSIGNED
        if generator != UNASSIGNED:
            self._generators.setdefault(generator, GeneratorTokens())

    def assign(self, ticket_id: int, generator: str, admitted: int) -> None:
        """A ticket in flight goes to another generator, whose weights are of step `admitted`, or to UNASSIGNED."""
        ticket = self._ticket(ticket_id)
        if ticket.buffered:
            raise AssertionError(f"ticket {ticket_id} is finished: nobody can hold it")
        self._num_unassigned += (generator == UNASSIGNED) - (ticket.generator == UNASSIGNED)
        ticket.generator, ticket.admitted = generator, admitted
        self._admitted[ticket_id] = admitted
        if generator != UNASSIGNED:
            self._generators.setdefault(generator, GeneratorTokens())

    def retire(self) -> list[str]:
        """Every generator is gone and what it held is unassigned. Returns their incarnations."""
        for ticket_id, ticket in self._open.items():
            if not ticket.buffered:
                self.assign(ticket_id, UNASSIGNED, ticket.admitted)
        for generator in self._generators:
            self.lose(generator)
        return sorted(self._generators)

    def refusal(self, ticket_id: int, generator: str) -> DropReason | None:
        """Why an arrival for this ticket from this generator must be refused; None when it is welcome."""
        if not 0 <= ticket_id < self.next_ticket_id:
            return DropReason.UNKNOWN_TICKET
        ticket = self._open.get(ticket_id)
        if ticket is None or ticket.buffered:
            return DropReason.TICKET_CLOSED
        return None if ticket.generator == generator else DropReason.UNKNOWN_TICKET

    def receive(self, ticket_id: int, num_tokens: int) -> None:
        """A trajectory for an open ticket arrived and is held; num_tokens of it are sampled."""
        ticket = self._ticket(ticket_id)
        self._trajectories.opened += 1
        self._tokens.opened += num_tokens
        ticket.trajectories += 1
        ticket.tokens += num_tokens
        self._receive_from(ticket.generator, num_tokens)

    def refuse(self, reason: DropReason, generator: str, num_tokens: int) -> None:
        """A trajectory arrived and ended at once (refused, invalid, a duplicate)."""
        self._trajectories.opened += 1
        self._trajectories.end(reason, 1)
        self._tokens.opened += num_tokens
        self._tokens.end(reason, num_tokens)
        if reason is not DropReason.DUPLICATE:  # its tokens were received, and sampled, once before
            self._receive_from(generator, num_tokens)

    def fail(self, reason: DropReason, generator: str, num_tokens: int) -> None:
        """A member ended without a trajectory; num_tokens were sampled for it."""
        self._failed += 1
        self._tokens.opened += num_tokens
        self._tokens.end(reason, num_tokens)
        self._receive_from(generator, num_tokens)

    def drop_trajectory(self, ticket_id: int, reason: DropReason, num_tokens: int) -> None:
        """A held trajectory ends alone; its group goes on without it."""
        ticket = self._ticket(ticket_id)
        ticket.trajectories -= 1
        ticket.tokens -= num_tokens
        if ticket.trajectories < 0 or ticket.tokens < 0:
            raise AssertionError(f"ticket {ticket_id}: more ended than was received")
        self._trajectories.end(reason, 1)
        self._tokens.end(reason, num_tokens)

    def buffer(self, ticket_id: int) -> None:
        """The ticket's group is finished; it waits to be trained."""
        ticket = self._ticket(ticket_id)
        if ticket.buffered:
            raise AssertionError(f"ticket {ticket_id} finished twice")
        ticket.buffered = True
        self._buffered.add(ticket_id)
        self._num_unassigned -= ticket.generator == UNASSIGNED

    def unbuffer(self, ticket_id: int) -> None:
        """The ticket's finished group is given up, not the ticket: it is in flight again, unassigned."""
        ticket = self._ticket(ticket_id)
        if ticket.buffered:
            ticket.buffered = False
            self._buffered.discard(ticket_id)
            self._num_unassigned += ticket.generator == UNASSIGNED
        self.assign(ticket_id, UNASSIGNED, ticket.admitted)

    def train(self, ticket_id: int, masked_trajectories: int = 0, masked_tokens: int = 0) -> None:
        """The ticket ends as trained; what was masked from the loss (its tokens, whole trajectories) is
        given.
        """
        ticket = self._end(ticket_id, TRAINED)
        if not ticket.buffered:
            raise AssertionError(f"ticket {ticket_id} trained before it was finished")
        self._trajectories.end(TRAINED, ticket.trajectories - masked_trajectories)
        self._trajectories.end(MASKED, masked_trajectories)
        self._tokens.end(TRAINED, ticket.tokens - masked_tokens)
        self._tokens.end(MASKED, masked_tokens)

    def drop(self, ticket_id: int, reason: DropReason) -> None:
        """The ticket, and every trajectory held for it, ends with this reason."""
        ticket = self._end(ticket_id, reason)
        self._trajectories.end(reason, ticket.trajectories)
        self._tokens.end(reason, ticket.tokens)
        self.on_drop(ticket_id, reason)

    def report(self, generator: str, generated: int) -> None:
        """A known generator says how many tokens it has sampled since its start (heartbeats, trajectory
        messages).
        """
        entry = self._generators.setdefault(generator, GeneratorTokens())
        entry.generated = max(entry.generated, generated)
        entry.lost = False

    def lose(self, generator: str) -> int:
        """A generator is gone: what it had sampled, at its last report, and not sent is lost. Returns that
        number.
        """
        entry = self._generators.setdefault(generator, GeneratorTokens())
        entry.lost = True
        return entry.unsent

    @property
    def lost_unsent(self) -> int:
        """Sampled tokens that died with their generators before they were sent."""
        return sum(entry.unsent for entry in self._generators.values() if entry.lost)

    def check(self) -> None:
        """Compare the accounts with what is open.

        Raises:
            AssertionError: a balance is off; the message has the counts.
        """
        held = self._open.values()
        balances = {
            "tickets": (self._tickets.open(), len(self._open)),
            "trajectories": (self._trajectories.open(), sum(ticket.trajectories for ticket in held)),
            "tokens": (self._tokens.open(), sum(ticket.tokens for ticket in held)),
        }
        wrong = {name: pair for name, pair in balances.items() if pair[0] != pair[1]}
        if wrong:
            raise AssertionError(
                f"the ledger does not balance, (opened - ended, held): {wrong}; {self.counts()}"
            )

    def counts(self) -> LedgerCounts:
        """The counts as plain dicts."""
        tickets = self._tickets.counts("issued")
        tickets |= {"in_flight": self.in_flight, "buffered": self.buffered}
        trajectories = self._trajectories.counts("received")
        trajectories |= {"buffered": self._trajectories.open(), "failed": self._failed}
        tokens = self._tokens.counts("received")
        tokens |= {"buffered": self._tokens.open(), "lost_unsent": self.lost_unsent}
        dropped = {outcome: num for outcome, num in sorted(self._tickets.ended.items()) if outcome != TRAINED}
        return LedgerCounts(tickets, trajectories, tokens, dropped)

    def _ticket(self, ticket_id: int) -> OpenTicket:
        ticket = self._open.get(ticket_id)
        if ticket is None:
            raise AssertionError(f"ticket {ticket_id} is not open: it ended already or was never issued")
        return ticket

    def _end(self, ticket_id: int, outcome: str) -> OpenTicket:
        ticket = self._ticket(ticket_id)
        del self._open[ticket_id], self._admitted[ticket_id]
        self._num_unassigned -= ticket.generator == UNASSIGNED and not ticket.buffered
        self._buffered.discard(ticket_id)
        self._tickets.end(outcome, 1)
        return ticket

    def _receive_from(self, generator: str, num_tokens: int) -> None:
        entry = self._generators.get(
            generator
        )  # a stranger gets no entry: names from outside must not pile up
        if entry is not None:
            entry.received += num_tokens
