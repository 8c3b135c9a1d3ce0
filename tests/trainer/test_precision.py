"""What the layers and the head are multiplied in: what changes, what must not, and against which oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headway.algo import head_logp
from headway.buffer import Group
from headway.errors import UnsupportedOption
from headway.model import Compute, load_policy

LENGTHS = [[9, 14, 21, 30], [12, 17, 25, 33]]
HALF: dict[str, Any] = {"push": {"dtype": "bfloat16"}}


def test_a_bfloat16_head_rounds_what_it_multiplies_and_sums_in_fp32(folder: Path) -> None:
    policy = load_policy(
        folder, published_dtype="bfloat16", with_grad=False, compute=Compute(head_dtype="bfloat16")
    )
    hidden = torch.randn(50, 32, generator=torch.Generator().manual_seed(1))
    target = torch.arange(50) % policy.vocab_size
    x, weight, bias = policy.head.operands(hidden)
    assert x.dtype == weight.dtype == torch.bfloat16
    found = head_logp(x, weight, target, inv_temperature=torch.ones(50), bias=bias).logp
    oracle = (hidden.bfloat16().double() @ weight.double().T).log_softmax(-1)[torch.arange(50), target]
    assert float((found.double() - oracle).abs().max()) < 1e-5


@pytest.mark.parametrize(
    "changes",
    [{"learner": {"dtype": "bfloat16"}}, {"model": {"head_dtype": "bfloat16"}}],
    ids=["layers", "head"],
)
def test_log_probs_and_gradients_are_those_of_fp32_to_bf16_rounding(
    bench: Callable[..., Any],
    groups_of: Callable[..., list[Group]],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
) -> None:
    groups = groups_of(LENGTHS)
    exact, half = bench(**HALF), bench(**HALF, **changes)
    a, b = (np.concatenate(made.logprobs(groups)) for made in (exact, half))
    assert 1e-5 < float(np.abs(a - b).mean()) < 0.03
    gradients: list[Tensor] = [made.gradient(groups, monkeypatch)[0] for made in (exact, half)]
    assert gradients[1].dtype == torch.float32
    cosine = torch.nn.functional.cosine_similarity(*gradients, dim=0)
    assert float(cosine) > 0.99
    assert float(gradients[1].norm() / gradients[0].norm()) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("rows", [64, 4096], ids=["many rows", "one row"])
def test_bfloat16_layers_score_a_trajectory_alike_in_any_row(
    bench: Callable[..., Any], groups_of: Callable[..., list[Group]], rows: int
) -> None:
    groups = groups_of(LENGTHS)
    half = {**HALF, "learner": {"dtype": "bfloat16"}}
    packed = bench(**half, batch={"tokens_per_row": rows, "share_prefix": "tree"}).logprobs(groups)
    alone = bench(**half, batch={"tokens_per_row": rows, "share_prefix": "none"}).logprobs(groups)
    assert float(np.abs(np.concatenate(packed) - np.concatenate(alone)).max()) < 0.1


def test_a_device_that_is_not_here_is_refused(folder: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(UnsupportedOption, match=r"learner.device = 'cuda'.*allowed here: 'cpu'"):
        load_policy(folder, with_grad=True, compute=Compute(device="cuda"))
