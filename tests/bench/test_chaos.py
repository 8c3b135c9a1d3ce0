"""The chaos harness: schedules come from seeds and cover every fault, and the verifier finds what is planted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.journal import (
    BatchSelected,
    Entry,
    Journal,
    MessageReceived,
    Opened,
    StepTrained,
    TicketEnded,
    TicketIssued,
)
from headway.types import FinishReason, PolicyVersion, Sampling, Ticket, Trajectory, VersionSpan
from headway.wire import encode
from headway.wire.messages import Trajectories
from headway_bench.chaos import bench
from headway_bench.chaos.schedule import Fault, make_schedule
from headway_bench.chaos.verify import faults_of

Row = dict[str, Any]


def test_a_seed_is_a_schedule_and_as_many_seeds_as_faults_strike_with_each() -> None:
    schedules = [make_schedule(seed) for seed in range(len(Fault))]
    assert schedules == [make_schedule(seed) for seed in range(len(Fault))]
    assert {strike.fault for schedule in schedules for strike in schedule.strikes} == set(Fault)
    assert all(1 <= len(schedule.strikes) <= 3 for schedule in schedules)
    assert len({str(schedule) for schedule in schedules}) == len(Fault)


def message(ticket_id: int) -> MessageReceived:
    trajectory = Trajectory(
        trajectory_id=f"g0-a.{ticket_id}.0",
        ticket_id=ticket_id,
        member=0,
        prompt_index=0,
        prompt_hash=0,
        prompt_length=1,
        token_ids=np.array([1, 2], np.int32),
        loss_mask=np.array([False, True]),
        logprobs=np.zeros(2, np.float32),
        spans=[VersionSpan(1, 2, PolicyVersion(0, 0))],
        temperature=1.0,
        finish_reason=FinishReason.LENGTH,
        reward=1.0,
        num_cached=0,
        started_s=0.0,
        finished_s=0.0,
    )
    sent = Trajectories(
        incarnation="g0-a", seq=ticket_id + 1, trajectories=[trajectory], failures=[], generated=ticket_id + 1
    )
    return MessageReceived("g0-a", 0.0, 0, list(encode(sent)))


def issued(ticket_id: int) -> TicketIssued:
    ticket = Ticket(ticket_id, 0, [1], 1, Sampling(1.0, 1, []), 0, PolicyVersion(0, 0), 60.0)
    return TicketIssued(ticket, "g0-a", 0.0)


def counts(opened: str, trained: int, held: str, waiting: int = 0) -> dict[str, int]:
    return {opened: trained + waiting, "trained": trained, "dropped": 0, held: 0, "buffered": waiting}


def row(step: int, kind: str = "step") -> Row:
    return {
        "kind": kind, "step": step, "status": "finished", "lag_max": 1, "lag_histogram": [0, 1], "num_tokens": 1,
        "tickets": counts("issued", step, "in_flight"),
        "trajectories": counts("received", step, "masked"),
        "tokens": counts("received", step, "masked"),
    }  # fmt: skip


def sound() -> tuple[list[Entry], list[Row]]:
    """Two steps of one group each, a kill after the first, and a drop that the resume undoes."""
    entries: list[Entry] = [
        Opened("r", 0, 0, 0.0),
        issued(0), message(0), BatchSelected(1, [0], 0.0), StepTrained(PolicyVersion(0, 1), [0], False),
        issued(1), TicketEnded(1, "shutdown", 0.0),
        Opened("r", 1, 1, 0.0),
        issued(1), message(1), BatchSelected(2, [1], 0.0), StepTrained(PolicyVersion(1, 2), [1], False),
    ]  # fmt: skip
    return entries, [row(1), row(2), row(2, "status")]


Plant = Callable[[list[Entry], list[Row]], object]
PLANTED: dict[str, tuple[Plant, str]] = {
    "nothing": (lambda _entries, _rows: None, ""),
    "twice": (lambda e, _r: e.__setitem__(-2, BatchSelected(2, [0], 0.0)), "trained twice"),
    "unreceived": (lambda e, _r: e.pop(-3), "no trajectory of them"),
    "dropped": (lambda e, _r: e.append(TicketEnded(1, "stale", 0.0)), "trained and dropped"),
    "forgotten": (lambda e, _r: e.extend([issued(2), message(2)]), "never ended"),
    "unbalanced": (lambda _e, r: r[1]["tickets"].update(issued=3), "do not balance"),
    "beyond the bound": (lambda _e, r: r[0].update(lag_max=2), "lag 2 > 1"),
    "miscounted": (lambda _e, r: r[0].update(num_tokens=2), "the histogram has others"),
    "lost row": (lambda _e, r: r.pop(0), "expected 1 to 2"),
    "no end": (lambda _e, r: r.pop(), "one status"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_verifier_finds_what_is_planted_and_nothing_else(name: str, tmp_path: Path) -> None:
    plant, expected = PLANTED[name]
    entries, rows = sound()
    plant(entries, rows)
    (tmp_path / "config.toml").write_text("steps = 2\n[staleness]\nmax_lag = 1\n")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    with Journal.open(tmp_path / "journal") as journal:
        for entry in entries:
            journal.log(entry)
    found = faults_of(tmp_path)
    if expected:
        assert any(expected in fault for fault in found), found
    else:
        assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(len(Fault)))
def test_a_run_survives_each_fault(seed: int) -> None:
    outcome, faults = bench.play(seed, steps=8)
    assert faults == []
    assert outcome is not None
    assert outcome.ends[-1][0] == "finished"
