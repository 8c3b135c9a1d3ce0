"""Serial mode counts what a push changes, as the channels between processes do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headway.config import RunConfig
from headway.serial import SerialRun


@pytest.mark.parametrize(("dtype", "lr"), [("float32", 1e-2), ("bfloat16", 1e-5)])
def test_the_changed_share_is_that_of_the_published_values(
    tiny_config: Callable[..., RunConfig], dtype: str, lr: float
) -> None:
    run = SerialRun(tiny_config(steps=2, learner={"lr": lr}, push={"dtype": dtype}))
    weights = run.parts.policy.module
    shares: list[float] = []
    try:
        before = [parameter.detach().clone() for parameter in weights.parameters()]
        for record in run.steps():
            after = [parameter.detach().clone() for parameter in weights.parameters()]
            changed = sum(int((old != new).sum()) for old, new in zip(before, after, strict=True))
            assert record.changed_share == changed / sum(tensor.numel() for tensor in after)
            shares.append(record.changed_share)
            before = after
    finally:
        run.close()
    assert len(shares) == 2
    if dtype == "bfloat16":  # most values move by less than their step
        assert 0.0 < max(shares) < 0.5
    else:
        assert min(shares) > 0.5
