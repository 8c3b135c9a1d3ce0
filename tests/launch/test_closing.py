"""The last lines of a run tell the truth, and say so when the ledger does not balance."""

from pathlib import Path
from typing import Any

import msgspec

from headway.config import RunConfig, load_recipe
from headway.launch import closing_lines
from headway.launch.closing import balance, bottleneck, lag_words
from headway.types import LearnerStatus, TimeSplit

BUSY = TimeSplit(work=9.0, push=0.5, idle=0.2, other=0.3)
WAITING = TimeSplit(work=3.0, push=0.5, idle=6.2, other=0.3)
CONFIG: RunConfig = load_recipe(None, {"model.path": "builtin:sort", "env.name": "sort", "steps": 40})


def status(**changes: Any) -> LearnerStatus:
    tickets = {
        "issued": 330,
        "trained": 320,
        "dropped": 2,
        "dropped.deadline": 2,
        "in_flight": 8,
        "buffered": 0,
    }
    plain = LearnerStatus(
        status="finished", cause="", step=40, wall_s=20.0, samples_per_s=128.0, tokens_per_s=4100.0,
        reward_last_10=0.9125, max_lag_seen=2, lag_histogram=[600, 300, 100], learner=WAITING, generator=BUSY,
        tickets=tickets, trajectories={"received": 5, "trained": 5, "masked": 0, "dropped": 0, "buffered": 0},
        tokens={"received": 9, "trained": 8, "masked": 0, "dropped": 0, "buffered": 0, "lost_unsent": 4},
        dropped={"deadline": 2},
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


def test_the_last_lines() -> None:
    assert closing_lines(status(), CONFIG, Path("/runs/x")) == [
        "finished after 40 of 40 updates in 20.0 s: reward of the last 10 0.912, 128.0 samples/s, "
        "4,100 tokens/s",
        "lag of trained tokens: 0: 60 %, 1: 30 %, 2: 10 % (largest 2, bound 2)",
        "tickets: 330 issued = 320 trained + 2 dropped (deadline 2) + 8 in flight + 0 buffered",
        "trajectories: 5 received = 5 trained + 0 masked + 0 dropped + 0 buffered",
        "tokens: 9 received = 8 trained + 0 masked + 0 dropped + 0 buffered; 4 lost unsent  "
        "[does not balance: +1]",
        "bottleneck: generation-bound: the learner idled 62%; add a generator (generator.replicas), give "
        "generators more threads, or shorten completions",
        "run folder: /runs/x",
    ]


def test_a_run_without_an_update_claims_no_reward_and_no_lag() -> None:
    nothing = status(
        status="failed", cause="no model", step=0, lag_histogram=[], learner=TimeSplit(0, 0, 0, 0)
    )
    lines = closing_lines(nothing, CONFIG, Path("/runs/x"))
    assert lines[:3] == [
        "failed after 0 of 40 updates",
        "cause: no model",
        "lag of trained tokens: nothing was trained",
    ]


def test_each_bottleneck_has_its_words() -> None:
    assert bottleneck(status(learner=BUSY, generator=WAITING), CONFIG).startswith(
        "training-bound: the generators"
    )
    assert bottleneck(status(learner=BUSY, generator=BUSY), CONFIG).startswith("balanced")
    pushing = TimeSplit(work=6.0, push=3.5, idle=0.2, other=0.3)
    assert bottleneck(status(learner=pushing, generator=pushing), CONFIG).startswith("pushes")
    nothing = TimeSplit(0.0, 0.0, 0.0, 0.0)
    assert bottleneck(status(learner=nothing, generator=nothing), CONFIG).startswith("unknown")


def test_a_cause_is_shown_without_its_control_sequences() -> None:
    lines = closing_lines(status(status="failed", cause="learner died\n\x1b[2Jlast words"), CONFIG, Path("x"))
    assert lines[1:3] == ["cause: learner died", "  \\e[2Jlast words"]


def test_nothing_trained() -> None:
    assert lag_words([]) == "nothing was trained"
    assert balance({}, "issued") == "none"
