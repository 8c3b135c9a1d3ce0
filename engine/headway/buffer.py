"""The buffer: members of outstanding tickets -> groups, and groups -> batches.

Fed by the learner's intake, emptied by its main loop. It holds members of outstanding tickets only, so the
slots bound it; nothing is evicted. An arrival that does not belong to an outstanding ticket is refused with a
reason that the ledger counts. One owner thread; nothing here blocks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import msgspec

from headway.staleness import Cut, Finished, Gate
from headway.types import DropReason, MemberFailure, Ticket, Trajectory

Member = TypeVar("Member", Trajectory, MemberFailure)

# A member that ended so ends its group: those that finished in time would be its short members only, and a
# baseline over them favours short answers.
_ENDS_THE_GROUP = (DropReason.DEADLINE, DropReason.GENERATOR_LOST, DropReason.SHUTDOWN)


@dataclass(frozen=True)
class Group:
    """A finished group.

    Attributes:
        ticket: what it was generated for.
        trajectories: its members with a reward, by member.
        failures: its other members.
        arrived_s: clock time of its last member's arrival.
        num_masked: sampled tokens that are too old to be trained; loss_mask is False there.
    """

    ticket: Ticket
    trajectories: list[Trajectory]
    failures: list[MemberFailure]
    arrived_s: float
    num_masked: int = 0

    @property
    def ticket_id(self) -> int:
        """The ticket's id, which is the group's."""
        return self.ticket.ticket_id

    @cached_property
    def as_finished(self) -> Finished:
        """The group as the gate sees it."""
        members = {t.member: frozenset(span.version for span in t.spans) for t in self.trajectories}
        return Finished(self.ticket_id, members)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of its trajectories."""
        return sum(trajectory.num_sampled for trajectory in self.trajectories)


@dataclass(frozen=True)
class Arrival:
    """What became of one arrival; at most one field is set.

    Attributes:
        refused: it was not taken, and why.
        finished: it completed this group.
        ended: it completed its group, which ended as dropped.
    """

    refused: DropReason | None = None
    finished: Group | None = None
    ended: DropReason | None = None


@dataclass(frozen=True)
class Batch:
    """What `take` hands out.

    Attributes:
        groups: by ticket id; empty while the batch is not complete.
        dropped: groups that may no longer be trained, with the reason.
    """

    groups: list[Group]
    dropped: list[tuple[Group, DropReason]]


@dataclass(frozen=True)
class Held:
    """All that the buffer holds for one outstanding ticket: what a checkpoint keeps of it.

    Attributes:
        finished: the group is complete.
    """

    ticket: Ticket
    finished: bool
    trajectories: list[Trajectory]
    failures: list[MemberFailure]


@dataclass
class _Assembly:
    """The members of one outstanding ticket so far."""

    ticket: Ticket
    trajectories: dict[int, Trajectory] = field(default_factory=dict[int, Trajectory])
    failures: dict[int, MemberFailure] = field(default_factory=dict[int, MemberFailure])

    def holds(self, member: int) -> bool:
        return member in self.trajectories or member in self.failures

    @property
    def complete(self) -> bool:
        return len(self.trajectories) + len(self.failures) == self.ticket.num_members

    def end_reason(self) -> DropReason | None:
        """Why the complete group cannot be trained; None when it can."""
        reasons = [_reason(self.failures[member]) for member in sorted(self.failures)]
        for reason in _ENDS_THE_GROUP:
            if reason in reasons:
                return reason
        if reasons and len(self.trajectories) < 2:  # one member alone has no baseline
            return Counter(reasons).most_common(1)[0][0]
        return None


class Buffer:
    """Assembles groups; every count goes to the gate's ledger, and each ticket ends in both at once.

    Attributes:
        gate: what admits and selects.
    """

    def __init__(self, gate: Gate, clock: Callable[[], float]) -> None:
        """Start empty.

        Args:
            gate: admits and selects; this buffer reports to its ledger.
            clock: seconds, for Group.arrived_s.
        """
        self.gate = gate
        self._ledger = gate.ledger
        self._clock = clock
        self._assembling: dict[int, _Assembly] = {}
        self._finished: dict[int, Group] = {}

    @property
    def groups(self) -> list[Group]:
        """The finished groups, by ticket id."""
        return [self._finished[ticket_id] for ticket_id in sorted(self._finished)]

    @property
    def num_trajectories(self) -> int:
        """Trajectories held, of finished and unfinished groups."""
        finished = sum(len(group.trajectories) for group in self._finished.values())
        return finished + sum(len(assembly.trajectories) for assembly in self._assembling.values())

    def held(self) -> list[Held]:
        """What is held, by ticket id."""
        found = [
            Held(group.ticket, True, group.trajectories, group.failures) for group in self._finished.values()
        ]
        for assembly in self._assembling.values():
            members = (list(assembly.trajectories.values()), list(assembly.failures.values()))
            found.append(Held(assembly.ticket, False, *members))
        return sorted(found, key=lambda held: held.ticket.ticket_id)

    def restore(self, held: Iterable[Held]) -> None:
        """Hold again what `held` gave, beside a ledger of the same moment."""
        for item in held:
            ticket_id = item.ticket.ticket_id
            if item.finished:
                group = Group(item.ticket, item.trajectories, item.failures, self._clock())
                self._finished[ticket_id] = group
            else:
                assembly = _Assembly(item.ticket, _by_member(item.trajectories), _by_member(item.failures))
                self._assembling[ticket_id] = assembly

    def reissued(self, ticket: Ticket, generator: str) -> None:
        """A ticket in flight goes out again, to this generator; the members that are held stay."""
        self._ledger.assign(ticket.ticket_id, generator, ticket.admitted.step)
        self._assembling[ticket.ticket_id].ticket = ticket

    def give_up_content(self, ticket_id: int, reason: DropReason) -> None:
        """Everything held for a ticket ends with this reason; the ticket is in flight again, held by nobody."""
        group = self._finished.pop(ticket_id, None)
        if group is not None:
            held = list(group.trajectories)
            self._assembling[ticket_id] = _Assembly(group.ticket)
        else:
            held = list(self._assembling[ticket_id].trajectories.values())
            self._assembling[ticket_id] = _Assembly(self._assembling[ticket_id].ticket)
        for trajectory in held:
            self._ledger.drop_trajectory(ticket_id, reason, trajectory.num_sampled)
        self._ledger.unbuffer(ticket_id)

    def ticket(self, ticket_id: int) -> Ticket | None:
        """An outstanding ticket whose group is not finished."""
        assembly = self._assembling.get(ticket_id)
        return None if assembly is None else assembly.ticket

    def members_of(self, ticket_id: int) -> list[int]:
        """Members of an unfinished group that have come, or failed."""
        assembly = self._assembling[ticket_id]
        return sorted([*assembly.trajectories, *assembly.failures])

    def issued(self, ticket: Ticket, generator: str) -> None:
        """A ticket went out to this generator (its incarnation)."""
        self.gate.issued(ticket, generator)
        self._assembling[ticket.ticket_id] = _Assembly(ticket)

    def add(self, trajectory: Trajectory, generator: str) -> Arrival:
        """A trajectory arrived. Without a finite reward it counts as a failed member (reward_failed)."""
        refused = self._refusal(trajectory.ticket_id, trajectory.member, generator)
        if refused is not None:
            self._ledger.refuse(refused, generator, trajectory.num_sampled)
            return Arrival(refused=refused)
        self._ledger.receive(trajectory.ticket_id, trajectory.num_sampled)
        assembly = self._assembling[trajectory.ticket_id]
        if trajectory.reward is None or not math.isfinite(trajectory.reward):
            reason, num_tokens = DropReason.REWARD_FAILED, trajectory.num_sampled
            self._ledger.drop_trajectory(trajectory.ticket_id, reason, num_tokens)
            assembly.failures[trajectory.member] = _failure(trajectory, reason, f"reward {trajectory.reward}")
        else:
            assembly.trajectories[trajectory.member] = trajectory
        return self._completed(assembly)

    def reject(self, trajectory: Trajectory, generator: str, detail: str) -> Arrival:
        """A trajectory arrived that failed the checks at ingest: a failed member (invalid)."""
        refused = self._refusal(trajectory.ticket_id, trajectory.member, generator)
        self._ledger.refuse(refused or DropReason.INVALID, generator, trajectory.num_sampled)
        if refused is not None:
            return Arrival(refused=refused)
        assembly = self._assembling[trajectory.ticket_id]
        assembly.failures[trajectory.member] = _failure(trajectory, DropReason.INVALID, detail)
        return self._completed(assembly)

    def fail(self, failure: MemberFailure, generator: str) -> Arrival:
        """A member ended without a trajectory."""
        refused = self._refusal(failure.ticket_id, failure.member, generator)
        if refused is not DropReason.DUPLICATE:
            self._ledger.fail(refused or _reason(failure), generator, failure.num_tokens)
        if refused is not None:
            return Arrival(refused=refused)
        assembly = self._assembling[failure.ticket_id]
        assembly.failures[failure.member] = failure
        return self._completed(assembly)

    def drop(self, ticket_id: int, reason: DropReason) -> None:
        """End an outstanding ticket, finished or not, with everything held for it."""
        self.gate.dropped(ticket_id, reason)
        self._assembling.pop(ticket_id, None)
        self._finished.pop(ticket_id, None)

    def lost(self, generator: str) -> list[Ticket]:
        """A generator died or left: its unfinished tickets end. Returns them, to re-issue their prompts."""
        return [self._assembling.pop(ticket_id).ticket for ticket_id in self.gate.lost(generator)]

    def take(self, final: bool = False) -> Batch:
        """The next batch, if it is complete; the gate decides (see Gate.select for `final`).

        The batch leaves the buffer; report it to Gate.trained after its step.
        """
        selection = self.gate.select([group.as_finished for group in self._finished.values()], final)
        dropped = [(self._finished.pop(ticket_id), reason) for ticket_id, reason in selection.drop]
        taken = [self._finished.pop(ticket_id) for ticket_id in selection.take]
        return Batch([self._without(group, selection.cuts.get(group.ticket_id)) for group in taken], dropped)

    def _without(self, group: Group, cut: Cut | None) -> Group:
        """The group as it may be trained: members that are cut end here, tokens too old are masked."""
        if cut is None:
            return group
        kept: list[Trajectory] = []
        failures = list(group.failures)
        for trajectory in group.trajectories:
            reason = cut.members.get(trajectory.member)
            if reason is None:
                kept.append(trajectory if cut.oldest_step is None else masked(trajectory, cut.oldest_step))
                continue
            self._ledger.drop_trajectory(group.ticket_id, reason, trajectory.num_sampled)
            failures.append(_failure(trajectory, reason, "too old to be trained when its group was"))
        num_sampled = sum(t.num_sampled for t in group.trajectories if t.member not in cut.members)
        return Group(
            ticket=group.ticket,
            trajectories=kept,
            failures=sorted(failures, key=lambda failure: failure.member),
            arrived_s=group.arrived_s,
            num_masked=num_sampled - sum(t.num_sampled for t in kept),
        )

    def close(self) -> Collection[int]:
        """End every outstanding ticket, a batch in training included, as shutdown. Returns their ids."""
        ticket_ids = sorted(self._ledger.unended)
        for ticket_id in ticket_ids:
            self.drop(ticket_id, DropReason.SHUTDOWN)
        return ticket_ids

    def _refusal(self, ticket_id: int, member: int, generator: str) -> DropReason | None:
        refused = self._ledger.refusal(ticket_id, generator)
        if refused is not None:
            return refused
        assembly = self._assembling[ticket_id]
        if not 0 <= member < assembly.ticket.num_members:
            return DropReason.INVALID
        return DropReason.DUPLICATE if assembly.holds(member) else None

    def _completed(self, assembly: _Assembly) -> Arrival:
        """Finish or end the group if its last member has come."""
        if not assembly.complete:
            return Arrival()
        ticket_id = assembly.ticket.ticket_id
        reason = assembly.end_reason()
        if reason is not None:
            self.drop(ticket_id, reason)
            return Arrival(ended=reason)
        del self._assembling[ticket_id]
        group = Group(
            ticket=assembly.ticket,
            trajectories=[assembly.trajectories[member] for member in sorted(assembly.trajectories)],
            failures=[assembly.failures[member] for member in sorted(assembly.failures)],
            arrived_s=self._clock(),
        )
        self.gate.arrived(ticket_id)
        self._finished[ticket_id] = group
        return Arrival(finished=group)


def _by_member(items: Iterable[Member]) -> dict[int, Member]:
    return {item.member: item for item in items}


def _reason(failure: MemberFailure) -> DropReason:
    """The failure's reason; a word that is none of ours is an invalid message."""
    try:
        return DropReason(failure.reason)
    except ValueError:
        return DropReason.INVALID


def masked(trajectory: Trajectory, oldest_step: int) -> Trajectory:
    """Without loss on the tokens that weights older than `oldest_step` sampled; they stay as context."""
    mask = trajectory.loss_mask.copy()
    for span in trajectory.spans:
        if span.version.step < oldest_step:
            mask[span.start : span.end] = False
    return msgspec.structs.replace(trajectory, loss_mask=mask)


def _failure(trajectory: Trajectory, reason: DropReason, detail: str) -> MemberFailure:
    return MemberFailure(trajectory.ticket_id, trajectory.member, reason, detail, trajectory.num_sampled)
