"""Any number of kills: each prompt is trained once, what was acknowledged is used or dropped by a named reason.

One desk after another on one journal, each set up from the last checkpoint and what the journal holds beyond it.
The account of what must hold is the test's own.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.checkpoint import Attempt
from headway.checkpoint.attempts import lineage
from headway.config import RunConfig
from headway.journal import Disk, Journal, Position, read, unpack
from headway.learner.desk import Desk
from headway.learner.prompts import PromptState
from headway.learner.recovery import Recovered, Recovery
from headway.learner.setup import staleness_policy
from headway.learner.state import DeskPiece, pack_held
from headway.learner.tickets import TicketMaker
from headway.staleness import Gate
from headway.types import PolicyVersion, Ticket, Trajectory
from headway.wire import encode
from headway.wire.messages import SCHEMA, Grant, Hello, Refused, Trajectories, WeightAck, Welcome

Make = Callable[..., Any]


class Checkpoint(msgspec.Struct):
    """What the disk keeps of a moment."""

    version: PolicyVersion
    desk: bytes
    prompts: PromptState
    position: str
    trained: list[tuple[int, int]]
    alive: list[PolicyVersion]


class NoSync(Disk):
    """The power that is lost is this process's, so what was written is there."""

    def sync(self, fd: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


class World:
    """A run whose learner is killed now and then, and one generator that does what the dice say."""

    def __init__(
        self, config: RunConfig, folder: Path, prompts: Make, trajectory: Make, count: int, seed: int
    ) -> None:
        self.config, self.folder = config, folder
        self.make_prompts = lambda: prompts(count, passes=1)
        self.make_trajectory = trajectory
        self.dice = random.Random(seed)
        self.attempts: list[Attempt] = []
        self.checkpoint: Checkpoint | None = None
        self.trained: list[tuple[int, int]] = []
        self.alive: set[PolicyVersion] = set()
        self.acked: set[str] = set()
        self.sent: dict[str, Trajectory] = {}
        self.lives = self.now = 0
        self.num_recovered = 0
        self.begin()

    # Life and death

    def begin(self) -> None:
        saved = self.checkpoint
        start = saved.version if saved else (PolicyVersion(0, 0) if self.attempts else None)
        earlier = lineage(self.attempts, start) if start else []
        attempt = Attempt(len(self.attempts), start=start, lineage=earlier)
        self.attempts.append(attempt)
        self.version = attempt.version
        self.alive = {*(saved.alive if saved else ()), self.version} | (
            {v for v in self.alive if start and v.step == start.step} if self.attempts else set()
        )
        self.trained = list(saved.trained) if saved else []
        self.prompts = self.make_prompts()
        gate = Gate(staleness_policy(self.config), version=self.version, lineage=earlier)
        piece = msgspec.msgpack.decode(saved.desk, type=DeskPiece) if saved else None
        if saved and piece:
            gate.restore(piece.gate)
            self.prompts.restore(saved.prompts)
        tickets = TicketMaker(self.config, (2,))
        self.desk = Desk(
            self.config, "run", gate, self.prompts, tickets,
            lambda version: Welcome(manifest_digest="m", weight_channel="c", version=version, heartbeat_s=2.0),
            lambda index, pid, why: None, lambda: float(self.now),
        )  # fmt: skip
        if piece:
            self.desk.restore(piece.desk)
            self.desk.buffer.restore(piece.unpack())
        journal = Journal.open(self.folder, max_bytes=1 << 30, disk=NoSync())
        if self.attempts[-1].epoch:
            position = Position.parse(saved.position) if saved else None
            entries = [unpack(record.kind, record.payload) for _, record in read(self.folder, position)]
            round_start = piece.desk.round_start if piece else 0
            recovery = Recovery(
                self.config, self.desk.buffer, self.prompts, tickets, self.desk.arrivals.receipts, round_start
            )
            self.check_recovered(recovery.run(entries))
        self.journal = self.desk.chronicle.journal = journal
        self.desk.chronicle.opened("run", self.version)
        self.desk.gate.counts()
        self.join()
        self.publish()

    def check_recovered(self, found: Recovered) -> None:
        """What was acknowledged, and sampled by weights of the lineage for a ticket that is not done, is there."""
        self.num_recovered += found.kept
        held = {(t.ticket_id, t.member) for item in self.desk.buffer.held() for t in item.trajectories}
        ledger = self.desk.gate.ledger
        assert found.taken_back == len(ledger.unassigned) == ledger.in_flight
        if self.config.staleness.max_lag == 0:  # a round that is not complete is sampled again as a whole
            return
        prompts = {item.ticket.ticket_id: item.ticket.prompt_index for item in self.desk.buffer.held()}
        for name in self.acked:
            trajectory = self.sent[name]
            # A ticket of a drop that is now undone may carry another prompt, or none: then it counts as abandoned.
            same = prompts.get(trajectory.ticket_id) == trajectory.prompt_index
            if same and {span.version for span in trajectory.spans} <= self.alive:
                assert (trajectory.ticket_id, trajectory.member) in held, name

    def join(self) -> None:
        """A generator starts."""
        self.lives += 1
        self.incarnation = f"g0-{self.lives}"
        self.held: dict[int, tuple[Ticket, list[int]]] = {}
        self.serving: PolicyVersion | None = None
        self.seq = self.sampled = 0
        self.say(
            Hello(
                run_id="run", schema=SCHEMA, generator=0, incarnation=self.incarnation, pid=1, host="", max_running=64,
                serving=None,
            )
        )  # fmt: skip

    def kill(self) -> None:
        """The learner is gone; what was not committed is lost, and half of it may have reached the file."""
        torn = self.dice.random() < 0.5
        self.sent = {name: trajectory for name, trajectory in self.sent.items() if name in self.acked}
        journal = self.journal
        pending = b"".join(bytes(part) for group in journal._pending for part in group.buffers)
        if journal._fd >= 0 and torn and pending:
            os.pwrite(journal._fd, pending[: len(pending) // 2], journal.committed.offset)
        journal._close_segment()
        os.close(journal._lock_fd)
        journal._lock_fd = -1
        self.begin()

    def save(self) -> None:
        """A checkpoint, as headway.learner.checkpoints makes one."""
        gate = self.desk.gate
        piece = DeskPiece(
            gate.state(), self.desk.state(), [pack_held(held) for held in self.desk.buffer.held()]
        )
        self.checkpoint = Checkpoint(
            self.version, msgspec.msgpack.encode(piece), self.prompts.state(), str(self.journal.end),
            list(self.trained), sorted(self.alive),
        )  # fmt: skip
        self.journal.commit()

    # What happens

    def say(self, message: Any) -> None:
        frames = encode(message) if isinstance(message, Trajectories) else ()
        self.desk.on_message(self.incarnation.encode(), message, frames)

    def turn(self) -> None:
        """The intake's: answers go out after the commit."""
        self.desk.tick()
        self.journal.commit()
        for _, message in list(self.desk.outbox):
            if isinstance(message, Grant):
                for ticket in message.tickets:
                    missing = [m for m in range(ticket.num_members) if m not in ticket.held]
                    self.held[ticket.ticket_id] = (ticket, missing)
            elif isinstance(message, Refused):
                self.join()
        self.desk.outbox.clear()
        self.acked |= self.sent.keys()
        self.desk.gate.counts()

    def apply_newest(self) -> None:
        self.serving = self.version
        digest = f"d{self.version}"
        self.say(WeightAck(incarnation=self.incarnation, version=self.version, digest=digest, pause_s=0.0))

    def send_some(self) -> None:
        """A message with a few finished members, of any tickets."""
        if self.serving is None or not self.held:
            return
        members: list[Trajectory] = []
        for _ in range(self.dice.randint(1, 4)):
            if not self.held:
                break
            ticket_id = self.dice.choice(sorted(self.held))
            ticket, left = self.held[ticket_id]
            member = left.pop(self.dice.randrange(len(left)))
            if not left:
                del self.held[ticket_id]
            members.append(
                self.make_trajectory(
                    ticket,
                    member,
                    reward=float(member),
                    incarnation=self.incarnation,
                    versions=[self.serving] * 3,
                )
            )
        self.seq += 1
        self.sampled += 3 * len(members)
        self.sent |= {trajectory.trajectory_id: trajectory for trajectory in members}
        self.say(
            Trajectories(
                incarnation=self.incarnation,
                seq=self.seq,
                trajectories=members,
                failures=[],
                generated=self.sampled,
            )
        )

    def train(self) -> None:
        groups = self.desk.take().groups
        if not groups:
            return
        for group in groups:
            for trajectory in group.trajectories:
                assert {span.version for span in trajectory.spans} <= self.alive
                assert trajectory.lag(self.version.step) <= self.config.staleness.max_lag
            self.trained.append((group.ticket_id, group.ticket.prompt_index))
        self.version = PolicyVersion(self.version.epoch, self.version.step + 1)
        self.alive.add(self.version)
        self.desk.trained(groups, self.version)
        self.publish()

    def publish(self) -> None:
        self.desk.published(self.version, f"d{self.version}")

    def live(self, kill_chance: float, save_chance: float) -> None:
        """Until the prompts are used up and nothing is left to train."""
        for _ in range(200_000):
            self.now += 0.001
            event = self.dice.choice(
                [self.turn, self.turn, self.apply_newest, self.send_some, self.send_some, self.train]
            )
            event()
            self.desk.heard(self.incarnation.encode())
            if self.desk.drained:
                return
            if self.dice.random() < save_chance:
                self.save()
            if self.dice.random() < kill_chance:
                self.kill()
        raise AssertionError("200,000 events and no end")


@pytest.fixture
def world(offices: Make, make_prompts: Make, make_trajectory: Make, tmp_path: Path) -> Callable[..., World]:
    def make(count: int, seed: int, **staleness: Any) -> World:
        config = offices(staleness=staleness).config
        return World(config, tmp_path / f"{seed}", make_prompts, make_trajectory, count, seed)

    return make


def check(world: World, count: int) -> None:
    """Each prompt once, each ticket once, and books that balance."""
    prompts = Counter(prompt for _, prompt in world.trained)
    assert prompts == Counter(range(count))
    tickets = [ticket for ticket, _ in world.trained]
    assert len(set(tickets)) == len(tickets)
    counts = world.desk.gate.counts()
    assert counts.tickets["trained"] == count
    assert counts.tickets["in_flight"] == counts.tickets["buffered"] == 0
    assert counts.trajectories["trained"] == 2 * count
    if world.config.staleness.max_lag:  # members that are there are not asked for again
        assert "dropped.duplicate" not in counts.trajectories


@pytest.mark.parametrize("policy", ["window", "capacity", "drop", "wait"])
@pytest.mark.parametrize("max_lag", [0, 2])
def test_an_epoch_with_kills_trains_each_prompt_exactly_once(
    world: Callable[..., World], policy: str, max_lag: int
) -> None:
    num_lives, num_recovered = [], 0
    for seed in range(4):
        run = world(40, seed, policy=policy, max_lag=max_lag)
        run.live(kill_chance=0.02, save_chance=0.02)
        check(run, 40)
        num_lives.append(len(run.attempts))
        num_recovered += run.num_recovered
    assert max(num_lives) >= 5
    assert num_recovered > 20


def test_a_resumed_run_admits_no_more_than_the_bound_before_its_first_step(
    world: Callable[..., World],
) -> None:
    """Capacity counts what is outstanding: a counter that starts at zero opens nothing."""
    for seed in range(5):
        run = world(400, seed, max_lag=2)
        while run.version.step < 30:
            run.dice.choice([run.turn, run.apply_newest, run.send_some, run.train])()
            run.desk.heard(run.incarnation.encode())
        run.save()
        run.kill()
        assert run.version == PolicyVersion(1, 30)
        run.turn()
        assert run.held == {}  # nobody gets a ticket before the resumed version is in force there
        run.apply_newest()
        for _ in range(5):
            run.turn()
        assert 0 < len(run.held) <= 3 * run.config.batch.prompts
        ledger = run.desk.gate.ledger
        assert ledger.assigned + ledger.buffered <= 3 * run.config.batch.prompts
        assert {ticket.admitted for ticket, _ in run.held.values()} == {PolicyVersion(1, 30)}


def test_tickets_go_out_again_under_their_ids_with_their_seeds_before_new_ones(
    world: Callable[..., World],
) -> None:
    run = world(400, 3, max_lag=2)
    while run.version.step < 4:
        run.dice.choice([run.turn, run.apply_newest, run.send_some, run.train])()
        run.desk.heard(run.incarnation.encode())
    run.apply_newest()
    run.turn()
    run.save()
    before = {held.ticket.ticket_id: held.ticket for held in run.desk.buffer.held() if not held.finished}
    assert before
    run.kill()
    run.apply_newest()
    run.turn()
    again = {ticket_id: ticket for ticket_id, (ticket, _) in run.held.items()}
    assert min(again) == min(before)
    for ticket_id in before.keys() & again.keys():
        assert (
            msgspec.structs.replace(again[ticket_id], admitted=before[ticket_id].admitted)
            == before[ticket_id]
        )
    assert before.keys() <= again.keys()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["window", "capacity", "drop", "wait"])
def test_a_kill_at_any_instant_of_100_runs_trains_each_prompt_exactly_once(
    world: Callable[..., World], policy: str
) -> None:
    killed = 0
    for seed in range(100):
        run = world(24, 1000 + seed, policy=policy, max_lag=seed % 3)
        run.live(kill_chance=0.01, save_chance=0.02)
        check(run, 24)
        killed += len(run.attempts) > 1
    assert killed > 50


@pytest.mark.slow
def test_an_epoch_of_1000_prompts_with_20_kills_trains_each_exactly_once(world: Callable[..., World]) -> None:
    for seed in range(3):
        run = world(1000, seed, max_lag=2)
        run.live(kill_chance=0.001, save_chance=0.01)
        while len(run.attempts) < 21:  # the dice may have been kind
            run = world(1000, seed + 100 * len(run.attempts), max_lag=2)
            run.live(kill_chance=0.004, save_chance=0.01)
        check(run, 1000)
