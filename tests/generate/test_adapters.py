"""The embedded engine with adapters: pushes hold these alone, and log-probs are those of merged weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headway.types import PolicyVersion
from headway.weights import DoubledServed, FlatServed
from headway_kernels.weight_delta import whole

PROMPT = [5, 9, 30, 7, 41, 12]


@pytest.mark.parametrize("make", [FlatServed, DoubledServed], ids=["in place", "doubled"])
def test_each_push_gives_the_log_probs_of_its_merged_weights_and_there_and_back_a_fresh_engine(
    adapted: Any, adapted_oracle: Any, request_of: Any, finish: Any, make: Callable[..., Any]
) -> None:
    engine = adapted.engine(version=None)
    assert engine.flat.numel() == adapted.flat[0].numel() < 6000  # of 15,000 parameters
    served = make(engine, engine.manifest)
    seen: list[list[tuple[list[int], list[float]]]] = []
    for step, number in enumerate((0, 1, 2, 1)):
        deltas = [whole(adapted.flat[number].clone())]
        served.prepare(deltas, more=False)
        served.write(PolicyVersion(0, step), deltas)
        served.settle([(0, engine.flat.numel())])
        engine.add(request_of(7, prompt=PROMPT, members=3, budget=10))
        done = finish(engine)
        members = [done[7, member] for member in range(3)]
        for member in members:
            expected = adapted_oracle.fresh(PROMPT, member.token_ids.tolist(), 1.0, number)
            assert np.abs(member.logprobs - expected).max() <= 1e-4
        seen.append([(m.token_ids.tolist(), m.logprobs.tolist()) for m in members])
    assert seen[1] == seen[3] != seen[2]
    fresh = adapted.engine(version=None)
    adapted.push(fresh, 1, step=9)
    fresh.add(request_of(7, prompt=PROMPT, members=3, budget=10))
    again = finish(fresh)
    assert [(m.token_ids.tolist(), m.logprobs.tolist()) for m in (again[7, i] for i in range(3))] == seen[1]
    start = dict(fresh.policy.module.named_parameters())
    for name, parameter in engine.policy.module.named_parameters():
        if ".lora_" not in name:
            assert torch.equal(parameter, start[name]), name
