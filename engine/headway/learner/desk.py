"""The desk: what the learner answers to its generators. No sockets, no clock of its own, no waiting.

Messages in, messages out (`outbox`); tickets, trajectories and weights acks pass through here. The intake thread
of a learner process drives it under one lock, headway.serial calls it directly; both get the same behaviour.

    on_message(...)   Hello, Trajectories, WeightAck, Bye, Heartbeat
    tick(now)         deadlines, silent generators, and tickets for whoever may have some
    take(...)         a complete batch, checked at consumption
    trained(...)      its groups end, their slots return as generators ack the version

Guarantees kept here: no ticket without a slot, each ticket and trajectory ends once, nothing from a stranger.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence

from headway.buffer import Batch, Buffer, Group
from headway.config import RunConfig
from headway.errors import WeightError
from headway.learner.arrivals import Arrivals
from headway.learner.chronicle import Chronicle
from headway.learner.failures import FailureWatch
from headway.learner.granting import Granting
from headway.learner.judge import GroupJudge, rewards
from headway.learner.peers import NO_TIME, Peer, add
from headway.learner.prompts import PromptSource, TokenisedPrompt
from headway.learner.state import DeskState
from headway.learner.tickets import TicketMaker
from headway.learner.versions import AckLap, Versions
from headway.staleness import Gate
from headway.stream import LivenessMonitor
from headway.types import DropReason, PolicyVersion, TimeSplit
from headway.wire.messages import (
    SCHEMA,
    Bye,
    Cancel,
    DataMessage,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Received,
    Refused,
    Trajectories,
    VersionNotice,
    WeightAck,
    Welcome,
)

_log = logging.getLogger(__name__)
LEFT = "left"
MAX_LEFT = 1024


class Desk:
    """The learner's side of the protocol.

    Args:
        config: the recipe; run_id: that a Hello must name.
        gate: staleness policy and ledger; prompts: of the tickets; tickets: makes them.
        welcome: what a generator is told when it joins, given the newest version.
        on_lost: told (generator index, its pid, why) when one is given up.
        clock: monotonic seconds. chronicle: told what happens; whoever empties the outbox commits it first.
    """

    def __init__(
        self,
        config: RunConfig,
        run_id: str,
        gate: Gate,
        prompts: PromptSource,
        tickets: TicketMaker,
        welcome: Callable[[PolicyVersion], Welcome],
        on_lost: Callable[[int, int, str], None],
        clock: Callable[[], float],
        chronicle: Chronicle | None = None,
    ) -> None:
        self.gate = gate
        self.chronicle = chronicle or Chronicle()
        gate.ledger.on_drop = self.chronicle.ended
        self.buffer = Buffer(gate, clock)
        self.outbox: deque[tuple[bytes, DataMessage]] = deque()
        self.refused: Counter[str] = Counter()
        """Valid messages that were not taken in, by reason: "run", "schema", and "unknown", from no live generator."""
        self._run_id = run_id
        self._prompts = prompts
        self._granting = Granting(config, self.buffer, prompts, tickets, self.chronicle)
        self._welcome = welcome
        self._on_lost = on_lost
        self._clock = clock
        self._peers: dict[bytes, Peer] = {}
        self._left: dict[bytes, None] = {}  # said Bye; those that did so last
        self._liveness = LivenessMonitor(config.stream.heartbeat_s, config.stream.rollout_deadline_s)
        self._judge = GroupJudge(config)
        self._versions = Versions(clock)
        self._num_notices = 0
        self._failures = FailureWatch(limit=max(16, 4 * config.batch.prompts))
        self.arrivals = Arrivals(self.buffer, self._judge, self._failures)
        self._flat_rewards: list[float] = []
        self._lost_split = NO_TIME

    # Checkpoints ----------------------------------------------------------------------------------------------

    def state(self) -> DeskState:
        """What is to be known besides gate and buffer."""
        started = self.first_ticket_s
        num_replaced, kept = self._judge.state()
        return DeskState(
            num_received=self.arrivals.num_sampled,
            flat_rewards=list(self._flat_rewards),
            num_replaced=num_replaced,
            kept=kept,
            round_start=self._granting.round_start,
            elapsed_s=None if started is None else self._clock() - started,
            receipts=self.arrivals.receipts.state(),
        )

    def restore(self, state: DeskState) -> None:
        """Go on from there; time without tickets, until the first goes out again, does not count as elapsed."""
        self.arrivals.num_sampled = state.num_received
        self.arrivals.receipts.restore(state.receipts)
        self._flat_rewards = list(state.flat_rewards)
        self._judge.restore(state.num_replaced, state.kept)
        self._granting.restore(state.round_start, state.elapsed_s, self._clock())

    # Generators -----------------------------------------------------------------------------------------------

    @property
    def peers(self) -> list[Peer]:
        """Live generators, by index."""
        return sorted(self._peers.values(), key=lambda peer: peer.index)

    @property
    def first_ticket_s(self) -> float | None:
        """When the run's first ticket went out, on the desk's clock; None before it."""
        return self._granting.first_ticket_s

    @property
    def invalid(self) -> Counter[str]:
        """Trajectories that cannot be trained, by reason."""
        return self.arrivals.invalid

    def on_message(
        self, address: bytes, message: DataMessage, frames: Sequence[bytes | memoryview] = ()
    ) -> None:
        """Take in one message from a generator.

        Args:
            frames: of the message as they came, for the chronicle.

        Raises:
            TrainingStopped: too much of what arrives cannot be trained, or a generator serves wrong weights.
        """
        if isinstance(message, Hello):
            self._on_hello(address, message)
            return
        peer = self._peers.get(address)
        if peer is None:  # given up, or never introduced: what it holds is gone for us
            if address in self._left and isinstance(message, Heartbeat):
                return  # sent before its Bye, on the other socket: it is not lost, and nobody waits for an answer
            self.refused["unknown"] += 1
            if isinstance(message, Trajectories):
                self.arrivals.refuse(address.decode(errors="replace"), message)
            if isinstance(message, (Trajectories, Heartbeat)):
                self.outbox.append((address, Refused(reason="unknown incarnation: it was given up as lost")))
            return
        self._liveness.beat(address, self._clock())
        match message:
            case Heartbeat():
                self._liveness.beat(address, self._clock(), message.stalled_s)
                peer.beat(message)
                self.outbox.append((address, HeartbeatAck(seq=message.seq)))
                self.gate.ledger.report(peer.incarnation, message.generated)
            case Trajectories():
                self._on_trajectories(peer, message, frames)
            case WeightAck():
                self._on_ack(peer, message)
            case Bye():
                self._give_up(peer, LEFT)
            case _:
                pass

    def _on_hello(self, address: bytes, hello: Hello) -> None:
        reason, fault = "", ""
        if hello.run_id != self._run_id:
            reason, fault = "run", f"this is run {self._run_id}, you belong to {hello.run_id[:80]}"
        elif hello.schema != SCHEMA:
            reason = "schema"
            fault = f"wire schema {hello.schema} is not {SCHEMA}; install the same version of headway"
        if fault:
            self.refused[reason] += 1
            self.outbox.append((address, Refused(reason=fault)))
            return
        for other in [p for p in self._peers.values() if p.index == hello.generator and p.address != address]:
            self._give_up(other, "replaced by a new process")
        peer = self._peers.setdefault(address, Peer.from_hello(address, hello))
        self._liveness.beat(address, self._clock())
        self.outbox.append((address, self._welcome(self.gate.version)))
        outstanding = [self.buffer.ticket(ticket_id) for ticket_id in sorted(peer.tickets - {*hello.tickets})]
        if lost := [ticket for ticket in outstanding if ticket is not None]:  # their Grant was cut off
            self.outbox.append((address, self._granting.again(lost)))

    def _on_ack(self, peer: Peer, ack: WeightAck) -> None:
        fault = self._versions.acked(peer, ack)
        if fault:
            self._give_up(peer, fault)

    def _give_up(self, peer: Peer, why: str) -> None:
        """Its unfinished tickets end as generator_lost; their prompts go into later tickets."""
        del self._peers[peer.address]
        self._liveness.forget(peer.address)
        for ticket in self.buffer.lost(peer.incarnation):
            self._granting.ended(ticket.ticket_id)
            self._prompts.give_back(TokenisedPrompt(ticket.prompt_index, ticket.prompt_ids))
        self._lost_split = add(self._lost_split, peer.take_lap())
        if why == LEFT:
            self._left[peer.address] = None
            if len(self._left) > MAX_LEFT:
                del self._left[next(iter(self._left))]
            _log.info("generator %d left", peer.index)
        else:
            self._on_lost(peer.index, peer.pid, why)
            # It may live on, silent or starved: told nothing, it would wait for tickets that never come.
            self.outbox.append((peer.address, Refused(reason=f"this incarnation is given up: {why}")))

    # Trajectories ---------------------------------------------------------------------------------------------

    def _on_trajectories(
        self, peer: Peer, message: Trajectories, frames: Sequence[bytes | memoryview]
    ) -> None:
        self.outbox.append((peer.address, Received(seq=message.seq)))
        if not self.arrivals.is_new(message):
            return
        self.chronicle.received(peer.incarnation, self.gate.step, frames)
        for ticket_id in self.arrivals.take(message):
            peer.tickets.discard(ticket_id)
            self._granting.ended(ticket_id)
        self.gate.ledger.report(peer.incarnation, message.generated)

    def heard(self, address: bytes) -> None:
        """A generator that runs on this thread is alive by definition: serial mode has no heartbeats."""
        self._liveness.beat(address, self._clock())

    # Time, tickets --------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Enforce deadlines, give silent generators up, judge what has finished, and grant tickets."""
        now = self._clock()
        for address, why in self._liveness.lost(now).items():
            peer = self._peers.get(address)
            if peer is not None:
                self._give_up(peer, why)
        for ticket_id, address in self._granting.overdue(now):
            self._expire(ticket_id, address)
        self._drop_flat()
        self.outbox.extend(self._granting.grant(self._peers, now))

    def _expire(self, ticket_id: int, address: bytes) -> None:
        self._granting.ended(ticket_id)
        self.buffer.drop(ticket_id, DropReason.DEADLINE)
        peer = self._peers.get(address)
        if peer is not None:
            peer.tickets.discard(ticket_id)
            self.outbox.append((address, Cancel(ticket_ids=[ticket_id])))
        self._failures.note(f"ticket {ticket_id} passed the rollout deadline")
        self._failures.ended(DropReason.DEADLINE)

    def _drop_flat(self) -> None:
        """Replace groups without a gradient, within the bound; in whole rounds when the run is synchronous."""
        if self.gate.policy.max_lag == 0 and self.gate.ledger.in_flight:
            return
        groups = {group.ticket_id: group for group in self.buffer.groups}
        for ticket_id in self._judge.flat(list(groups.values())):
            self._flat_rewards.extend(rewards(groups[ticket_id]))
            self.buffer.drop(ticket_id, DropReason.ZERO_VARIANCE)

    # Batches --------------------------------------------------------------------------------------------------

    @property
    def finishing(self) -> bool:
        """No ticket will be issued any more: the prompts are used up."""
        return self._prompts.exhausted

    @property
    def drained(self) -> bool:
        """Nothing is left to train: no prompts, nothing in flight, nothing buffered."""
        return self.finishing and not self.gate.ledger.unended

    def take(self) -> Batch:
        """The next batch if it is complete; groups beyond max_lag are dropped here, at consumption."""
        self._drop_flat()
        batch = self.buffer.take(final=self.finishing)
        for group, _ in batch.dropped:  # generated in vain: the prompt has another chance
            self._prompts.give_back(TokenisedPrompt(group.ticket.prompt_index, group.ticket.prompt_ids))
        if batch.groups:
            step = self.gate.step
            self.chronicle.selected(step + 1, batch.groups, max(0, step - self.gate.policy.max_lag))
        return batch

    def trained(self, groups: list[Group], version: PolicyVersion) -> None:
        """The groups ended in the optimizer step that made `version` (the old one if it was skipped)."""
        masked = {group.ticket_id: (0, group.num_masked) for group in groups if group.num_masked}
        ticket_ids = [group.ticket_id for group in groups]
        self._granting.step_done(self._clock())
        self.chronicle.trained(version, ticket_ids, skipped=version == self.gate.version)
        self.gate.trained(ticket_ids, version, masked)
        self._judge.step_done()

    def published(self, version: PolicyVersion, digest: str) -> None:
        """A version is in the channel: tell everybody, and remember what its acks must say.

        Raises:
            WeightError: it is not the gate's version; TrainingStopped: as on_message, for acks that came before.
        """
        if version != self.gate.version:
            raise WeightError(f"published version {version}, trained is {self.gate.version}")
        self.chronicle.published(version, digest)
        for address, ack in self._versions.published(version, digest):
            if address in self._peers:
                self._on_ack(self._peers[address], ack)
        self._num_notices += 1
        notice = VersionNotice(seq=self._num_notices, version=version, digest=digest)
        self.outbox.extend((address, notice) for address in self._peers)

    def take_flat_rewards(self) -> list[float]:
        """Rewards of the groups replaced as zero_variance since the last call: sampled, though never trained."""
        taken, self._flat_rewards = self._flat_rewards, []
        return taken

    def ack_lap(self) -> AckLap:
        """Of the generators' acks since the last call."""
        return self._versions.take_lap()

    def generator_lap(self) -> TimeSplit:
        """Mean time split of the generators since the last call, those given up included."""
        total = add(self._lost_split, *(peer.take_lap() for peer in self._peers.values()))
        self._lost_split = NO_TIME
        count = max(1, len(self._peers))
        return TimeSplit(total.work / count, total.push / count, total.idle / count, total.other / count)
