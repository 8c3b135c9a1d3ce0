"""`headway inspect`: what became of each trajectory, from the journal alone; nothing in it acts on a terminal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headway.cli.inspecting import inspect, table
from headway.config import RunFolder, create_run
from headway.config.loading import validate
from headway.errors import ConfigError, JournalError
from headway.journal import (
    BatchSelected,
    Entry,
    Journal,
    MessageReceived,
    Opened,
    StepTrained,
    TicketEnded,
    TicketIssued,
    read,
)
from headway.journal.history import History, Row
from headway.types import (
    FinishReason,
    MemberFailure,
    PolicyVersion,
    Sampling,
    Ticket,
    Trajectory,
    VersionSpan,
    prompt_digest,
)
from headway.wire import encode
from headway.wire.messages import Trajectories

PROMPT = [3, 4, 5]


def ticket(ticket_id: int, num_members: int = 2) -> Ticket:
    return Ticket(
        ticket_id, 10 + ticket_id, PROMPT, num_members, Sampling(1.0, 8, [0]), 1, PolicyVersion(0, 0), 60.0
    )


def trajectory(
    ticket_id: int,
    member: int,
    versions: list[tuple[int, int]],
    *,
    incarnation: str = "g0-a",
    reward: float | None = 1.0,
    logprob: float = -0.5,
    ids: list[int] | None = None,
) -> Trajectory:
    tokens = ids or [6 + index for index in range(len(versions))]
    length = len(PROMPT) + len(tokens)
    mask = np.arange(length) >= len(PROMPT)
    spans = [
        VersionSpan(len(PROMPT) + index, len(PROMPT) + index + 1, PolicyVersion(*version))
        for index, version in enumerate(versions)
    ]
    return Trajectory(
        f"{incarnation}.{ticket_id}.{member}", ticket_id, member, 10 + ticket_id, prompt_digest(PROMPT), len(PROMPT),
        np.array([*PROMPT, *tokens], np.int32), mask, np.where(mask, logprob, 0).astype(np.float32), spans, 1.0,
        FinishReason.STOP, reward, 0, 1.0, 2.0,
    )  # fmt: skip


def message(
    trajectories: list[Trajectory],
    failures: list[MemberFailure] | None = None,
    time_s: float = 100.0,
    seq: int = 1,
) -> MessageReceived:
    sent = Trajectories(
        incarnation="g0-a", seq=seq, trajectories=trajectories, failures=failures or [], generated=9
    )
    return MessageReceived("g0-a", time_s, 0, [*encode(sent)])


ENTRIES: list[Entry] = [
    Opened("run", 0, 0, 50.0),
    *(TicketIssued(ticket(index), "g0-a", 60.0) for index in range(5)),
    message([trajectory(0, 0, [(0, 0), (0, 2)]), trajectory(0, 1, [(0, 1)])], time_s=100.0),
    message([trajectory(1, 0, [(0, 1)]), trajectory(1, 1, [(0, 1)], logprob=float("nan"))], time_s=101.0),
    message([trajectory(2, 0, [(0, 1)])], [MemberFailure(2, 1, "reward_failed", "\x1b]0;owned\x07boom", 3)]),
    TicketEnded(2, "zero_variance", 102.0),
    message(
        [trajectory(2, 0, [(0, 1)]), trajectory(0, 0, [(0, 0)]), trajectory(99, 0, [(0, 0)])], time_s=103.0
    ),
    BatchSelected(4, [0], 104.5),
    StepTrained(PolicyVersion(0, 4), [0], False),
]


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> RunFolder:
    config = validate(
        {"model": {"path": str(tiny_model)}, "env": {"name": "sort"}, "run_dir": str(tmp_path / "run")}
    )
    return create_run(config)


def write(run: RunFolder, entries: list[Entry]) -> None:
    with Journal.open(run.path / "journal") as journal:
        for entry in entries:
            journal.log(entry)


def rows(run: RunFolder) -> dict[str, Row]:
    return {f"{row.trajectory_id}/{row.position}": row for row in History.of(read(run.path / "journal")).rows}


def test_each_trajectory_has_its_end_lag_and_queue_time(run: RunFolder) -> None:
    write(run, ENTRIES)
    found = list(rows(run).values())
    assert [(row.ticket_id, row.member, row.state) for row in found] == [
        (0, 0, "trained"), (0, 1, "trained"), (1, 0, "open"), (1, 1, "invalid"), (2, 0, "zero_variance"),
        (2, 1, "reward_failed"), (2, 0, "ticket_closed"), (0, 0, "duplicate"), (99, 0, "unknown_ticket"),
    ]  # fmt: skip
    first = found[0]
    assert (first.oldest, first.newest, first.num_sampled) == ((0, 0), (0, 2), 2)
    assert (first.step, first.lag, first.queue_s) == (4, 3, 4.5)  # trained by weights of step 3
    assert (found[1].lag, found[2].lag) == (2, None)
    assert found[3].detail == "logprob_nan"


def test_what_a_resume_rolled_back_is_open_again_and_what_it_made_anew_replaces_it(run: RunFolder) -> None:
    again = trajectory(0, 0, [(1, 1)], incarnation="g0-b")
    write(
        run,
        [
            *ENTRIES,
            Opened("run", 1, 2, 200.0),
            TicketIssued(ticket(0), "g0-b", 201.0),
            message([again], time_s=202.0),
            BatchSelected(3, [0], 203.0),
            StepTrained(PolicyVersion(1, 3), [0], False),
        ],
    )
    found = [row for row in rows(run).values() if row.ticket_id == 0]
    assert [(row.trajectory_id, row.state, row.step) for row in found] == [
        ("g0-a.0.0", "abandoned_version", None),
        ("g0-a.0.1", "trained", 3),
        ("g0-a.0.0", "duplicate", None),
        ("g0-b.0.0", "trained", 3),
    ]


def test_the_listing_filters_counts_and_neutralises(run: RunFolder) -> None:
    write(run, ENTRIES)
    lines = list(inspect(run.path, "", None, "", 50))
    assert lines[0].split() == [
        "trajectory",
        "versions",
        "tokens",
        "lag",
        "queue",
        "s",
        "reward",
        "finish",
        "state",
    ]
    assert lines[1].split() == [
        "g0-a.0.0",
        "0.0..0.2",
        "2",
        "3",
        "4.50",
        "1",
        "stop",
        "trained",
        "in",
        "step",
        "4",
    ]
    assert lines[-1] == (
        "received: 1 duplicate, 1 invalid, 1 open, 1 reward_failed, 1 ticket_closed, 2 trained, "
        "1 unknown_ticket, 1 zero_variance"
    )
    assert all(line.isprintable() for line in lines)
    assert any("\\e]0;owned\\x07boom" in line for line in lines)
    assert len(list(inspect(run.path, "", 1, "", 0))) == 4
    assert len(list(inspect(run.path, "", None, "dropped", 0))) == 2 + 6
    with pytest.raises(ConfigError, match="'droped' is unknown; choose from trained, open, dropped, "):
        list(inspect(run.path, "", None, "droped", 0))
    assert "the newest 2 of 9" in list(inspect(run.path, "", None, "", 2))[3]


def test_one_trajectory_is_shown_as_text_made_printable(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run, ENTRIES)

    class Tokens:
        def decode_many(self, sequences: list[list[int]]) -> list[str]:
            return [f"{sequences[0]}\x1b[2J\nnext\rline\u202e" for _ in sequences]

    monkeypatch.setattr("headway.model.load_tokenizer", lambda folder: Tokens())
    monkeypatch.setattr("headway.model.resolve_model", lambda path: Path(path))
    lines = list(inspect(run.path, "1.0", None, "", 0))
    assert lines[2:7] == [
        "prompt (3 tokens)", "  [3, 4, 5]\\e[2J", "  next\\rline\\u202e", "completion (1 tokens)", "  [6]\\e[2J",
    ]  # fmt: skip
    assert lines[-1] == "behaviour log-prob: mean -0.500, lowest -0.500"
    with pytest.raises(ConfigError, match="no trajectory 7\\.7"):
        list(inspect(run.path, "7.7", None, "", 0))
    with pytest.raises(JournalError, match="has no content: reward_failed"):
        list(inspect(run.path, "g0-a.2.1", None, "", 0))


def test_the_real_tokenizer_is_used_and_its_absence_is_said(run: RunFolder, tiny_model: Path) -> None:
    write(run, ENTRIES)
    lines = list(inspect(run.path, "0.0", None, "", 0))
    assert lines[2] == "prompt (3 tokens)"
    assert not lines[3].startswith("  (as ids")
    (run.path / "config.toml").write_text(
        (run.path / "config.toml").read_text().replace(str(tiny_model), "/nowhere")
    )
    lines = list(inspect(run.path, "0.0", None, "", 0))
    assert lines[3].startswith("  (as ids: ")
    assert lines[4] == "  3 4 5"


def test_columns_are_aligned() -> None:
    assert table([]) == ["trajectory  versions  tokens  lag  queue s  reward  finish  state"]
