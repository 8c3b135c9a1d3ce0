"""Denominators: what a step's loss is divided by, whatever its split."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headway.algo import Objective, StepTotals, count_totals, head_loss_step, token_weights

MASK = np.array([1, 1, 0, 0, 0, 1, 1, 1, 1], dtype=bool)
OFFSETS = np.array([0, 3, 5, 5, 9])  # two of three trained, none of two, an empty segment, four of four


@pytest.mark.parametrize(
    ("denominator", "first", "last"),
    [("tokens", 1 / 6, 1 / 6), ("sequences", 1 / 4, 1 / 8), ("constant", 1 / 20, 1 / 20)],
)
def test_weights_of_each_denominator(denominator: str, first: float, last: float) -> None:
    totals = count_totals(MASK, OFFSETS)
    assert totals == StepTotals(num_tokens=6, num_sequences=2)
    weights = token_weights(MASK, OFFSETS, totals, denominator=denominator, max_new_tokens=10)
    np.testing.assert_allclose(weights, [first, first, 0, 0, 0, last, last, last, last])


def test_a_step_without_a_loss_token_has_weights_of_zero() -> None:
    """Contributes 0 and never 0/0."""
    mask = np.zeros(9, dtype=bool)
    for denominator in ("tokens", "sequences", "constant"):
        weights = token_weights(mask, OFFSETS, StepTotals(), denominator=denominator, max_new_tokens=10)
        assert (weights == 0).all()
    assert token_weights(np.zeros(0, dtype=bool), np.array([0]), StepTotals()).shape == (0,)


def test_a_rejected_token_still_counts() -> None:
    """The fixed denominator. A token that the clip leaves without gradient stays in the count."""
    mask, offsets = np.ones(5, dtype=bool), np.array([0, 5])
    weights = token_weights(mask, offsets, count_totals(mask, offsets))
    np.testing.assert_allclose(weights, 1 / 5)


def test_wrong_inputs_are_refused() -> None:
    totals = count_totals(MASK, OFFSETS)
    with pytest.raises(ValueError, match="offsets must rise from 0 to 9"):
        count_totals(MASK, np.array([0, 5]))
    with pytest.raises(ValueError, match="offsets"):
        count_totals(MASK, np.array([0, 5, 3, 9]))
    with pytest.raises(ValueError, match="whole step"):
        token_weights(MASK, OFFSETS, StepTotals(5, 2))
    with pytest.raises(ValueError, match="max_new_tokens"):
        token_weights(MASK, OFFSETS, totals, denominator="constant")
    with pytest.raises(ValueError, match="words"):
        token_weights(MASK, OFFSETS, totals, denominator="words")


LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34)
# Bounds so wide that some sequences, not all, are clipped.
OBJECTIVES = {
    "cispo": Objective("cispo"),
    "grpo": Objective("grpo"),
    "gspo": Objective("gspo", clip_low=0.5, clip_high=2.0),
}


def loss_and_gradient(rows: list[list[int]], denominator: str, name: str) -> tuple[float, torch.Tensor]:
    """Eight fixed sequences, split into rows; every sequence's data depends on its index alone."""

    def sequence(index: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * len(shape) + index)
        return torch.randn(LENGTHS[index], *shape, generator=generator)

    def mask_of(row: list[int]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        offsets = np.cumsum([0, *(LENGTHS[index] for index in row)])
        return np.concatenate([sequence(index, 2)[:, 0].numpy() > -1 for index in row]), offsets

    weight = torch.randn(19, 8, generator=torch.Generator().manual_seed(7))
    totals = sum((count_totals(*mask_of(row)) for row in rows), StepTotals())
    loss, gradient = 0.0, torch.zeros(19, 8)
    for row in rows:
        mask, offsets = mask_of(row)
        x = torch.cat([sequence(index, 8) for index in row])
        noise = torch.cat([sequence(index) for index in row])
        token_weight = token_weights(mask, offsets, totals, denominator=denominator, max_new_tokens=40)
        result = head_loss_step(
            x, weight, (noise.abs() * 7).long() % 19, inv_temperature=torch.ones(len(x)),
            behaviour=-3 + 0.3 * noise,
            advantage=torch.cat([sequence(index, 1)[:1, 0].expand(LENGTHS[index]) for index in row]),
            token_weight=torch.from_numpy(token_weight), segments=torch.from_numpy(offsets),
            objective=OBJECTIVES[name], weight_grad=gradient,
        )  # fmt: skip
        loss += float(result.loss)
    return loss, gradient


@pytest.mark.parametrize("denominator", ["tokens", "sequences", "constant"])
@pytest.mark.parametrize("name", ["cispo", "grpo", "gspo"])
def test_loss_and_gradient_do_not_depend_on_the_split(denominator: str, name: str) -> None:
    """1 x 8, 2 x 4, 8 x 1 and shuffled."""
    whole, gradient = loss_and_gradient([list(range(8))], denominator, name)
    assert float(gradient.norm()) > 1e-3
    splits = ([[0, 1, 2, 3], [4, 5, 6, 7]], [[i] for i in range(8)], [[6, 1, 3], [7, 0], [5, 2, 4]])
    for rows in splits:
        loss, other = loss_and_gradient(rows, denominator, name)
        assert loss == pytest.approx(whole, rel=1e-6)
        assert float((other - gradient).norm()) <= 1e-6 * float(gradient.norm())
