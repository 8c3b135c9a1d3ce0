"""Real processes, every way of ending: the run goes on or stops with the cause named, and leaves nothing."""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headway import Engine, RunFailed
from headway.errors import ConfigError
from headway.launch.leftovers import shared_directory
from headway.launch.supervisor import FAREWELL_S
from headway.stream import request
from headway.telemetry import MemorySink, read_records
from headway.wire.messages import Command

FAKE = (sys.executable, str(Path(__file__).with_name("fake_headway.py")))
BASE: dict[str, Any] = {"model": {"path": "none"}, "steps": 5}


def start(tmp_path: Path, sink: MemorySink | None = None, **sections: Any) -> Engine:
    arguments = sections.pop("args", {})
    sections = {
        **BASE,
        "run_dir": str(tmp_path / "run"),
        "env": {"name": "none", "args": arguments},
        **sections,
    }
    return Engine(None, sinks=lambda _folder: [sink] if sink else [], program=FAKE, **sections)


def leftovers(engine: Engine) -> list[str]:
    run_id = json.loads((engine.run_dir / "run.json").read_text())["run_id"]
    return [path.name for path in shared_directory().glob(f"headway-{run_id}-*")]


def living(engine: Engine) -> list[int]:
    """Generators that still run."""
    pids = [int(path.name.rpartition(".")[2]) for path in engine.run_dir.glob("generator-*.*")]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_run_yields_its_records_and_ends_clean(tmp_path: Path) -> None:
    sink = MemorySink()
    with start(tmp_path, sink, args={"starts": 2}, generator={"replicas": 2}) as engine:
        steps = [record.step for record in engine]
    assert steps == [1, 2, 3, 4, 5]
    assert [record.step for record in read_records(engine.run_dir / "metrics.jsonl")] == steps
    assert engine.status is not None
    assert engine.status.status == "finished"
    assert sink.status == engine.status
    assert (engine.status.lag_histogram, engine.status.samples_per_s) == ([200, 50], 16.0)
    assert '"status": "finished"' in (engine.run_dir / "summary.json").read_text()
    assert (leftovers(engine), living(engine)) == ([], [])


def test_children_get_their_share_of_the_cores(tmp_path: Path) -> None:
    with start(tmp_path, generator={"threads": 3}) as engine:
        list(engine)
    log = (engine.run_dir / "logs" / "generator-0.log").read_text()
    assert log.split() == [
        "OMP_NUM_THREADS",
        "3",
        "OMP_WAIT_POLICY",
        "passive",
        "TOKENIZERS_PARALLELISM",
        "false",
    ]


@pytest.mark.parametrize("behaviour", ["dies_once", "leaves_once"])
def test_a_generator_that_ends_is_restarted(tmp_path: Path, behaviour: str) -> None:
    sink = MemorySink()
    with start(tmp_path, sink, args={"generator": behaviour, "starts": 2}) as engine:
        assert len(list(engine)) == 5
    assert any("restart 1 of at most 5" in note for note in sink.notes)
    expected = "SIGKILL" if behaviour == "dies_once" else "exited with status 0"
    assert any("generator-0" in note and expected in note for note in sink.notes)


def test_a_frozen_generator_is_killed_and_restarted_when_the_learner_gives_it_up(tmp_path: Path) -> None:
    sink = MemorySink()
    arguments = {"generator": "freezes_once", "starts": 2, "lost": True}
    with start(tmp_path, sink, args=arguments) as engine:
        assert len(list(engine)) == 5
    assert any("given up and killed: silent for 0.2 s" in note for note in sink.notes)
    assert living(engine) == []


def test_a_generator_that_is_frozen_before_it_joins_is_killed_and_restarted(tmp_path: Path) -> None:
    sink = MemorySink()
    arguments = {"generator": "freezes_once", "starts": 2}
    with start(tmp_path, sink, args=arguments, stream={"heartbeat_s": 0.1}) as engine:
        assert len(list(engine)) == 5
    assert any("given up and killed: frozen by a signal" in note for note in sink.notes)
    assert living(engine) == []


def test_a_generator_that_never_stays_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    arguments = {"generator": "always_dies", "starts": 9}
    with (
        start(tmp_path, args=arguments, stream={"max_restarts": 1}) as engine,
        pytest.raises(RunFailed) as caught,
    ):
        list(engine)
    assert "after 1 restarts (stream.max_restarts), generator-0" in str(caught.value)
    assert "SIGKILL" in str(caught.value)
    assert leftovers(engine) == []


def test_an_error_of_the_user_is_not_tried_again(tmp_path: Path) -> None:
    with (
        start(tmp_path, args={"generator": "is_wrong", "starts": 9}) as engine,
        pytest.raises(RunFailed) as caught,
    ):
        list(engine)
    assert "no such data set" in str(caught.value)
    assert engine.status is not None
    assert engine.status.status == "failed"


@pytest.mark.parametrize(
    ("behaviour", "cause"),
    [
        ("is_killed", "learner (pid"),
        ("raises", "RuntimeError: the optimizer is gone"),
        ("leaves", "exited with status 0"),
        ("freezes", "was frozen by a signal (SIGSTOP)"),
        ("says_it_failed", "three bad steps"),
    ],
)
def test_the_end_of_the_learner_ends_the_run_with_its_cause(
    tmp_path: Path, behaviour: str, cause: str
) -> None:
    with start(tmp_path, args={"learner": behaviour}, stream={"heartbeat_s": 0.2}) as engine:
        taken: list[int] = []
        with pytest.raises(RunFailed, match="run folder") as caught:
            taken.extend(record.step for record in engine)
    assert cause in str(caught.value)
    assert taken == [1, 2]
    assert engine.status is not None
    assert (engine.status.status, engine.status.step) == ("failed", 2)
    assert '"status": "failed"' in (engine.run_dir / "summary.json").read_text()
    assert (leftovers(engine), living(engine)) == ([], [])


def test_a_learner_that_freezes_after_its_last_event_is_not_waited_for(tmp_path: Path) -> None:
    sink = MemorySink()
    started_s = time.monotonic()
    with (
        start(tmp_path, sink, args={"learner": "freezes_at_the_end"}, stream={"heartbeat_s": 0.2}) as engine,
        pytest.raises(RunFailed, match=r"after its last update, learner \(pid"),
    ):
        list(engine)
    assert time.monotonic() - started_s < FAREWELL_S
    assert any("frozen by a signal (SIGSTOP)" in note for note in sink.notes)
    assert (leftovers(engine), living(engine)) == ([], [])


def test_a_killed_learner_is_quoted(tmp_path: Path) -> None:
    with start(tmp_path, args={"learner": "is_killed"}) as engine, pytest.raises(RunFailed) as caught:
        list(engine)
    assert "was ended by SIGKILL (did the machine run out of memory?)" in str(caught.value)
    assert "about to be killed" in str(caught.value)


def test_a_learner_that_never_comes_up_ends_the_run(tmp_path: Path) -> None:
    program = (sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(60)")
    sections = {**BASE, "run_dir": str(tmp_path / "run"), "env": {"name": "none"}}
    engine = Engine(None, program=program, stream={"startup_deadline_s": 0.3}, **sections)
    with (
        engine,
        pytest.raises(RunFailed, match=r"did not come up within stream\.startup_deadline_s = 0\.3 s"),
    ):
        list(engine)


def test_stop_ends_after_the_current_step(tmp_path: Path) -> None:
    with start(tmp_path, args={"learner": "waits"}) as engine:
        for record in engine:
            if record.step == 2:
                engine.stop("enough")
    assert engine.status is not None
    assert (engine.status.status, engine.status.cause, engine.status.step) == ("stopped", "enough", 2)


def test_close_takes_no_more_than_five_seconds_from_a_learner_that_does_not_listen(tmp_path: Path) -> None:
    with start(tmp_path, args={"learner": "waits", "deaf": True}, checkpoint={"interval": 0}) as engine:
        assert next(iter(engine)).step == 1
        began = time.monotonic()
        engine.close()
        assert time.monotonic() - began < 5.0
    assert engine.status is not None
    assert engine.status.status == "stopped"
    assert (leftovers(engine), living(engine)) == ([], [])


def test_set_changes_what_can_be_changed_and_says_what_cannot(tmp_path: Path) -> None:
    with start(tmp_path, args={"learner": "waits"}) as engine:
        with pytest.raises(ConfigError, match=r"these can: .*staleness\.max_lag"):
            engine.set("batch.prompts", 4)
        with pytest.raises(ConfigError, match=r"learner\.lr"):
            engine.set("learner.lr", "fast")
        with pytest.raises(ConfigError, match="out of range"):
            engine.set("staleness.max_lag", 3)
        assert engine.config.staleness.max_lag == 2
        engine.set("staleness.max_lag", 1)
        assert engine.config.staleness.max_lag == 1
        engine.stop()


def test_a_change_from_outside_is_known_to_the_engine_and_the_next_is_judged_with_it(tmp_path: Path) -> None:
    """The learner alone knows what is in force; the engine follows it and refuses nothing by an old recipe."""
    with start(tmp_path, args={"learner": "waits"}, staleness={"max_lag": 1}) as engine:
        assert [next(iter(engine)).step for _ in range(2)] == [1, 2]
        run_id = json.loads((engine.run_dir / "run.json").read_text())["run_id"]
        for key, value in (("staleness.max_lag", "6"), ("staleness.slots", "20")):
            assert request(run_id, Command(command_id=0, action="set", key=key, value=value), 20.0) == ""
        refused = Command(command_id=0, action="set", key="staleness.max_lag", value="3")
        assert request(run_id, refused, 20.0) == "out of range"
        assert (engine.config.staleness.max_lag, engine.config.staleness.slots) == (6, 20)
        engine.set("push.interval", 4)  # beyond what max_lag 1 allows
        engine.set("algo.clip_high", 0.25)
        assert (engine.config.push.interval, engine.config.algo.clip_high) == (4, 0.25)
        engine.set("algo.clip_high", None)  # back to the objective's own
        assert engine.config.algo.clip_high is None
        engine.stop()


def test_records_that_nobody_takes_do_not_pile_up_while_the_end_is_waited_for(tmp_path: Path) -> None:
    sink = MemorySink()
    with start(tmp_path, sink, args={"learner": "waits"}) as engine:
        waiting = threading.Thread(target=engine.wait)
        waiting.start()
        end = time.monotonic() + 20
        while len(sink.records) < 2 or engine._inbox.qsize():
            assert time.monotonic() < end
            time.sleep(0.01)
        engine.stop("enough")
        waiting.join(20)
    assert engine.status == sink.status
    assert [record.step for record in sink.records] == [1, 2]


def test_a_wait_that_ends_before_the_run_leaves_the_records(tmp_path: Path) -> None:
    with start(tmp_path, args={"learner": "waits"}) as engine:
        assert engine.wait(0.3) is None
        assert [next(iter(engine)).step for _ in range(2)] == [1, 2]


def test_a_sink_that_raises_is_left_out_and_the_run_goes_on(tmp_path: Path) -> None:
    class Broken(MemorySink):
        def step(self, record: object) -> None:
            raise OSError("disk full")

    kept = MemorySink()
    sections = {**BASE, "run_dir": str(tmp_path / "run"), "env": {"name": "none"}}
    with Engine(None, sinks=lambda _folder: [Broken(), kept], program=FAKE, **sections) as engine:
        assert len(list(engine)) == 5
    assert any("Broken is left out from here on" in note for note in kept.notes)


def test_the_shared_memory_of_dead_runs_is_removed_at_start(tmp_path: Path) -> None:
    stale = shared_directory() / "headway-deadbeef-4194304"
    alive = shared_directory() / f"headway-deadbeef-{os.getpid()}"
    try:
        stale.touch()
        alive.touch()
        with start(tmp_path) as engine:
            list(engine)
        assert not stale.exists()
        assert alive.exists()
    finally:
        stale.unlink(missing_ok=True)
        alive.unlink(missing_ok=True)
