"""Advantages: baselines by group id, reward cleaning, groups without a gradient."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.algo.advantages import AdvantageMode, clean_reward, group_advantages, judge_group
from headway.errors import EnvironmentFailure
from headway.types import DropReason

MODES = tuple(AdvantageMode)
members = st.lists(
    st.tuples(
        st.sampled_from([3, 8, 11, 40]),
        st.sampled_from([0.0, 1.0, 0.5, -2.0, 0.1, 1e3, math.nan, math.inf]),
    ),
    max_size=24,
)


def oracle(rewards: list[float], groups: list[int], mode: str) -> list[float]:
    """Each member on its own, the way a paper writes it."""
    by_group: dict[int, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        if math.isfinite(reward):
            by_group.setdefault(group, []).append(reward)
    centred: list[float] = []
    spread: list[float] = []
    for reward, group in zip(rewards, groups, strict=True):
        mates = by_group.get(group, [])
        flat = len(mates) < 2 or max(mates) == min(mates)
        if flat or not math.isfinite(reward):
            centred.append(0.0)
            continue
        value = reward - sum(mates) / len(mates)
        spread.append(value)
        if mode == "loo":
            value = reward - (sum(mates) - reward) / (len(mates) - 1)
        elif mode == "group":
            value /= float(np.std(mates, ddof=1)) + 1e-6
        centred.append(value)
    if mode == "batch" and spread:
        scale = math.sqrt(sum(value**2 for value in spread) / len(spread)) + 1e-6
        return [value / scale for value in centred]
    return centred


@given(members, st.sampled_from(MODES), st.randoms(use_true_random=False))
def test_any_batch_matches_the_definition_in_any_order(
    batch: list[tuple[int, float]], mode: AdvantageMode, random: Any
) -> None:
    """Computed by group id; the order of arrival changes no bit."""
    groups, rewards = [group for group, _ in batch], [reward for _, reward in batch]
    straight = group_advantages(rewards, groups, mode=mode)
    np.testing.assert_allclose(straight.values, oracle(rewards, groups, mode), rtol=1e-9, atol=1e-9)
    order = list(range(len(batch)))
    random.shuffle(order)
    shuffled = group_advantages([rewards[i] for i in order], [groups[i] for i in order], mode=mode)
    assert (shuffled.values == straight.values[order]).all()
    assert (shuffled.trained == straight.trained[order]).all()
    assert (shuffled.dropped, shuffled.flat) == (straight.dropped, straight.flat)


@pytest.mark.parametrize("mode", MODES)
def test_a_group_without_spread_has_advantages_of_exactly_zero(mode: AdvantageMode) -> None:
    """Also where the spread is rounding, which a naive std turns into 1.7."""
    for rewards in ([1.0, 1, 1, 1], [1.0, 1, 1, 1 + 1e-9], [0.1 + 0.2, 0.3], [1e6, 1e6 + 1e-3]):
        result = group_advantages(rewards, [5] * len(rewards), mode=mode)
        assert (result.values == 0).all()
        assert result.trained.all()
        assert (result.flat, result.dropped) == ([5], {})
        assert judge_group(rewards) is DropReason.ZERO_VARIANCE


def test_members_without_a_finite_reward_are_dropped_and_counted() -> None:
    """[1, nan, 0, 1] is normalised over three; all-nan and single groups are dropped."""
    rewards = [1.0, math.nan, 0.0, 1.0, math.nan, math.nan, 7.0, math.inf, -math.inf, 2.0, 4.0]
    groups = [1, 1, 1, 1, 2, 2, 3, 4, 4, 4, 4]
    result = group_advantages(rewards, groups, mode="group")
    std = float(np.std([1, 0, 1], ddof=1))
    np.testing.assert_allclose(result.values[:4], [1 / 3 / std, 0, -2 / 3 / std, 1 / 3 / std], rtol=1e-5)
    assert result.num_invalid == 5
    assert result.dropped == {2: DropReason.REWARD_FAILED, 3: DropReason.REWARD_FAILED}
    assert result.trained.tolist() == [True, False, True, True, False, False, False, False, False, True, True]
    assert result.values[6] == 0.0
    np.testing.assert_allclose(result.values[9:], [-math.sqrt(0.5), math.sqrt(0.5)], rtol=1e-5)


def test_a_group_with_missing_members_is_baselined_on_those_present() -> None:
    full = group_advantages([0.0, 1.0, 0.0, 1.0], [1, 1, 2, 2], mode="mean")
    partial = group_advantages([0.0, 1.0, 1.0], [1, 1, 2], mode="mean")
    assert partial.values.tolist() == [*full.values[:2], 0.0]
    assert partial.dropped == {2: DropReason.REWARD_FAILED}


def test_the_batch_std_ignores_groups_without_spread() -> None:
    alone = group_advantages([0.0, 1.0, 0.0], [1, 1, 1])
    among = group_advantages([0.0, 1.0, 0.0, 5.0, 5.0], [1, 1, 1, 2, 2])
    assert (among.values[:3] == alone.values).all()
    assert float(np.sqrt((alone.values**2).mean())) == pytest.approx(1.0, abs=1e-5)


def test_ddof_of_each_mode() -> None:
    """group divides by n - 1, batch by n."""
    assert group_advantages([0.0, 1.0], [1, 1], mode="group").values[1] == pytest.approx(
        math.sqrt(0.5), rel=1e-5
    )
    assert group_advantages([0.0, 1.0], [1, 1], mode="batch").values[1] == pytest.approx(1.0, rel=1e-5)
    assert group_advantages([0.0, 1.0], [1, 1], mode="loo").values.tolist() == [-1.0, 1.0]


def test_an_empty_batch_and_wrong_shapes() -> None:
    assert group_advantages([], []).values.shape == (0,)
    with pytest.raises(ValueError, match=r"\[N\] both"):
        group_advantages([1.0], [1, 2])
    with pytest.raises(ValueError, match="median"):
        group_advantages([1.0, 2.0], [1, 1], mode="median")


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (3, 3.0),
        (True, 1.0),
        (0.25, 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(-2), -2.0),
        (np.bool_(True), 1.0),
        (np.array(1.5), 1.5),
        (torch.tensor(2.5), 2.5),
        (torch.tensor(True), 1.0),
    ],
)
def test_any_single_number_is_a_reward(value: object, reward: float) -> None:
    assert clean_reward(value, source="digits", sample="g0.1.2") == reward


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), torch.tensor(math.inf)])
def test_a_reward_that_is_not_finite_becomes_nan(value: object) -> None:
    assert math.isnan(clean_reward(value, source="digits", sample="g0.1.2"))


@pytest.mark.parametrize("value", [None, "1.0", [1.0], np.zeros(1), torch.zeros(2), {"reward": 1}, 1j])
def test_anything_else_names_the_function_and_the_sample(value: object) -> None:
    with pytest.raises(EnvironmentFailure, match=r"reward function digits returned .* for sample g0\.1\.2"):
        clean_reward(value, source="digits", sample="g0.1.2")
