"""The engine tells what each token was sampled from, and reports log-probs over that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headway.generate.filters import filter_logits, kept_ids
from headway.types import Sampling

FILTERS: list[dict[str, Any]] = [{"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.1}, {"top_p": 0.9, "top_k": 5}]


@pytest.mark.parametrize("chosen", FILTERS, ids=str)
def test_each_token_comes_with_its_set_and_its_log_prob_over_it(
    versions: Any, request_of: Any, finish: Any, chosen: dict[str, Any]
) -> None:
    engine = versions.engine()
    engine.add(request_of(1, members=3, budget=8, temperature=0.8, keep_sets=True, **chosen))
    engine.add(request_of(2, members=2, budget=5, **chosen))  # nobody asks: nothing is told
    done = finish(engine)
    assert all(member.kept is None for (request, _), member in done.items() if request == 2)
    prompt, module = list(request_of(1).prompt_ids), versions.module(0)
    for member in (done[1, number] for number in range(3)):
        assert member.kept is not None
        assert len(member.kept.counts) == len(member.token_ids) == 8
        sets = np.split(member.kept.ids, np.cumsum(member.kept.counts)[:-1])
        ids = torch.tensor([[*prompt, *member.token_ids.tolist()]])
        with torch.no_grad():
            logits = module(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        filtered = filter_logits(logits, Sampling(0.8, 8, [], **chosen))
        for token, kept, row, logprob in zip(
            member.token_ids.tolist(), sets, filtered, member.logprobs, strict=True
        ):
            assert kept.tolist() == (row > float("-inf")).nonzero().flatten().tolist()
            assert token in kept
            assert float(torch.log_softmax(row / 0.8, -1)[token]) == pytest.approx(float(logprob), abs=1e-4)


def test_the_sets_of_filtered_rows() -> None:
    inf = float("inf")
    rows = torch.tensor([[1.0, -inf, 0.0], [-inf, 2.0, -inf]])
    assert [ids.tolist() for ids in kept_ids(rows)] == [[0, 2], [1]]
    assert kept_ids(torch.zeros(0, 3)) == []
