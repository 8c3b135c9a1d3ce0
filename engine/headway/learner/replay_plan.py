"""What a replay does, from a run's journal: which updates, on what, in what order. No torch, no weights.

A run is a tree: an attempt goes on from a checkpoint of an earlier one, and what that one did beyond it is given up.
The plan follows the path from the start of the replay to its end through the attempts, and passes over the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from headway.checkpoint import Attempt
from headway.errors import CheckpointError, JournalError
from headway.journal import (
    BatchSelected,
    Entry,
    LiveChange,
    MessageReceived,
    Opened,
    Position,
    Published,
    StepTrained,
    TicketIssued,
)
from headway.journal.history import read_head
from headway.types import PolicyVersion


@dataclass(frozen=True)
class Stretch:
    """The steps of one attempt that belong to the path: after `first`, up to `last` (None: as far as it came)."""

    epoch: int
    first: int
    last: int | None

    def has(self, step: int) -> bool:
        """Whether the weights of this step are on the path."""
        return self.first <= step and (self.last is None or step <= self.last)


@dataclass(frozen=True)
class Entered:
    """An attempt begins, with its own recipe."""

    epoch: int


@dataclass(frozen=True)
class Update:
    """One optimizer step: the batch, and the version after it; `skipped`: it left the weights as they were."""

    batch: BatchSelected
    version: PolicyVersion
    skipped: bool


Event = Entered | Update | Published | LiveChange


def path(attempts: Sequence[Attempt], start: PolicyVersion, epoch: int, step: int | None) -> list[Stretch]:
    """The stretches from `start` to (epoch, step), in order.

    Args:
        attempts: all of the run, by epoch. step: None for the newest of the epoch.

    Raises:
        CheckpointError: the end does not descend from the start.
    """
    found: list[Stretch] = []
    last = step
    while epoch != start.epoch:
        parent = attempts[epoch].start if epoch < len(attempts) else None
        if parent is None or epoch < start.epoch:
            raise CheckpointError(
                f"the weights of version {epoch}.{last} do not descend from those of {start}"
            )
        found.append(Stretch(epoch, parent.step, last))
        epoch, last = parent.epoch, parent.step
    if last is not None and last < start.step:
        raise CheckpointError(f"version {epoch}.{last} was left before version {start} was reached")
    return [Stretch(epoch, start.step, last), *reversed(found)]


@dataclass
class Plan:
    """Feed it the journal's entries from the start on, in order; then `check` it.

    Attributes:
        events: what to do. end: version that the last of them leads to.
        content, tickets: where the trajectories and tickets are, by id.
    """

    start: PolicyVersion
    path: Sequence[Stretch]
    events: list[Event] = field(default_factory=list[Event])
    content: dict[str, Position] = field(default_factory=dict[str, Position])
    tickets: dict[int, Position] = field(default_factory=dict[int, Position])

    def __post_init__(self) -> None:
        self.end = self.start
        self._stretches = {stretch.epoch: stretch for stretch in self.path}
        self._stretch = self._stretches.get(self.start.epoch)
        self._batch: BatchSelected | None = None

    @property
    def num_updates(self) -> int:
        """Optimizer steps, skipped ones included."""
        return sum(isinstance(event, Update) for event in self.events)

    @property
    def wanted(self) -> PolicyVersion:
        """The end of the path; where that is open, what the journal leads to."""
        last = self.path[-1]
        return self.end if last.last is None else PolicyVersion(last.epoch, last.last)

    def read(self, entries: Iterable[tuple[Position, Entry]]) -> None:
        """Take the entries in.

        Raises:
            JournalError: a record cannot be read, or does not fit those before it.
        """
        for position, entry in entries:
            match entry:
                case TicketIssued():
                    self.tickets[entry.ticket.ticket_id] = position
                case MessageReceived():
                    for item in read_head(entry)["trajectories"]:
                        self.content.setdefault(str(item["trajectory_id"]), position)
                case Opened():
                    self._open(entry)
                case BatchSelected() if self._goes_on:
                    self._batch = entry
                case StepTrained() if self._goes_on:
                    self._update(entry)
                case LiveChange() if self._goes_on:
                    self.events.append(entry)
                case Published() if self._stretch is not None and self._stretch.has(entry.version.step):
                    self.events.append(entry)
                case _:
                    pass

    @property
    def _goes_on(self) -> bool:
        """Whether the next step of the attempt that is being read is on the path."""
        return self._stretch is not None and self._stretch.has(self.end.step + 1)

    def _open(self, entry: Opened) -> None:
        self._batch = None
        self._stretch = self._stretches.get(entry.epoch)
        if self._stretch is None:
            return
        if entry.step != self.end.step:
            raise JournalError(
                f"attempt {entry.epoch} starts at step {entry.step}, the journal leads to step {self.end.step}"
            )
        self.end = PolicyVersion(entry.epoch, entry.step)
        self.events.append(Entered(entry.epoch))

    def _update(self, entry: StepTrained) -> None:
        batch, self._batch = self._batch, None
        if batch is None or batch.ticket_ids != entry.ticket_ids:
            raise JournalError(
                f"version {entry.version} was trained on a batch that the journal does not have"
            )
        if len(batch.trajectory_ids) != len(batch.ticket_ids):
            raise JournalError(
                f"the batch of step {batch.step} does not name its trajectories: an older headway recorded it"
            )
        self.events.append(Update(batch, entry.version, entry.skipped))
        self.end = entry.version

    def check(self, held: Collection[str]) -> None:
        """See that everything is there.

        Args:
            held: ids of the trajectories that the starting checkpoint holds.

        Raises:
            JournalError: the journal ends early, or lacks a trajectory.
        """
        if self.end != self.wanted:
            raise JournalError(f"the journal leads to version {self.end}; {self.wanted} was asked for")
        for event in self.events:
            if not isinstance(event, Update):
                continue
            lacking = [
                name
                for names in event.batch.trajectory_ids
                for name in names
                if name not in held and name not in self.content
            ]
            if lacking:
                raise JournalError(
                    f"step {event.batch.step} trained {len(lacking)} trajectories that the journal does not have: "
                    f"{', '.join(lacking[:5])}"
                )
