"""Tied and untied models: every named parameter of the generator equals the learner's as published."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from headway.errors import ModelError
from headway.generate import TorchEngine
from headway.model import Policy, load_policy
from headway.types import PolicyVersion
from headway.weights import FlatServed, Stager, WeightPublisher


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=request.param,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(str(tmp_path))
    return tmp_path


def parameters(policy: Policy) -> dict[str, torch.Tensor]:
    return dict(policy.module.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_named_parameter_arrives_whichever_of_the_tied_ones_moved(
    folder: Path, dtype: str, chaos: Any
) -> None:
    learner = load_policy(folder, published_dtype=dtype, with_grad=True)
    policy = load_policy(folder, published_dtype=dtype, with_grad=False)
    engine = TorchEngine(
        policy, max_running=4, kv_tokens=64, prefill_tokens=64, kv="keep", decode=lambda ids: ""
    )
    channel = chaos(random.Random(0))
    publisher = WeightPublisher(channel, learner.manifest)
    stager = Stager(channel, FlatServed(engine, policy.manifest), policy.manifest)
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    for step, moved in enumerate(([], [embed], [head], [embed, head])):
        for name in moved:
            with torch.no_grad():
                parameters(learner)[name] += 1.0
        digest = publisher.publish(learner.flat, PolicyVersion(0, step)).digest
        while stager.turn():
            pass
        stager.commit()
        stager.turn()
        assert [proof.digest for proof in stager.proofs()] == [digest]
        for name, served in parameters(policy).items():
            wanted = parameters(learner)[name].detach()
            wanted = wanted.bfloat16().float() if dtype == "bfloat16" else wanted
            assert torch.equal(served, wanted), name
        ids = torch.tensor([[1, 2, 3]])
        assert torch.equal(policy.head.weight, parameters(policy)[head])
        assert (parameters(policy)[embed][ids] == policy.module.get_input_embeddings()(ids)).all()


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_a_model_folder_with_missing_or_extra_tensors_is_refused_by_name(folder: Path, change: str) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    if change == "missing":
        del tensors["model.layers.0.mlp.up_proj.weight"]
    else:
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(24, 16)
    save_file(tensors, path, metadata={"format": "pt"})
    name = (
        r"missing keys: model\.layers\.0\." if change == "missing" else r"unexpected keys: model\.layers\.7\."
    )
    with pytest.raises(ModelError, match=name):
        load_policy(folder, with_grad=False)
