"""Time splits tell the truth.

Parts sum to the wall time, and idle shares are those of the synthetic peers.
"""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.telemetry import SplitClock
from headway.types import TimeSplit


class FakeTime:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


def test_a_nested_state_interrupts_the_outer_one() -> None:
    time = FakeTime()
    clock = SplitClock(time)
    time.spend(1)
    with clock("work"):
        time.spend(2)
        with clock("push"):
            time.spend(4)
        time.spend(8)
    time.spend(16)
    assert clock.split() == TimeSplit(work=10.0, push=4.0, idle=0.0, other=17.0)


def test_an_exception_ends_its_state() -> None:
    time = FakeTime()
    clock = SplitClock(time)
    with pytest.raises(KeyError), clock("work"):
        raise KeyError
    time.spend(1)
    assert clock.split() == TimeSplit(0.0, 0.0, 0.0, 1.0)


@given(st.lists(st.tuples(st.sampled_from(["work", "push", "idle", "other", "lap"]), st.integers(0, 10**12))))
def test_parts_sum_to_the_wall_time_and_laps_to_the_whole(moves: list[tuple[str, int]]) -> None:
    time = FakeTime()
    clock = SplitClock(time)
    laps: collections.Counter[str] = collections.Counter()
    parts = ("work", "push", "idle", "other")
    for state, nanoseconds in [*moves, ("lap", 0)]:
        if state == "lap":
            time.now += nanoseconds
            lap = clock.lap()
            laps.update({part: round(getattr(lap, part) * 1e9) for part in parts})
        else:
            with clock(state):  # type: ignore[arg-type]
                time.now += nanoseconds
    split = clock.split()
    assert sum(round(getattr(split, part) * 1e9) for part in parts) == time.now
    assert {part: laps[part] for part in parts} == {part: round(getattr(split, part) * 1e9) for part in parts}


def simulate(generate_s: float, train_s: float, steps: int, capacity: int) -> tuple[TimeSplit, TimeSplit]:
    """A generator and a learner with one bounded queue between them, on one virtual clock.

    Each peer's next event is known, so the earlier one is advanced; a peer that cannot go on is idle until
    the other's event frees it.
    """
    time = FakeTime()
    learner, generator = SplitClock(time), SplitClock(time)
    queued = trained = 0
    done_generating: float | None = 0.0 + generate_s
    done_training: float | None = None
    states = {"learner": learner("idle"), "generator": generator("work")}
    for state in states.values():
        state.__enter__()

    def move(peer: str, clock: SplitClock, state: str) -> None:
        states[peer].__exit__(None, None, None)
        states[peer] = clock(state)  # type: ignore[arg-type]
        states[peer].__enter__()

    while trained < steps:
        now = min(event for event in (done_generating, done_training) if event is not None)
        time.now = round(now * 1e9)
        if done_generating == now:
            queued += 1
            done_generating = None
        if done_training == now:
            trained += 1
            done_training = None
            move("learner", learner, "idle")
        if done_training is None and queued:
            queued -= 1
            done_training = now + train_s
            move("learner", learner, "work")
        if done_generating is None and queued < capacity:
            done_generating = now + generate_s
            move("generator", generator, "work")
        elif done_generating is None:
            move("generator", generator, "idle")
    return learner.split(), generator.split()


def test_a_generator_three_times_slower_leaves_the_learner_two_thirds_idle() -> None:
    learner, generator = simulate(generate_s=3.0, train_s=1.0, steps=300, capacity=2)
    assert learner.shares().idle == pytest.approx(2 / 3, abs=0.01)
    assert generator.shares().idle == pytest.approx(0.0, abs=0.01)
    assert learner.total == generator.total == 901.0


def test_a_generator_three_times_faster_is_two_thirds_idle_itself() -> None:
    learner, generator = simulate(generate_s=1.0, train_s=3.0, steps=300, capacity=2)
    assert learner.shares().idle == pytest.approx(0.0, abs=0.01)
    assert generator.shares().idle == pytest.approx(2 / 3, abs=0.01)
    assert learner.total == generator.total == 901.0
