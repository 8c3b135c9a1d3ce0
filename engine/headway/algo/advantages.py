"""Advantages from rewards: group baselines by group id, before any shuffle, packing or sharding.

In: rewards and group ids in any order. Out: one advantage per trajectory, and for every group without a
gradient the reason. The result per trajectory does not depend on the order of arrival, bit for bit.

Modes, for a member with reward r of a group of n valid members (n >= 2) with mean m:

    batch   (r - m) / std, std = root mean square of all r - m in the batch (ddof 0)    REINFORCE++ baseline
    group   (r - m) / std of its group (ddof 1)                                         GRPO
    mean    r - m                                                                       Dr. GRPO
    loo     r - mean of the other members = (r - m) n / (n - 1)                         RLOO

A group whose rewards spread no more than SPREAD_TOLERANCE x max(1, largest |reward|) has zero variance: its
members get advantages of exactly 0 and take no part in the batch's std, so the others' advantages are the
same whether or not such groups were filtered out before. Members kept with a 0 still count as loss tokens
and still feel a KL or entropy term. A group of one has no baseline and is dropped.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.errors import EnvironmentFailure
from headway.types import DropReason

SPREAD_TOLERANCE = 1e-6
STD_EPSILON = 1e-6


class AdvantageMode(enum.StrEnum):
    """How a reward becomes an advantage; see the module's table."""

    BATCH = "batch"
    GROUP = "group"
    MEAN = "mean"
    LOO = "loo"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """The advantages of N trajectories, in the order they were given.

    Attributes:
        values: float64 [N]; 0 where not trained.
        trained: bool [N]; False on invalid members and on all members of a dropped group.
        invalid: bool [N]; the reward was NaN or infinite.
        dropped: by group id, REWARD_FAILED: fewer than two valid members.
        flat: ids of the groups with zero variance, ascending; trained, with advantages of 0.
        std: what batch mode divided by; 1.0 in the other modes.
    """

    values: NDArray[np.float64]
    trained: NDArray[np.bool_]
    invalid: NDArray[np.bool_]
    dropped: dict[int, DropReason]
    flat: list[int]
    std: float

    @property
    def num_invalid(self) -> int:
        """Members without a usable reward."""
        return int(self.invalid.sum())


def clean_reward(value: object, *, source: str, sample: str) -> float:
    """A reward as a float.

    Args:
        value: int, float, bool, numpy scalar, or an array or tensor of no dimensions.
        source: the reward function's name; sample: the trajectory's id; both for the error.

    Returns:
        The value; NaN when it is NaN or infinite (a member to be dropped and counted).

    Raises:
        EnvironmentFailure: anything else, such as None, a string or an array with dimensions.
    """
    number = value
    if not isinstance(number, numbers.Real | np.generic) and getattr(number, "shape", None) == ():
        item = getattr(number, "item", None)
        number = item() if callable(item) else number
    if isinstance(number, np.generic):
        number = number.item()
    if not isinstance(number, numbers.Real):
        raise EnvironmentFailure(
            f"reward function {source} returned {value!r} ({type(value).__name__}) for sample {sample}; "
            "expected one number: int, float, bool, a numpy scalar or an array of no dimensions"
        )
    reward = float(number)
    return reward if math.isfinite(reward) else math.nan


def judge_group(rewards: Sequence[float] | NDArray[np.float64]) -> DropReason | None:
    """Why a finished group carries no gradient, or None if it does.

    Args:
        rewards: of its members, NaN or infinite for those without one.

    Returns:
        REWARD_FAILED with fewer than two valid members (a group of one included), ZERO_VARIANCE, or None.
    """
    values = np.asarray(rewards, dtype=np.float64)
    valid = values[np.isfinite(values)]
    if valid.size < 2:
        return DropReason.REWARD_FAILED
    return DropReason.ZERO_VARIANCE if _is_flat(valid.min(), valid.max()) else None


def group_advantages(
    rewards: Sequence[float] | NDArray[np.float64],
    group_ids: Sequence[int] | NDArray[np.int64],
    *,
    mode: AdvantageMode | str = AdvantageMode.BATCH,
) -> Advantages:
    """Advantages of a batch of trajectories.

    Args:
        rewards: [N], NaN or infinite for members without a reward (see clean_reward).
        group_ids: int [N]; members of a group need not be adjacent, and missing members are simply absent.
        mode: see the module's table.

    Returns:
        Advantages; in the order given.

    Raises:
        ValueError: lengths differ, or an unknown mode.
    """
    mode = AdvantageMode(mode)
    reward = np.asarray(rewards, dtype=np.float64)
    group = np.asarray(group_ids, dtype=np.int64)
    if reward.ndim != 1 or reward.shape != group.shape:
        raise ValueError(f"rewards and group_ids must be [N] both, got {reward.shape} and {group.shape}")
    invalid = ~np.isfinite(reward)
    values = np.zeros(reward.shape, dtype=np.float64)
    trained = np.zeros(reward.shape, dtype=np.bool_)
    varied = np.zeros(reward.shape, dtype=np.bool_)
    flat: list[int] = []
    dropped = {int(group_id): DropReason.REWARD_FAILED for group_id in np.unique(group)}
    for group_id, places in _sorted_groups(reward, group, invalid):
        reason = judge_group(reward[places])
        if reason is DropReason.REWARD_FAILED:
            continue
        del dropped[group_id]
        trained[places] = True
        if reason is DropReason.ZERO_VARIANCE:
            flat.append(group_id)
            continue
        values[places] = _centre(reward[places], mode)
        varied[places] = True
    std = _batch_std(values[varied]) if mode is AdvantageMode.BATCH else 1.0
    values /= std
    return Advantages(values, trained, invalid, dropped, flat, std)


def _sorted_groups(
    reward: NDArray[np.float64], group: NDArray[np.int64], invalid: NDArray[np.bool_]
) -> list[tuple[int, NDArray[np.int64]]]:
    """The places of each group's valid members, sorted by reward: sums then do not depend on arrival."""
    order = np.lexsort((reward, group))
    order = order[~invalid[order]]
    if not order.size:
        return []
    starts = np.flatnonzero(np.diff(group[order], prepend=group[order[0]] - 1))
    return [(int(group[places[0]]), places) for places in np.split(order, starts[1:])]


def _centre(rewards: NDArray[np.float64], mode: AdvantageMode) -> NDArray[np.float64]:
    """One group's advantages before the batch's scale."""
    centred = rewards - math.fsum(rewards) / rewards.size
    if mode is AdvantageMode.LOO:
        return centred * (rewards.size / (rewards.size - 1))
    if mode is AdvantageMode.GROUP:
        return centred / (math.sqrt(math.fsum(centred**2) / (rewards.size - 1)) + STD_EPSILON)
    return centred


def _batch_std(centred: NDArray[np.float64]) -> float:
    """Root mean square; 1 if there is no member."""
    if not centred.size:
        return 1.0
    return math.sqrt(math.fsum(centred**2) / centred.size) + STD_EPSILON


def _is_flat(low: float, high: float) -> bool:
    return bool(high - low <= SPREAD_TOLERANCE * max(1.0, abs(low), abs(high)))
