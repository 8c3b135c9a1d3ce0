"""Architectures: those that run equal transformers' own forward; those that cannot are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from headway.errors import ModelError, UnsupportedOption
from headway.model import Policy, load_policy

SEQUENCES = [[3, 4, 5, 6, 7], [8], [9, 10, 11, 3, 3, 3, 20, 30]]
Save = Callable[[PreTrainedConfig], Path]
Packed = Callable[[Policy, list[list[int]]], list[Tensor]]


def gpt2(sizes: dict[str, Any]) -> GPT2Config:
    # Dropout as its published configurations have it.
    return GPT2Config(
        vocab_size=37, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2,
        resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


RUN: dict[str, Callable[[dict[str, Any]], PreTrainedConfig]] = {
    "llama": lambda sizes: LlamaConfig(**sizes),
    "llama, no grouping, tied": lambda sizes: LlamaConfig(
        **{**sizes, "num_key_value_heads": 4}, tie_word_embeddings=True
    ),
    "qwen2": lambda sizes: Qwen2Config(**sizes, tie_word_embeddings=True),
    "qwen3, wide heads": lambda sizes: Qwen3Config(**sizes, head_dim=12),
    "mistral": lambda sizes: MistralConfig(**sizes, sliding_window=16),
    "gpt2": gpt2,
    "granite": lambda sizes: GraniteConfig(**sizes, logits_scaling=3.0, attention_multiplier=0.4),
    "cohere": lambda sizes: CohereConfig(**sizes, logit_scale=0.25),
    "gemma2, final softcap": lambda sizes: Gemma2Config(
        **sizes, head_dim=8, attn_logit_softcapping=None, final_logit_softcapping=2.0, sliding_window=16
    ),
}


@pytest.mark.parametrize("name", RUN)
def test_packed_logprobs_equal_transformers_own_forward(
    saved: Save, packed_logits: Packed, sizes: dict[str, Any], name: str
) -> None:
    folder = saved(RUN[name](sizes))
    for attention in ("sdpa", "eager") if "gemma2" not in name else ("eager",):
        own = AutoModelForCausalLM.from_pretrained(
            str(folder), attn_implementation=attention, dtype=torch.float32
        )
        for with_grad in (False, True):
            policy = load_policy(folder, with_grad=with_grad)
            with torch.no_grad():
                found = packed_logits(policy, SEQUENCES)
                for ids, logits in zip(SEQUENCES, found, strict=True):
                    expected = own(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
                    assert expected.std() > 0.05
                    assert (logits.log_softmax(-1) - expected).abs().max() <= 1e-5


def test_the_final_softcap_reaches_the_head(saved: Save, sizes: dict[str, Any]) -> None:
    head = load_policy(saved(RUN["gemma2, final softcap"](sizes)), with_grad=False).head
    assert head.softcap == 2.0
    x = 50 * torch.ones(1, 32)
    raw = x @ head.weight.T
    assert raw.abs().max() > 4
    assert torch.allclose(head.logits(x), 2.0 * torch.tanh(raw / 2.0), atol=1e-6)


def test_logit_scales_reach_the_head(saved: Save, sizes: dict[str, Any]) -> None:
    assert load_policy(saved(RUN["granite"](sizes)), with_grad=False).head.scale == pytest.approx(1 / 3)


def test_a_document_is_not_seen_by_the_next(
    saved: Save, packed_logits: Packed, sizes: dict[str, Any]
) -> None:
    policy = load_policy(saved(LlamaConfig(**sizes)), with_grad=False)
    with torch.no_grad():
        first = packed_logits(policy, SEQUENCES)
        second = packed_logits(policy, [[30, 29, 28, 27, 26], *SEQUENCES[1:]])
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[2], second[2])


@pytest.mark.parametrize("name", ["mistral", "gemma2, final softcap"])
def test_a_sliding_window_limits_the_context(saved: Save, sizes: dict[str, Any], name: str) -> None:
    assert load_policy(saved(RUN[name](sizes)), with_grad=False).context_length == 16


def test_a_window_that_no_layer_uses_limits_nothing(saved: Save, sizes: dict[str, Any]) -> None:
    config = Qwen2Config(**sizes, use_sliding_window=False, sliding_window=16)
    assert load_policy(saved(config), with_grad=False).context_length == 64


def test_inside_the_window_sliding_layers_are_exact_and_beyond_it_they_are_not(
    saved: Save, packed_logits: Packed, sizes: dict[str, Any]
) -> None:
    folder = saved(MistralConfig(**sizes, sliding_window=16))
    policy = load_policy(folder, with_grad=False)
    own = AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager", dtype=torch.float32)
    ids = torch.randint(3, 37, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        difference = (packed_logits(policy, [ids])[0] - own(input_ids=torch.tensor([ids])).logits[0]).abs()
    assert difference[:16].max() <= 1e-5
    assert difference[16:].max() > 1e-3


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], PreTrainedConfig], str]] = {
    "soft-capped attention": (lambda sizes: Gemma2Config(**sizes, head_dim=8), "soft-caps its attention logits"),
    "attention outside the registry": (
        lambda sizes: BloomConfig(vocab_size=37, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2),
        "BloomForCausalLM does not give its own logits",
    ),
    "attention table of its own": (
        lambda sizes: FalconConfig(
            vocab_size=37, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, eos_token_id=2, bos_token_id=1
        ),
        "does not take its attention from transformers' registry|cannot be run with headway's attention",
    ),
    "attention sinks": (
        lambda sizes: GptOssConfig(
            **sizes, head_dim=8, num_local_experts=2, num_experts_per_tok=1,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
        "attention sinks",
    ),
    "state space": (
        lambda sizes: MambaConfig(vocab_size=37, hidden_size=32, num_hidden_layers=2, eos_token_id=2, bos_token_id=1),
        r"layers of kind \['linear_attention'\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_refused_by_name(saved: Save, sizes: dict[str, Any], name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        load_policy(saved(make(sizes)), with_grad=False)


def test_a_head_that_is_not_linear_in_the_hidden_state_is_refused(
    saved: Save, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    plain = LlamaForCausalLM.forward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = plain(self, *args, **kwargs)
        out.logits = out.logits * 1.01
        return out

    folder = saved(LlamaConfig(**sizes))
    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    with pytest.raises(ModelError, match="does not give its own logits"):
        load_policy(folder, with_grad=False)


def test_a_call_without_a_context_raises(saved: Save, sizes: dict[str, Any]) -> None:
    policy = load_policy(saved(LlamaConfig(**sizes)), with_grad=False)
    with pytest.raises(UnsupportedOption, match="AttentionContext"):
        policy.module(input_ids=torch.tensor([[3, 4]]))
