"""Inputs that are formed from the learner's scores, against loops over the tokens."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from headway.algo import TokenInputs, resolve_recipe, scored_inputs, step_m2_limit
from headway.algo.scored import last_of_segment

OFFSETS = torch.tensor([0, 3, 3, 8, 10])


def make_tokens(lag: torch.Tensor | None = None) -> tuple[torch.Tensor, TokenInputs]:
    generator = torch.Generator().manual_seed(4)
    logp, noise, advantage = torch.randn(3, 10, generator=generator)
    weight = torch.full((10,), 0.1)
    weight[[2, 5, 8, 9]] = 0.0  # last of the first, one inside the second, all of the last
    return logp, TokenInputs(logp + 0.5 * noise, advantage, weight, OFFSETS, lag)


def test_vtrace_weighs_the_trajectory_s_advantage_by_how_it_went_on() -> None:
    logp, tokens = make_tokens()
    recipe = resolve_recipe("vtrace", cap=1.2, trace_lambda=0.9, trace_cap=0.8)
    got, proximal = scored_inputs(recipe, logp, tokens)
    assert proximal is None
    expected = [0.0] * 10
    ratio = (logp - tokens.behaviour).exp().tolist()
    for low, high in itertools.pairwise(OFFSETS.tolist()):
        places = [t for t in range(low, high) if tokens.token_weight[t] != 0]
        for index, place in enumerate(places):
            later = places[index + 1 :]
            value = float(tokens.advantage[places[-1]])
            if later:
                value *= math.prod(0.9 * min(ratio[t], 0.8) for t in later[:-1]) * min(ratio[later[-1]], 1.2)
            expected[place] = value
    torch.testing.assert_close(got, torch.tensor(expected))


def test_on_policy_vtrace_changes_no_advantage() -> None:
    logp, tokens = make_tokens()
    same = TokenInputs(logp, torch.full((10,), 2.0), tokens.token_weight, OFFSETS, None)
    got, _ = scored_inputs(resolve_recipe("vtrace"), logp, same)
    torch.testing.assert_close(got, torch.where(tokens.token_weight != 0, 2.0, 0.0))


def test_the_lagged_proximal_policy_is_a_share_of_the_way() -> None:
    lag = torch.tensor([0, 1, 2, 4, 0, 1, 2, 4, 0, 1], dtype=torch.float32)
    logp, tokens = make_tokens(lag)
    tokens.behaviour[8] = -math.inf  # masked; must not turn into a NaN
    advantage, proximal = scored_inputs(resolve_recipe("decoupled_ppo"), logp, tokens)
    assert proximal is not None
    assert torch.equal(advantage, tokens.advantage)
    for index in range(10):
        n, pi, mu = int(lag[index]), float(logp[index]), float(tokens.behaviour[index])
        want = pi if n == 0 else pi + (mu - pi) / n
        assert float(proximal[index]) == pytest.approx(want, rel=1e-6, abs=1e-6)


def test_the_last_active_token_of_each_segment() -> None:
    _, tokens = make_tokens()
    assert last_of_segment(tokens.token_weight != 0, OFFSETS).nonzero()[:, 0].tolist() == [1, 7]
    assert not last_of_segment(torch.zeros(10, dtype=torch.bool), OFFSETS).any()


def test_m2po_s_limit_is_of_all_rows() -> None:
    logp, tokens = make_tokens()
    recipe = resolve_recipe("m2po", m2_bound=0.05)
    limit = float(step_m2_limit(recipe, [(logp, tokens), (logp * 1.1, tokens)]))
    squares = torch.cat([logp - tokens.behaviour, logp * 1.1 - tokens.behaviour]).double() ** 2
    active = torch.cat([tokens.token_weight != 0] * 2)
    kept = squares[active & (squares <= limit)]
    larger = squares[active & (squares > limit)]
    assert float(kept.mean()) <= 0.05
    assert float(torch.cat([kept, larger.amin()[None]]).mean()) > 0.05
