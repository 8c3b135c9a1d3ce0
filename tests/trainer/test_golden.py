"""The learner's log-probs against transformers' forward of a model whose head is soft-capped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config

from headway.buffer import Group
from headway.config import RunConfig

VOCAB_SIZE = 40


@pytest.fixture(scope="module")
def capped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = Gemma2Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, sliding_window=64, initializer_range=0.4,
        attn_logit_softcapping=None, final_logit_softcapping=2.0, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("capped")
    AutoModelForCausalLM.from_config(config).save_pretrained(str(path))
    return path


def test_a_models_final_softcap_is_in_the_log_probs_that_are_trained(
    bench: Callable[..., Any],
    capped: Path,
    config_of: Callable[..., RunConfig],
    groups_of: Callable[..., list[Group]],
) -> None:
    own = AutoModelForCausalLM.from_pretrained(str(capped), attn_implementation="eager", dtype=torch.float32)
    groups = groups_of([(6, 4, 9), (3, 8)], temperatures=(1.0, 0.6), seed=4)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    learner = type(bench())(capped, config_of(model={"path": str(capped)}))
    assert learner.policy.head.softcap == 2.0
    uncapped = 0.0
    for trajectory, logprobs in zip(trajectories, learner.logprobs(groups), strict=True):
        ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            logits = own(input_ids=ids).logits[0, :-1]
        places = torch.from_numpy(np.flatnonzero(trajectory.loss_mask)) - 1
        for cap in (True, False):
            z = logits if cap else 2.0 * torch.atanh((logits / 2.0).clamp(-0.999999, 0.999999))
            expected = (z / trajectory.temperature).log_softmax(-1)[places, ids[0, places + 1]].numpy()
            if cap:
                assert np.abs(logprobs - expected).max() <= 1e-5
            else:
                uncapped = max(uncapped, float(np.abs(logprobs - expected).max()))
    assert uncapped > 0.1  # without the cap they would be others
