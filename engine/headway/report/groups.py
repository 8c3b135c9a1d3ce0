"""What the journal says that the rows do not: which lengths were trained, where lag arose, which groups were slow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.errors import JournalError
from headway.journal import read
from headway.journal.history import OPEN, TRAINED, History, Row

NUM_SLOWEST = 10


@dataclass(frozen=True)
class Decile:
    """Trajectories of about one length, of which it is known what became of them.

    Attributes:
        shortest, longest: sampled tokens; count: of them; trained: how many of these were trained.
    """

    shortest: int
    longest: int
    count: int
    trained: int


@dataclass(frozen=True)
class SlowGroup:
    """A group by the time from its ticket to its last member.

    Attributes:
        seconds: that time; longest, tokens: of its longest member and of all, sampled.
    """

    ticket_id: int
    seconds: float
    members: int
    longest: int
    tokens: int
    state: str


@dataclass(frozen=True)
class LagSplit:
    """Mean lag of the trajectories that each update trained, by where it arose.

    Attributes:
        steps: int64 [N]; in_flight: float64 [N], updates between a trajectory's oldest token and its arrival;
            in_queue: float64 [N], from there to the update that trained it.
    """

    steps: NDArray[np.int64]
    in_flight: NDArray[np.float64]
    in_queue: NDArray[np.float64]


@dataclass(frozen=True)
class Groups:
    """What a journal says of a run's groups.

    Attributes:
        fault: why there is no more of it; "" when all was read.
    """

    deciles: list[Decile]
    slowest: list[SlowGroup]
    lag: LagSplit
    fault: str = ""


def read_groups(journal: Path) -> Groups:
    """What the journal still holds; one that is missing or damaged says so instead of failing."""
    history, fault = History(), ""
    try:
        history = History.of(read(journal))
    except JournalError as error:
        fault = str(error)
    return groups_of(history.rows, fault)


def groups_of(rows: Sequence[Row], fault: str = "") -> Groups:
    """The same from rows."""
    return Groups(deciles(rows), slowest(rows), lag_split(rows), fault)


def deciles(rows: Sequence[Row]) -> list[Decile]:
    """Trajectories in ten parts by length, fewer where many are equally long; open ones and failures are left out.

    Training that prefers short completions shows as a share that falls from part to part.
    """
    known = [row for row in rows if row.state != OPEN and row.index >= 0 and row.num_sampled > 0]
    if not known:
        return []
    lengths = np.array([row.num_sampled for row in known])
    trained = np.array([row.state == TRAINED for row in known])
    edges = np.unique(np.quantile(lengths, np.arange(1, 10) / 10, method="inverted_cdf"))
    part = np.searchsorted(edges, lengths, side="left")  # an edge is the longest of its part
    return [
        Decile(int(lengths[of].min()), int(lengths[of].max()), int(of.sum()), int(trained[of].sum()))
        for index in np.unique(part)
        for of in [part == index]
    ]


def slowest(rows: Sequence[Row]) -> list[SlowGroup]:
    """The groups that took longest from ticket to last member, the slowest first."""
    by_ticket: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        if row.issued_s is not None:
            by_ticket[row.ticket_id].append(row)
    found: list[SlowGroup] = []
    for ticket_id, members in by_ticket.items():
        issued = max(row.issued_s or 0.0 for row in members)  # a ticket that went out anew counts from there
        tokens = [row.num_sampled for row in members]
        seconds = max(row.received_s for row in members) - issued
        states = sorted({row.state for row in members})
        found.append(SlowGroup(ticket_id, seconds, len(members), max(tokens), sum(tokens), ", ".join(states)))
    return sorted(found, key=lambda group: (-group.seconds, group.ticket_id))[:NUM_SLOWEST]


def lag_split(rows: Sequence[Row]) -> LagSplit:
    """Where the lag of the trained trajectories arose, per update."""
    parts: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row in rows:
        if row.state == TRAINED and row.step is not None and row.oldest is not None:
            in_flight = row.received_step - row.oldest[1]
            parts[row.step].append((in_flight, row.step - 1 - row.received_step))
    steps = sorted(parts)
    means = np.array([np.mean(parts[step], axis=0) for step in steps], np.float64).reshape(-1, 2)
    return LagSplit(np.array(steps, np.int64), means[:, 0], means[:, 1])
