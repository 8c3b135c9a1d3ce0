"""Tiny models of several architectures, and packed logits to compare with the module's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from headway.model import AttentionContext, Policy
from headway_kernels.attention_plan import AttentionPlan

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # far from uniform, so that a wrong key or position is not hidden
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture(scope="session")
def sizes() -> dict[str, Any]:
    return SIZES


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[PreTrainedConfig], Path]:
    """A folder with random weights of a configuration."""

    def save(config: PreTrainedConfig) -> Path:
        torch.manual_seed(11)
        folder = tmp_path / "model"
        AutoModelForCausalLM.from_config(config).save_pretrained(str(folder))
        return folder

    return save


@pytest.fixture(scope="session")
def packed_logits() -> Callable[[Policy, list[list[int]]], list[Tensor]]:
    """Logits of sequences in one row, by the policy."""

    def run(policy: Policy, sequences: list[list[int]]) -> list[Tensor]:
        lengths = [len(ids) for ids in sequences]
        starts = [sum(lengths[:k]) for k in range(len(lengths))]
        total = sum(lengths)
        runs = [(start, length, start, 0, []) for start, length in zip(starts, lengths, strict=True)]
        plan = AttentionPlan.build(runs, num_queries=total, num_keys=total)
        positions = torch.cat([torch.arange(length) for length in lengths])
        hidden = policy.backbone(
            torch.tensor([token for ids in sequences for token in ids]), positions, AttentionContext(plan)
        )
        return list(policy.head.logits(hidden).split(lengths))

    return run
