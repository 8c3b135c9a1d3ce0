"""top-k, top-p, min-p against a naive implementation, and through the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.generate import FinishedMember, GroupRequest
from headway.generate.filters import filter_logits, has_filter
from headway.types import Sampling


def naive(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> set[int]:
    """Ids kept, from the definitions, one set at a time."""
    weights = np.exp((np.array(logits, np.float64) - max(logits)) / (temperature or 1.0))
    probability = (weights / weights.sum()).tolist()
    order = sorted(range(len(logits)), key=lambda i: -probability[i])
    kept = set(order)
    if top_k is not None:
        kept &= set(order[:top_k])
    if top_p is not None:
        nucleus: set[int] = set()
        for token in order:
            nucleus.add(token)
            if sum(probability[i] for i in nucleus) >= top_p:
                break
        kept &= nucleus
    if min_p is not None:
        kept &= {i for i in order if probability[i] >= min_p * probability[order[0]]}
    return kept


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.integers(-60, 60), min_size=1, max_size=12, unique=True),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.one_of(st.none(), st.integers(1, 14)),
    top_p=st.one_of(st.none(), st.sampled_from([0.05, 0.31, 0.5, 0.83, 0.99])),
    min_p=st.one_of(st.none(), st.sampled_from([0.011, 0.07, 0.33, 0.9])),
)
def test_the_kept_set_is_the_naive_one(
    logits: list[int], temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    values = [value / 10 for value in logits]
    sampling = Sampling(temperature, 4, [], top_k=top_k, top_p=top_p, min_p=min_p)
    row = torch.tensor([values, values[::-1]])
    found = filter_logits(row, sampling)
    for got, given_ in zip(found, row, strict=True):
        kept = naive(given_.tolist(), temperature, top_k, top_p, min_p)
        assert set(torch.isfinite(got).nonzero().flatten().tolist()) == kept
        assert torch.equal(got[list(kept)], given_[list(kept)])
        assert int(given_.argmax()) in kept


def test_filters_off_are_off() -> None:
    assert not has_filter(Sampling(1.0, 4, []))
    assert has_filter(Sampling(1.0, 4, [], top_k=1))
    assert has_filter(Sampling(1.0, 4, [], top_p=0.5))
    assert has_filter(Sampling(1.0, 4, [], min_p=0.1))


@pytest.mark.parametrize(
    "filters", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 5, "top_p": 0.8}], ids=str
)
def test_a_filtered_request_keeps_to_its_set_and_leaves_its_neighbours_alone(
    versions: Any,
    oracle: Any,
    request_of: Callable[..., GroupRequest],
    finish: Callable[..., dict[tuple[int, int], FinishedMember]],
    filters: dict[str, Any],
) -> None:
    engine = versions.engine(max_running=256)
    prompt = request_of(0, prompt=6).prompt_ids
    engine.add(request_of(0, prompt=prompt, members=128, budget=1, **filters))
    engine.add(request_of(1, prompt=prompt, members=64, budget=1))
    done = finish(engine)
    full = np.array([oracle.fresh(prompt, [token], 1.0)[0] for token in range(48)])
    arguments = {"top_k": None, "top_p": None, "min_p": None, **filters}
    kept = naive(full.tolist(), 1.0, **arguments)
    assert 1 < len(kept) < 48
    inside = np.log(np.exp(full[list(kept)]).sum())
    for (request_id, _), member in done.items():
        token = int(member.token_ids[0])
        if request_id == 0:
            assert token in kept
            assert member.logprobs[0] == pytest.approx(full[token] - inside, abs=1e-5)
        else:
            assert member.logprobs[0] == pytest.approx(full[token], abs=1e-5)
    assert any(int(m.token_ids[0]) not in kept for key, m in done.items() if key[0] == 1)
