"""The loop of target_ess against a simple world: the older the samples, the lower the effective sample size."""

from __future__ import annotations

import math

from headway.staleness import EssController
from headway.staleness.ess import EssLimits

LIMITS = EssLimits(groups_per_step=4, slots=20, push_interval=2, clip={"algo.cap": 5.0})


class World:
    """ess = exp(-spread * lag), lag = steps of slots ahead + half the push interval."""

    def __init__(self, target: float, spread: float) -> None:
        self.controller = EssController(target, LIMITS)
        self.spread = spread
        self.settings: dict[str, int | float] = {
            "staleness.slots": 20, "push.interval": 2, "algo.cap": 5.0
        }  # fmt: skip
        self.moves: list[str] = []

    @property
    def ess(self) -> float:
        lag = self.settings["staleness.slots"] / 4 - 1 + (self.settings["push.interval"] - 1) / 2
        return math.exp(-self.spread * lag)

    def run(self, steps: int) -> float:
        for _ in range(steps):
            moves = self.controller.observe(self.ess)
            self.settings |= moves
            self.moves += moves
        return self.ess


def test_it_settles_near_the_target_and_stays_there() -> None:
    world = World(target=0.8, spread=0.2)
    assert world.ess < 0.45
    assert abs(world.run(200) - 0.8) < 0.1
    moves = len(world.moves)
    world.run(200)
    assert len(world.moves) == moves
    assert world.moves[0] == "push.interval"
    assert world.settings["algo.cap"] == 5.0


def test_it_loosens_again_when_the_policy_moves_slowly() -> None:
    world = World(target=0.8, spread=0.2)
    world.run(200)
    world.spread = 0.001
    world.run(300)
    assert world.settings == {"staleness.slots": 20, "push.interval": 2, "algo.cap": 5.0}


def test_it_never_leaves_the_recipe_and_says_when_nothing_is_left() -> None:
    world = World(target=0.9, spread=2.0)
    world.controller.observe(0.1)
    world.spread = 50.0
    for _ in range(600):
        world.settings |= world.controller.observe(0.1)
        assert 4 <= world.settings["staleness.slots"] <= 20
        assert 1 <= world.settings["push.interval"] <= 2
        assert 1.0 < world.settings["algo.cap"] <= 5.0
    assert world.controller.exhausted
    assert math.isclose(world.settings["algo.cap"], 1.8)


def test_one_move_at_a_time_and_none_before_it_shows() -> None:
    controller = EssController(0.9, LIMITS)
    assert controller.observe(0.5) == {"push.interval": 1}
    quiet = [controller.observe(0.5) for _ in range(5)]  # 20 slots are five steps
    assert quiet == [{}] * 5
    assert controller.observe(0.5) == {"staleness.slots": 18}


def test_a_skipped_step_is_no_measurement() -> None:
    controller = EssController(0.9, LIMITS)
    assert controller.observe(float("nan")) == {}
    assert controller.measured is None


def test_half_widths_move_towards_0_and_caps_towards_1() -> None:
    limits = EssLimits(4, 4, 1, {"algo.clip_low": 0.2, "algo.clip_high": 0.28, "algo.correction_cap": 5.0})
    moves = EssController(0.9, limits).observe(0.2)
    assert {key: round(value, 6) for key, value in moves.items()} == {
        "algo.clip_low": 0.16, "algo.clip_high": 0.224, "algo.correction_cap": 4.2
    }  # fmt: skip
