"""Which tickets go out, to whom, and until when their groups must be back. The desk's part that gives.

Two clocks of the run start here: the first ticket's, and each ticket's deadline.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import msgspec

from headway.buffer import Buffer
from headway.config import RunConfig
from headway.learner.chronicle import Chronicle
from headway.learner.peers import Peer
from headway.learner.prompts import PromptSource
from headway.learner.tickets import TicketMaker
from headway.types import Ticket
from headway.wire.messages import Grant


class Granting:
    """Tickets for whoever may have some, as the gate says.

    Args:
        config: the recipe; buffer: told what goes out, and its gate asked what may.
        prompts: of the tickets; tickets: makes them; chronicle: told each.

    Attributes:
        first_ticket_s: when the run's first ticket went out, less the time in which a resumed run had none out.
        round_start: first ticket of the newest grant.
    """

    def __init__(
        self,
        config: RunConfig,
        buffer: Buffer,
        prompts: PromptSource,
        tickets: TicketMaker,
        chronicle: Chronicle,
    ) -> None:
        self.first_ticket_s: float | None = None
        self.round_start = 0
        self._config = config
        self._buffer = buffer
        self._gate = buffer.gate
        self._prompts = prompts
        self._tickets = tickets
        self._chronicle = chronicle
        self._deadlines: dict[int, tuple[float, bytes]] = {}
        self._earliest_s = math.inf  # no deadline passes before it
        self._quiet_since_s: float | None = None  # a resumed run that has not granted anything yet
        self._num_grants = 0

    def restore(self, round_start: int, elapsed_s: float | None, now: float) -> None:
        """Go on from there; time without tickets, until the first goes out again, does not count as elapsed."""
        self.round_start = round_start
        self.first_ticket_s = None if elapsed_s is None else now - elapsed_s
        self._quiet_since_s = None if elapsed_s is None else now

    def step_done(self, now: float) -> None:
        """A step was trained: a resumed run that trains what it has is not quiet."""
        if self._quiet_since_s is not None:
            self._quiet_since_s = now

    def overdue(self, now: float) -> list[tuple[int, bytes]]:
        """Tickets whose deadline has passed since the last call, each with the address that holds it."""
        if now < self._earliest_s:  # asked many times a second, with thousands of tickets out
            return []
        self._earliest_s = min((at for at, _ in self._deadlines.values() if at > now), default=math.inf)
        return [(ticket_id, address) for ticket_id, (at, address) in self._deadlines.items() if at <= now]

    def ended(self, ticket_id: int) -> None:
        """Its group is complete, or given up: no deadline any more."""
        self._deadlines.pop(ticket_id, None)

    def again(self, tickets: list[Ticket]) -> Grant:
        """A Grant of tickets that are out already: the first one was cut off on its way."""
        self._num_grants += 1
        return Grant(seq=self._num_grants, tickets=tickets)

    def grant(self, peers: Mapping[bytes, Peer], now: float) -> list[tuple[bytes, Grant]]:
        """A Grant for everybody who gets tickets now, by address.

        Args:
            peers: the live generators.
        """
        wanted = self._wanted()
        # Read before the first ticket goes out: with max_lag = 0 nothing is granted while one is in flight,
        # and the whole round belongs to all generators together.
        versions = {peer.acked for peer in peers.values() if peer.acked is not None}
        budgets = {version: self._gate.budget(version) for version in versions}
        if min(wanted, max(budgets.values(), default=0)) <= 0:
            return []
        grants: list[tuple[bytes, Grant]] = []
        recipients = [peer for peer in self._recipients(peers.values()) if peer.acked is not None]
        issued = 0
        for rank, peer in enumerate(recipients):
            assert peer.acked is not None
            # Shares differ by one and sum to the slots.
            share = -((rank - self._gate.policy.slots) // len(recipients))
            limit = min(wanted - issued, share - len(peer.tickets), budgets[peer.acked] - issued)
            tickets = self._issue(peer, limit, now)
            if tickets and not issued:
                self._began(tickets[0], now)
            issued += len(tickets)
            if tickets:
                grants.append((peer.address, self.again(tickets)))
                peer.last_grant = self._num_grants
        return grants

    def _began(self, first: Ticket, now: float) -> None:
        self.round_start = first.ticket_id
        if self.first_ticket_s is None:
            self.first_ticket_s = now
        elif self._quiet_since_s is not None:
            self.first_ticket_s += now - self._quiet_since_s
            self._quiet_since_s = None

    def _recipients(self, peers: Collection[Peer]) -> list[Peer]:
        """Who is asked first: whoever holds least, and of those whoever has waited longest.

        A synchronous round waits until everybody is ready.
        """
        if self._gate.policy.max_lag == 0:
            everybody = len(peers) == self._config.generator.replicas
            ready = everybody and all(peer.acked == self._gate.version for peer in peers)
            return sorted(peers, key=lambda peer: peer.index) if ready else []
        return sorted(peers, key=lambda peer: (len(peer.tickets), peer.last_grant, peer.index))

    def _wanted(self) -> int:
        """Tickets that the rest of the run can still use."""
        left = (self._config.steps - self._gate.step) * self._config.batch.prompts
        return max(0, left - self._gate.ledger.assigned - self._gate.ledger.buffered)

    def _issue(self, peer: Peer, limit: int, now: float) -> list[Ticket]:
        """At most `limit` tickets for this peer; fewer when the prompts are used up."""
        issued: list[Ticket] = []
        for _ in range(limit):
            ticket = self._next(peer)
            if ticket is None:
                break
            self._chronicle.issued(ticket, peer.incarnation)
            peer.tickets.add(ticket.ticket_id)
            self._deadlines[ticket.ticket_id] = (now + ticket.deadline_s, peer.address)
            self._earliest_s = min(self._earliest_s, now + ticket.deadline_s)
            issued.append(ticket)
        return issued

    def _next(self, peer: Peer) -> Ticket | None:
        """A ticket that a resume has taken back goes first, as it was; else a new one."""
        assert peer.acked is not None
        taken_back = self._gate.ledger.unassigned
        if taken_back:
            before = self._buffer.ticket(taken_back[0])
            assert before is not None
            held = self._buffer.members_of(before.ticket_id)
            ticket = msgspec.structs.replace(before, admitted=peer.acked, held=held)
            self._buffer.reissued(ticket, peer.incarnation)
            return ticket
        prompt = self._prompts.next()
        if prompt is None:
            return None
        ticket = self._tickets.make(self._gate.ledger.next_ticket_id, prompt, peer.acked)
        self._buffer.issued(ticket, peer.incarnation)
        return ticket
