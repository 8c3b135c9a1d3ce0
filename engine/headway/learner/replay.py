"""Replay: the learner's part of a run once more, from the record, with every result compared.

Goes in: a run's folder (a checkpoint or the initial weights, the journal, the attempts' recipes). Comes out: whether
the weights are the same bits, at every version that was pushed and every checkpoint that is kept on the way.
Reads only; the run's folder stays as it is. Called by headway.cli.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from headway.buffer import Group, masked
from headway.checkpoint import INITIAL, Attempt, Attempts, CheckpointStore
from headway.config import RunConfig, RunFolder, load_recipe, load_toml, open_run
from headway.config.live_keys import changed
from headway.config.loading import parse_value
from headway.errors import CheckpointError, JournalError, ReplayRefused
from headway.journal import (
    Entry,
    LiveChange,
    MessageReceived,
    Position,
    Published,
    TicketIssued,
    read,
    unpack,
)
from headway.journal.segment import SEGMENT_START
from headway.learner.machine import Machine
from headway.learner.replay_plan import Entered, Plan, Update, path
from headway.learner.setup import compute_of, load_reference, recipe_of
from headway.learner.state import LearnerState, Piece, read_state
from headway.model import Lora, Policy, load_policy, resolve_model
from headway.trainer import FlatState, Trainer, TrainerState
from headway.types import PolicyVersion, Ticket, Trajectory
from headway.weights import published_dtype, state_digest
from headway.wire import decode
from headway.wire.messages import Trajectories

Note = Callable[[str], None]


@dataclass
class Verdict:
    """What a replay has found.

    Attributes:
        start, end: versions. num_updates: made again.
        pushed, checkpoints: versions that were compared and are equal.
        difference: the first one, in words; "" for none.
    """

    start: PolicyVersion
    end: PolicyVersion
    num_updates: int = 0
    pushed: list[PolicyVersion] = field(default_factory=list[PolicyVersion])
    checkpoints: list[str] = field(default_factory=list[str])
    difference: str = ""

    @property
    def compared(self) -> PolicyVersion | None:
        """The newest version that was compared and is equal."""
        names = [PolicyVersion(*map(int, name.split("."))) for name in self.checkpoints]
        return max([*self.pushed, *names], default=None)


def replay(
    run: Path, start: str = "", end: str = "", any_machine: bool = False, note: Note = lambda line: None
) -> Verdict:
    """Make the updates of a run again and compare.

    Args:
        run: its folder.
        start: name or step of the checkpoint to start from, or INITIAL; "": where the newest attempt started.
        end: name or step of the checkpoint to end with; "": as far as the journal leads.
        any_machine: go on where the machine is not the run's; the bits may differ for that reason alone.
        note: told what goes on.

    Raises:
        ConfigError: not a run's folder. ReplayRefused: another machine.
        CheckpointError: no such checkpoint, or it is damaged.
        JournalError: the journal does not have what is needed; names the segments that retention has removed.
    """
    folder, config = open_run(run)
    attempts = Attempts(folder).all() or [Attempt(0)]
    store = CheckpointStore(folder.checkpoints(config))
    name = _start_of(store, attempts[-1], start)
    chosen = store.open(name) if name else None
    first = chosen.marker.version if chosen else PolicyVersion(0, 0)
    last = store.open(store.resolve(end)).marker.version if end else None
    epoch = last.epoch if last else attempts[-1].epoch
    plan = Plan(first, path(attempts, first, epoch, last.step if last else None))
    if chosen is not None and not chosen.marker.journal:
        raise JournalError(f"checkpoint {name} names no position in the journal: the run had none then")
    position = Position.parse(chosen.marker.journal) if chosen else Position(1, SEGMENT_START)
    plan.read(_entries(folder, position))
    _check_machines(folder, attempts, plan, any_machine, note)
    model = resolve_model(config.model.path, note)
    policy = load_policy(
        model,
        published_dtype=config.push.dtype,
        with_grad=True,
        compute=compute_of(config),
        lora=Lora.of(config),
    )
    state = read_state(chosen, policy.manifest) if chosen else None
    replayed = Replay(folder, config, attempts, store, plan, policy, state, note)
    plan.check(replayed.held)
    return replayed.run()


def _start_of(store: CheckpointStore, newest: Attempt, start: str) -> str:
    """Name of the checkpoint to start from, "" for the initial weights."""
    if start == INITIAL:
        return ""
    if start:
        return store.resolve(start)
    if newest.checkpoint and newest.checkpoint not in store.names():
        raise CheckpointError(
            f"attempt {newest.epoch} started from checkpoint {newest.checkpoint}, which is gone (checkpoint.keep); "
            f"start from another one: --from NAME, of {', '.join(store.names()) or 'none'}, or --from {INITIAL}"
        )
    return newest.checkpoint


def _entries(folder: RunFolder, position: Position) -> Iterator[tuple[Position, Entry]]:
    for at, record in read(folder.journal, position):
        yield at, unpack(record.kind, record.payload)


def _check_machines(
    folder: RunFolder, attempts: list[Attempt], plan: Plan, any_machine: bool, note: Note
) -> None:
    """Use the threads of the run, and see that the rest of the machine is the run's.

    Raises:
        ReplayRefused: it is not, and `any_machine` is not set.
    """
    faults: list[str] = []
    for stretch in plan.path:
        text = Attempts(folder).machine(stretch.epoch)
        if not text:
            continue
        machine = msgspec.json.decode(text, type=Machine)
        torch.set_num_threads(machine.threads)
        faults += [f"attempt {stretch.epoch}: {line}" for line in Machine.current().differences(machine)]
    if faults and not any_machine:
        advice = "to replay all the same: --any-machine; the bits may then differ for this reason alone"
        raise ReplayRefused("\n".join(["this machine is not the run's", *faults, advice]))
    for line in faults:
        note(line)


class Replay:
    """One replay.

    Args:
        config: in force at the start, unless the start is a checkpoint, which has its own.
        plan: what to do; policy: as loaded from the recipe's model; state: to start from, None for that policy.

    Attributes:
        held: trajectories of the starting checkpoint, by id.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        attempts: list[Attempt],
        store: CheckpointStore,
        plan: Plan,
        policy: Policy,
        state: LearnerState | None,
        note: Note,
    ) -> None:
        self._folder = folder
        self._attempts = attempts
        self._store = store
        self._plan = plan
        self._policy = policy
        self._note = note
        self._names = {*store.names()}
        held = state.desk.unpack() if state is not None and state.desk is not None else []
        self.held: dict[str, Trajectory] = {t.trajectory_id: t for item in held for t in item.trajectories}
        self._tickets: dict[int, Ticket] = {item.ticket.ticket_id: item.ticket for item in held}
        self._verdict = Verdict(plan.start, plan.start)
        self._config = load_toml(state.progress.in_force) if state is not None else config
        self._trainer = self._make_trainer()
        if state is not None:
            self._trainer.restore(state.progress.trainer, state.tensors)

    def run(self) -> Verdict:
        """Make every update, until something differs."""
        for event in self._plan.events:
            match event:
                case Entered():
                    self._enter(self._attempts[event.epoch])
                case LiveChange():
                    self._change(event)
                case Update():
                    self._update(event)
                case Published():
                    self._compare_pushed(event)
            if self._verdict.difference:
                break
        return self._verdict

    def _make_trainer(self) -> Trainer:
        reference = load_reference(self._config, self._policy, self._note)
        return Trainer(self._policy, self._config, recipe_of(self._config.algo), reference)

    def _enter(self, attempt: Attempt) -> None:
        """The attempt's recipe from here on, over the state so far."""
        state, tensors = self._copy()
        if Piece.OPTIMIZER in attempt.without:
            state = msgspec.structs.replace(state, num_updates=0)
        self._config = load_recipe(Attempts(self._folder).recipe(attempt.epoch))
        self._trainer = self._make_trainer()
        self._trainer.restore(state, tensors)
        self._trainer.lr = self._config.learner.lr
        text = Attempts(self._folder).machine(attempt.epoch)
        if text:
            torch.set_num_threads(msgspec.json.decode(text, type=Machine).threads)
        self._verdict.end = attempt.version

    def _change(self, change: LiveChange) -> None:
        self._config = changed(self._config, change.key, parse_value(change.key, change.value))
        if change.key == "learner.lr":
            self._trainer.lr = self._config.learner.lr
        elif change.key.startswith("algo."):
            self._trainer.recipe = recipe_of(self._config.algo)

    def _update(self, update: Update) -> None:
        batch, verdict = update.batch, self._verdict
        stats = self._trainer.step(self._groups(update), batch.step)
        verdict.num_updates += 1
        if stats.skipped != update.skipped:
            was = "skipped" if update.skipped else "made"
            verdict.difference = f"step {batch.step}: the update was {was} in the run, and is not so now"
            return
        verdict.end = update.version
        if not update.skipped and str(update.version) in self._names:
            self._compare_checkpoint(str(update.version))

    def _groups(self, update: Update) -> list[Group]:
        batch = update.batch
        wanted = {name for names in batch.trajectory_ids for name in names} - self.held.keys()
        found = dict(self.held)
        for position in sorted({self._plan.content[name] for name in wanted}):
            entry = self._entry(position)
            message = decode(entry.frames) if isinstance(entry, MessageReceived) else None
            assert isinstance(message, Trajectories), position
            found.update({t.trajectory_id: t for t in message.trajectories})
        return [
            Group(
                ticket=self._ticket(ticket_id),
                trajectories=[masked(found[name], below) if below else found[name] for name in names],
                failures=[],
                arrived_s=0.0,
            )
            for ticket_id, names, below in zip(
                batch.ticket_ids, batch.trajectory_ids, batch.masked_below, strict=True
            )
        ]

    def _ticket(self, ticket_id: int) -> Ticket:
        position = self._plan.tickets.get(ticket_id)
        if position is None:
            return self._tickets[ticket_id]
        entry = self._entry(position)
        assert isinstance(entry, TicketIssued), position
        return entry.ticket

    def _entry(self, position: Position) -> Entry:
        for _, entry in _entries(self._folder, position):
            return entry
        raise JournalError(f"the record at {position} of the journal is gone")

    def _copy(self) -> tuple[TrainerState, FlatState]:
        tensors = FlatState.empty(self._policy.manifest.num_elements)
        return self._trainer.copy_state(tensors), tensors

    def _compare_pushed(self, published: Published) -> None:
        digest = state_digest(self._policy.flat.to(published_dtype(self._policy.manifest)))
        if digest == published.digest:
            self._verdict.pushed.append(published.version)
            return
        before = self._verdict.compared
        since = f"{before} is equal" if before is not None else "nothing before it was compared"
        self._verdict.difference = (
            f"version {published.version}: {published.digest} was pushed, the replay makes {digest}; {since}"
        )

    def _compare_checkpoint(self, name: str) -> None:
        """Masters, moments and the number of updates."""
        try:
            theirs = read_state(self._store.open(name), self._policy.manifest)
        except CheckpointError as error:
            self._note(f"checkpoint {name} is not compared: {error}")
            return
        state, mine = self._copy()
        pairs: list[tuple[str, Tensor, Tensor]] = [
            ("parameters", theirs.tensors.master, mine.master),
            ("first moments", theirs.tensors.exp_avg, mine.exp_avg),
            ("second moments", theirs.tensors.exp_avg_sq, mine.exp_avg_sq),
        ]
        faults = [
            f"{num} of {a.numel()} {kind}"
            for kind, a, b in pairs
            if (num := int((a.view(torch.int32) != b.view(torch.int32)).sum()))
        ]
        if theirs.progress.trainer.num_updates != state.num_updates:
            faults.append(f"{theirs.progress.trainer.num_updates} updates, {state.num_updates} replayed")
        if faults:
            self._verdict.difference = f"checkpoint {name} differs: {', '.join(faults)}"
        else:
            self._verdict.checkpoints.append(name)
