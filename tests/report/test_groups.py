"""Length bias, the origin of lag and slow groups, from journal rows whose answers are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.journal import Position
from headway.journal.history import Row
from headway.report import RunReader, document, read_groups
from headway.report.groups import deciles, groups_of, lag_split, slowest


def row(ticket_id: int, tokens: int, state: str = "trained", **more: Any) -> Row:
    values: dict[str, Any] = {
        "trajectory_id": f"g0.{ticket_id}.0", "ticket_id": ticket_id, "member": 0, "prompt_index": 0,
        "oldest": (0, 3), "newest": (0, 4), "num_sampled": tokens, "reward": 1.0, "finish_reason": "stop",
        "received_s": 100.0, "position": Position(0, 0), "index": 0, "state": state, "issued_s": 90.0,
        "received_step": 5, "step": 8,
    }  # fmt: skip
    return Row(**{**values, **more})


def test_a_loss_of_long_completions_shows_in_the_deciles() -> None:
    rows = [row(n, n, "trained" if n <= 80 else "stale") for n in range(1, 101)]
    found = deciles(rows)
    assert [(part.shortest, part.longest, part.count) for part in found] == [
        (10 * n + 1, 10 * n + 10, 10) for n in range(10)
    ]
    assert [part.trained for part in found] == [10] * 8 + [0, 0]


def test_equal_lengths_share_a_decile_and_nothing_is_counted_twice() -> None:
    rows = [row(n, 5) for n in range(50)] + [row(n, 9, "stale") for n in range(50, 60)]
    rows += [row(60, 7, "open"), row(61, 3, "reward_failed", index=-1)]
    assert [(part.shortest, part.longest, part.count, part.trained) for part in deciles(rows)] == [
        (5, 5, 50, 50), (9, 9, 10, 0),
    ]  # fmt: skip
    assert deciles([]) == []


def test_lag_arises_in_flight_and_in_the_queue() -> None:
    """Trained in step 8 by weights of step 7: 2 updates passed in flight and 2 in the queue, then 4 and 1."""
    split = lag_split([row(1, 5), row(2, 5, oldest=(0, 2), received_step=6), row(3, 5, "stale")])
    assert split.steps.tolist() == [8]
    assert split.in_flight.tolist() == [pytest.approx(3.0)]
    assert split.in_queue.tolist() == [pytest.approx(1.5)]
    assert split.in_flight[0] + split.in_queue[0] == pytest.approx((4 + 5) / 2)


def test_the_slowest_groups_come_first() -> None:
    rows = [row(n, 5, received_s=91.0 + n) for n in range(20)]
    rows += [row(3, 70, member=1, received_s=190.0), row(21, 5, issued_s=None, received_s=1e6)]
    found = slowest(rows)
    assert [group.ticket_id for group in found[:3]] == [3, 19, 18]
    assert (found[0].seconds, found[0].members, found[0].longest, found[0].tokens) == (100.0, 2, 70, 75)
    assert len(found) == 10


def test_a_run_without_a_journal_still_has_its_page(make_run: Any, tmp_path: Path) -> None:
    groups = read_groups(tmp_path / "none")
    shown = document(RunReader(make_run(3).path).read(), groups)
    assert any("what the journal says is left out" in line for line in shown["lines"])
    assert {"length_bias", "lag_split"}.isdisjoint(figure["id"] for figure in shown["figures"])


def test_what_the_journal_says_is_drawn(make_run: Any) -> None:
    groups = groups_of([row(n, n, "trained" if n < 15 else "stale") for n in range(1, 21)])
    shown = document(RunReader(make_run(3).path).read(), groups)
    figures = {figure["id"]: figure for figure in shown["figures"]}
    assert figures["length_bias"]["traces"][0]["y"] == [100.0] * 7 + [0.0] * 3
    assert [trace["y"] for trace in figures["lag_split"]["traces"]] == [[2.0], [2.0]]
    (table,) = [table for table in shown["tables"] if table["title"] == "Slowest groups"]
    assert table["rows"][0] == ["1", "10.00 s", "1", "1", "1", "trained"]
