"""The gate: policy and ledger joined; it admits tickets, chooses batches and enforces max_lag where it
counts.

The learner's intake asks `budget`, tells `issued`, and lets the buffer report arrivals to the ledger; its
main loop asks `select` and tells `trained`. Pure state: no clock, no I/O, one owner thread.

lag of a token = step of the weights that will compute its gradient - step of the weights that sampled it.
`select` checks it at consumption, queue time included, whatever the policy. Where the policy bounds it already
(docs/staleness.md) the check finds nothing: a proof does not protect against a generator that lies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from headway.staleness.ledger import Ledger, LedgerCounts, LedgerState
from headway.staleness.policy import StalenessPolicy
from headway.staleness.unit import Cut, Finished, StalenessUnit, judge
from headway.types import DropReason, PolicyVersion, Ticket


@dataclass(frozen=True)
class Selection:
    """What `select` decided.

    Attributes:
        take: the batch, oldest first: P ids (or the last few of a run), or none while it is not complete.
        drop: ids that ended as dropped, with the reason; the ledger has them, the buffer must let go of them.
        cuts: what the groups of `take` leave out; groups that are trained whole are not in it.
    """

    take: list[int]
    drop: list[tuple[int, DropReason]]
    cuts: Mapping[int, Cut] = field(default_factory=dict[int, Cut])


class GateState(msgspec.Struct, frozen=True):
    """A gate as data: the ledger, and which tickets need which narrower window."""

    ledger: LedgerState
    narrow_below: int
    narrow_window: int


class Gate:
    """Admission, selection and the check at consumption, for one run.

    Attributes:
        policy, unit: in force; replaced by `change`.
        ledger: the counts.
        version: of the learner's weights.
    """

    def __init__(
        self,
        policy: StalenessPolicy,
        ledger: Ledger | None = None,
        version: PolicyVersion | None = None,
        lineage: Sequence[PolicyVersion] = (),
        unit: StalenessUnit = StalenessUnit.TRAJECTORY,
    ) -> None:
        """Start, or resume.

        Args:
            policy: the choice of max_lag, window and slots.
            unit: what is judged when a batch is consumed.
            ledger: of the checkpoint; None: a new run.
            version: that the learner starts from; None: (0, 0).
            lineage: one version per earlier epoch that the weights descend from: the step where it was left.
                Samples of other epochs, or of later steps of these, are abandoned.
        """
        self.policy = policy
        self.unit = unit
        self.ledger = Ledger() if ledger is None else ledger
        self.version = PolicyVersion(0, 0) if version is None else version
        self._last_step = {left.epoch: left.step for left in lineage}
        # Tickets below _narrow_below were admitted with another s: while one is open, W stays <=
        # _narrow_window.
        self._narrow_below = 0
        self._narrow_window = policy.window

    @property
    def step(self) -> int:
        """Optimizer steps that the learner's weights have seen."""
        return self.version.step

    def budget(self, acked: PolicyVersion) -> int:
        """How many tickets may go, now and as one message, to a generator with this version in force.

        Zero for a generator on another epoch: it must take the resumed weights first.
        """
        if acked.epoch != self.version.epoch:
            return 0
        ledger = self.ledger
        held = ledger.admitted
        unassigned = ledger.unassigned  # they take a place when they go out again, like new ones
        if unassigned:
            held = {ticket_id: step for ticket_id, step in held.items() if ticket_id not in set(unassigned)}
        return self.policy.budget(self.step, acked.step, ledger.assigned, ledger.buffered, held)

    def issued(self, ticket: Ticket, generator: str) -> None:
        """A ticket within the budget went out to this generator (its incarnation)."""
        self.ledger.issue(ticket.ticket_id, generator, ticket.admitted.step)

    def arrived(self, ticket_id: int) -> None:
        """The ticket's group is finished: every member has arrived or failed."""
        self.ledger.buffer(ticket_id)

    def select(self, finished: Iterable[Finished], final: bool = False) -> Selection:
        """Choose the next batch and drop what may no longer be trained.

        Args:
            finished: the groups in the buffer, any order; each has `arrived`.
            final: no ticket will be issued any more. Then, once nothing is in flight, a last batch may be
                shorter than P (only the last: a short batch in mid-run would let later groups wait for more
                steps than the bound counts).

        Returns:
            The batch to train with weights of `step`, what its groups leave out, and the drops, which are in
            the ledger already.
        """
        drop: list[tuple[int, DropReason]] = []
        cuts: dict[int, Cut] = {}
        for group in finished:
            cut = judge(group, self.step, self.policy.max_lag, self.unit, self.abandoned)
            if cut.dropped is None:
                cuts[group.ticket_id] = cut
            else:
                drop.append((group.ticket_id, cut.dropped))
                self.ledger.drop(group.ticket_id, cut.dropped)
        chosen = self.policy.select(self.step, cuts.keys(), self.ledger.admitted, self._window())
        last = final and self.ledger.in_flight == 0
        if len(chosen) < self.policy.groups_per_step and not last:
            chosen = []
        return Selection(chosen, drop, {index: cuts[index] for index in chosen if cuts[index]})

    def trained(
        self,
        ticket_ids: Collection[int],
        version: PolicyVersion,
        masked: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        """One optimizer step consumed this batch and made this version (the same one if the step was
        skipped).

        A batch is used once: its tickets end here, and a second step on them raises AssertionError.

        Args:
            ticket_ids: of the batch.
            version: of the weights that the step made.
            masked: per ticket, (whole trajectories, sampled tokens) that carried no loss; the tokens include
                those of the trajectories.
        """
        if version not in (self.version, PolicyVersion(self.version.epoch, self.step + 1)):
            raise AssertionError(
                f"version {version} cannot follow {self.version}: one optimizer step per batch"
            )
        for ticket_id in ticket_ids:
            self.ledger.train(ticket_id, *(masked or {}).get(ticket_id, (0, 0)))
        self.version = version

    def dropped(self, ticket_id: int, reason: DropReason) -> None:
        """The ticket ended without being trained; its slot is free, and the window may move."""
        self.ledger.drop(ticket_id, reason)

    def lost(self, generator: str) -> list[int]:
        """A generator died or left: its unfinished tickets end. Returns their ids, for re-issue of their
        prompts.
        """
        ticket_ids = self.ledger.in_flight_at(generator)
        for ticket_id in ticket_ids:
            self.ledger.drop(ticket_id, DropReason.GENERATOR_LOST)
        self.ledger.lose(generator)
        return ticket_ids

    def change(
        self,
        *,
        max_lag: int | None = None,
        window: int | None = None,
        slots: int | None = None,
        push_interval: int | None = None,
        unit: StalenessUnit | None = None,
    ) -> None:
        """Change the policy while tickets are out; `window` and `slots` of 0 go back to their defaults.

        New tickets are admitted by the new policy at once, and the check at consumption uses the new max_lag
        at once, so lowering it may drop groups that are already out. The window does not get wider than the
        one that they were admitted under until they have ended, so raising max_lag, or trading slots for
        window, drops none.

        Raises:
            ConfigError: impossible; nothing changed.
        """
        changed = self.policy.changed(
            max_lag=max_lag, window=window, slots=slots, push_interval=push_interval
        )
        self.adopt(changed)
        self.unit = self.unit if unit is None else unit

    def adopt(self, policy: StalenessPolicy) -> None:
        """Another policy, by the rules of `change`: the window of tickets that are out does not get wider."""
        self._narrow_window = min(self._window(), policy.window)
        self._narrow_below = self.ledger.next_ticket_id
        self.policy = policy

    def state(self) -> GateState:
        """For a checkpoint, besides policy, unit and version."""
        return GateState(self.ledger.state(), self._narrow_below, self._narrow_window)

    def restore(self, state: GateState) -> None:
        """Go on from there; called before anything holds the ledger."""
        self.ledger = Ledger(state.ledger)
        self._narrow_below, self._narrow_window = state.narrow_below, state.narrow_window

    def counts(self) -> LedgerCounts:
        """The ledger's counts, for a StepRecord; checks the balance first."""
        self.ledger.check()
        return self.ledger.counts()

    def _window(self) -> int:
        if self.ledger.frontier < self._narrow_below:
            return min(self.policy.window, self._narrow_window)
        return self.policy.window

    def abandoned(self, version: PolicyVersion) -> bool:
        """Whether the learner's weights do not descend from those of this version: a resume rolled them back."""
        if version.epoch == self.version.epoch:
            return version.step > self.step  # weights that do not exist
        return version.step > self._last_step.get(version.epoch, -1)
