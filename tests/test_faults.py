"""Guarantees 1 to 4 under fire: real runs whose processes are killed, frozen, starved and lied to.

Nothing here sleeps and hopes: each test waits for something it can see, with a deadline.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.live import one, processes, wait_for

import headway
from headway.config import RunConfig
from headway.errors import RunFailed
from headway.report import RunReader, read_groups
from headway.serial import run_serial
from headway.types import LearnerStatus, StepRecord

MakeConfig = Callable[..., RunConfig]
HEARTBEAT_S = 0.4
SLACK_S = 4.0  # for a busy machine to schedule a poll, a message and a note
STREAM = {"heartbeat_s": HEARTBEAT_S, "startup_deadline_s": 60.0, "rollout_deadline_s": 60.0}
# Members run to their budget, so that requests are in flight at any moment.
LONG = {"max_new_tokens": 48, "ignore_eos": True}


class Watch:
    """A sink that keeps what a run said, and when."""

    def __init__(self) -> None:
        self.notes: list[tuple[float, str]] = []

    def __call__(self, _run_dir: Path) -> list[Watch]:
        return [self]

    def step(self, record: StepRecord) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append((time.monotonic(), text))

    def finish(self, status: LearnerStatus) -> None:
        pass

    def said(self, pattern: str) -> float | None:
        """When a note first matched."""
        return next((at for at, text in list(self.notes) if re.search(pattern, text)), None)


def leftovers(engine: headway.Engine) -> list[Path]:
    run_id = json.loads((engine.run_dir / "run.json").read_text())["run_id"]
    return list(Path("/dev/shm").glob(f"headway-{run_id}-*"))


def log_of(engine: headway.Engine, name: str) -> str:
    return (engine.run_dir / "logs" / f"{name}.log").read_text()


def check_records(engine: headway.Engine, records: list[StepRecord]) -> None:
    """What must hold at every record of every run, whatever was done to it."""
    config = engine.config
    assert [record.step for record in records] == list(range(1, len(records) + 1))
    for record in records:
        tickets, trajectories, tokens = record.tickets, record.trajectories, record.tokens
        assert tickets["issued"] == sum(
            tickets[name] for name in ("trained", "dropped", "in_flight", "buffered")
        )
        assert (
            tickets["trained"] == record.step * config.batch.prompts
        )  # each once, or the count would differ
        assert tickets["dropped"] == sum(record.dropped.values())
        for counts in (trajectories, tokens):
            assert counts["received"] == sum(
                counts[name] for name in ("trained", "masked", "dropped", "buffered")
            )
        assert record.lag_max <= config.staleness.max_lag
        assert sum(record.lag_histogram) == record.num_tokens
        assert record.reward == pytest.approx(record.reward)
    for earlier, later in pairwise(records):
        for name in ("issued", "trained", "dropped"):
            assert later.tickets[name] >= earlier.tickets[name]
        for name in ("received", "trained"):
            assert later.tokens[name] >= earlier.tokens[name]
        assert later.tokens["trained"] - earlier.tokens["trained"] == later.num_tokens
    rows = [json.loads(line) for line in (engine.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "step"] == [record.step for record in records]
    assert [row["kind"] for row in rows].count("status") == 1
    assert rows[-1]["kind"] == "status"


def check_end(engine: headway.Engine) -> LearnerStatus:
    """A run that did all its updates, and left nothing behind."""
    status = engine.status
    assert status is not None
    assert (status.status, status.cause) == ("finished", "")
    assert status.tickets["in_flight"] == status.tickets["buffered"] == 0
    assert status.tickets["issued"] == status.tickets["trained"] + status.tickets["dropped"]
    assert status.max_lag_seen <= engine.config.staleness.max_lag
    assert not processes(engine)
    assert not leftovers(engine)
    assert exit_codes(engine) == {0}
    return status


def exit_codes(engine: headway.Engine) -> set[int | None]:
    """Of each generator's last process."""
    return {child.poll() for child in engine._supervisor._fleet.children()}


@pytest.fixture
def recipe(tiny_config: MakeConfig) -> MakeConfig:
    def make(**changes: Any) -> RunConfig:
        changes = {"save": False, "stream": STREAM, **changes}
        return tiny_config(**changes)

    return make


def environment(folder: Path, reward: str, prompt: str = 'return f"^s{index % 10000:04d}="') -> str:
    """An environment file with the given bodies."""
    path = folder / "hostile.py"
    path.write_text(
        "import os, signal, sys, time\n\n\nclass Hostile:\n    num_prompts = None\n\n"
        f"    def prompt(self, index):\n        {prompt}\n\n"
        f"    def reward(self, index, completion):\n        {reward}\n"
    )
    return str(path)


# Generators ---------------------------------------------------------------------------------------------------


# Rewards of all but the first prompts wait for the first gate, those of later ones for the second too.
GATED = """
        for gate, first in (("one", 2), ("two", 18)):
            while index >= first and not os.path.exists({folder!r} + "/open-" + gate):
                open({folder!r} + "/waits-" + gate, "w").close()
                time.sleep(0.01)
        return float(sum(completion.token_ids) % 7)"""


def test_a_generator_may_be_killed_at_start_up_and_in_mid_request_and_frozen(
    recipe: MakeConfig, tmp_path: Path
) -> None:
    """Each loss is noticed, each process replaced, the run ends as if nothing had been, nothing trained twice.

    Both the killed and the frozen generator hold a ticket that cannot end before its gate is opened.
    """
    watch = Watch()
    path = environment(tmp_path, GATED.format(folder=str(tmp_path)))
    config = recipe(steps=14, env={"name": path, "args": {}}, sampling=LONG, staleness={"max_lag": 3})

    def holds(gate: str) -> psutil.Process:
        sign = tmp_path / f"waits-{gate}"
        wait_for(f"a reward at gate {gate}", lambda: sign.exists() or None)
        return one(engine, "generator")

    with headway.Engine(config, sinks=watch) as engine:
        newborn = one(engine, "generator")
        newborn.kill()
        killed, killed_at = holds("one"), time.monotonic()
        killed.kill()
        (tmp_path / "open-one").touch()
        frozen, frozen_at = holds("two"), time.monotonic()
        frozen.suspend()
        (tmp_path / "open-two").touch()
        records = list(engine)
    check_records(engine, records)
    assert len(records) == 14
    status = check_end(engine)
    assert status.dropped["generator_lost"] >= 2
    assert watch.said(rf"generator-0 \(pid {newborn.pid}\) was ended by SIGKILL.*restart 1 of") is not None
    noticed = watch.said(rf"generator-0 \(pid {killed.pid}\) was ended by SIGKILL.*restart 2 of")
    assert noticed is not None
    assert noticed - killed_at < 2 * HEARTBEAT_S + SLACK_S
    noticed = watch.said(rf"generator-0 \(pid {frozen.pid}\) is given up and killed: frozen by a signal")
    assert noticed is not None
    assert HEARTBEAT_S < noticed - frozen_at < 2 * HEARTBEAT_S + SLACK_S
    assert watch.said("restart 3 of") is not None
    assert watch.said("restart 4 of") is None
    assert len(re.findall("is given up", log_of(engine, "learner"))) == 2
    check_what_is_recorded(engine, records)


def check_what_is_recorded(engine: headway.Engine, records: list[StepRecord]) -> None:
    """Each life of a process has a file of its times, and the journal tells every trained trajectory."""
    learner, generator = RunReader(engine.run_dir).read().processes
    assert (learner.name, generator.name) == ("learner", "generator 0")
    assert len(list((engine.run_dir / "spans").glob("g0-*.jsonl"))) >= 3
    assert (learner.slices[1:, 0] - learner.slices[:-1, 1] < 1e-6).all()
    groups = read_groups(engine.run_dir / "journal")
    assert groups.fault == ""
    assert groups.lag.steps.tolist() == [record.step for record in records]
    assert sum(part.trained for part in groups.deciles) == records[-1].trajectories["trained"]


# Two runs, hostile rewards, a killed learner ------------------------------------------------------------------

PROMPT = 'return "^s" + "1" * (5000 if index % 9 == 4 else 4) + "="'
REWARD = """
        if (index + sum(completion.token_ids)) % 10 == 0:
            raise ValueError("now and then")
        if index in (3, 11) and completion.token_ids[0] % 2:
            while True:
                pass
        if index == 5 and completion.token_ids[0] % 2:
            os._exit(7)
        return float(sum(completion.token_ids) % 7)"""


def test_two_runs_on_one_host_do_not_meet_though_one_is_hostile_and_one_is_killed(
    recipe: MakeConfig, tmp_path: Path
) -> None:
    """The first has two generators, rewards that raise, hang and die, and prompts that are too long; its books
    balance at every record. The other's learner is killed: that run alone fails, by name, and leaves nothing.
    """
    path = environment(tmp_path, REWARD, PROMPT)
    hostile = recipe(
        steps=25, env={"name": path, "args": {}}, staleness={"max_lag": 3}, generator={"replicas": 2},
        reward={"deadline_s": 1.0},
    )  # fmt: skip
    endless = recipe(steps=100_000, run_dir=str(tmp_path / "other"), sampling=LONG)
    with headway.Engine(hostile) as engine, headway.Engine(endless) as other:
        kept = [next(iter(other))]
        records = list(engine)
        check_killed_learner(other, kept)
    check_records(engine, records)
    status = check_end(engine)
    assert len(records) == 25
    assert max(record.lag_max for record in records) >= 1
    assert status.tokens["trained"] == sum(record.num_tokens for record in records)
    assert status.dropped["prompt_too_long"] >= 1
    # Members of dropped groups aside, rewards that failed take single members out of trained ones.
    assert status.trajectories["trained"] < 4 * status.tickets["trained"]
    check_time(records)


def check_killed_learner(engine: headway.Engine, records: list[StepRecord]) -> None:
    everybody = processes(engine)
    assert len(everybody) == 2
    workers = [worker for process in everybody.values() for worker in process.children(recursive=True)]
    assert workers
    assert leftovers(engine)
    at = time.monotonic()
    one(engine, "learner").kill()
    with pytest.raises(RunFailed, match=r"learner \(pid \d+\) was ended by SIGKILL"):
        records.extend(engine)
    engine.close()
    assert time.monotonic() - at < 2.0 + SLACK_S
    check_records(engine, records)
    assert "stopped (SIGTERM)" in log_of(engine, "generator-0")  # in order, though nobody answers it
    assert exit_codes(engine) == {0}
    assert not processes(engine)
    assert psutil.wait_procs(workers, timeout=2.0)[1] == []
    assert not leftovers(engine)


def check_time(records: list[StepRecord]) -> None:
    """The learner's time splits sum to the wall time."""
    wall = records[-1].elapsed_s - records[0].elapsed_s
    assert sum(record.learner.total for record in records[1:]) == pytest.approx(wall, rel=0.01, abs=0.03)


# Nothing but failures -----------------------------------------------------------------------------------------


def test_a_reward_that_always_raises_stops_the_run_with_the_first_error(
    recipe: MakeConfig, tmp_path: Path
) -> None:
    path = environment(tmp_path, 'raise ValueError("no such oracle")')
    records: list[StepRecord] = []
    status = run_serial(recipe(env={"name": path, "args": {}}), tmp_path, records.append)
    assert (status.status, records) == ("failed", [])
    assert "ValueError: no such oracle" in status.cause


def test_prompts_that_are_all_too_long_stop_the_run_with_the_reason(
    recipe: MakeConfig, tmp_path: Path
) -> None:
    path = environment(tmp_path, "return 1.0", 'return "^s" + "1" * 5000')
    records: list[StepRecord] = []
    status = run_serial(recipe(env={"name": path, "args": {}}), tmp_path, records.append)
    assert (status.status, records) == ("failed", [])
    assert "prompt_too_long" in status.cause
