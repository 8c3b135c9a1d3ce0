"""Flat parameters: the manifest's order and digest, real views, tied parameters, gaps, bf16 rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from headway.errors import ModelError
from headway.model import AttentionContext, Policy, load_policy
from headway.model.flat import ALIGNMENT, build_manifest
from headway.types import Manifest
from headway_kernels.attention_plan import AttentionPlan


def module_of(sizes: dict[str, Any], *, tied: bool, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "tie_word_embeddings": tied, **changes}))


def covered(manifest: Manifest) -> torch.Tensor:
    mask = torch.zeros(manifest.num_elements, dtype=torch.bool)
    for spec in manifest.tensors:
        part = mask[spec.offset : spec.offset + spec.size]
        assert not part.any(), f"{spec.name} overlaps"
        part[:] = True
    return mask


@pytest.mark.parametrize("tied", [True, False])
def test_the_manifest_lists_each_storage_once_matrices_first_then_module_order(
    sizes: dict[str, Any], tied: bool
) -> None:
    module = module_of(
        sizes, tied=tied, hidden_size=36, num_attention_heads=2, num_key_value_heads=1, head_dim=18
    )
    manifest = build_manifest(module, "float32")
    names = [name for name, _ in module.named_parameters()]
    matrices = [name for name in names if module.get_parameter(name).dim() >= 2]
    vectors = [name for name in names if module.get_parameter(name).dim() < 2]
    assert [spec.name for spec in manifest.tensors] == matrices + vectors
    assert [spec.decayed for spec in manifest.tensors] == [True] * len(matrices) + [False] * len(vectors)
    aliases = {spec.name: spec.aliases for spec in manifest.tensors if spec.aliases}
    assert aliases == ({"model.embed_tokens.weight": ["lm_head.weight"]} if tied else {})
    assert all(spec.offset % ALIGNMENT == 0 for spec in manifest.tensors)
    mask = covered(manifest)
    assert not mask.all(), "a size that leaves gaps is wanted here"
    assert not any(spec.decayed for spec in manifest.tensors if spec.offset >= manifest.num_decayed)
    assert all(spec.offset + spec.size <= manifest.num_decayed for spec in manifest.tensors if spec.decayed)


def test_the_digest_changes_with_anything_that_both_sides_must_share(sizes: dict[str, Any]) -> None:
    base = build_manifest(module_of(sizes, tied=True), "float32")
    assert build_manifest(module_of(sizes, tied=True), "float32").digest == base.digest
    assert base.buffers, "the rope table is a buffer"
    tensors = list(base.tensors)
    renamed = [msgspec.structs.replace(tensors[0], name="other"), *tensors[1:]]
    others = [
        build_manifest(module_of(sizes, tied=True), "bfloat16"),
        build_manifest(module_of(sizes, tied=False), "float32"),
        build_manifest(module_of(sizes, tied=True, intermediate_size=64), "float32"),
        build_manifest(module_of(sizes, tied=True, num_hidden_layers=1), "float32"),
        build_manifest(
            module_of(sizes, tied=True, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
            "float32",
        ),
        msgspec.structs.replace(base, tensors=renamed),
        msgspec.structs.replace(base, tensors=[tensors[1], tensors[0], *tensors[2:]]),
    ]
    digests = [manifest.digest for manifest in others]
    assert len({base.digest, *digests}) == 1 + len(others)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_and_gradients_are_views_of_the_flat_buffers(sizes: dict[str, Any], tied: bool) -> None:
    module = module_of(sizes, tied=tied, intermediate_size=50)
    before = {name: p.detach().clone() for name, p in module.named_parameters(remove_duplicate=False)}
    policy = Policy(module, published_dtype="float32", with_grad=True)
    assert policy.grad is not None
    assert policy.flat.data_ptr() % 64 == 0
    for spec in policy.manifest.tensors:
        for name in (spec.name, *spec.aliases):
            parameter = module.get_parameter(name)
            assert torch.equal(parameter, before[name])
            assert parameter.data_ptr() == policy.flat.data_ptr() + 4 * spec.offset
            assert parameter.grad is not None
            assert parameter.grad.data_ptr() == policy.grad.data_ptr() + 4 * spec.offset
    gaps = ~covered(policy.manifest)
    assert not policy.flat[gaps].any()
    module(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False, labels=torch.tensor([[3, 4, 5]]),
           context=context_of(3)).loss.backward()  # fmt: skip
    assert policy.grad.abs().sum() > 0
    assert not policy.grad[gaps].any()


def context_of(length: int) -> Any:
    return AttentionContext(AttentionPlan.build([(0, length, 0, 0, [])], num_queries=length, num_keys=length))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_named_parameter_arrives_whichever_of_embedding_and_head_changed(
    saved: Callable[[PreTrainedConfig], Path], sizes: dict[str, Any], tied: bool, dtype: str
) -> None:
    folder = saved(LlamaConfig(**sizes, tie_word_embeddings=tied))
    learner = load_policy(folder, published_dtype=dtype, with_grad=True)
    generator = load_policy(folder, published_dtype=dtype, with_grad=False)
    assert learner.manifest.digest == generator.manifest.digest
    wire = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    for names in (
        ["model.embed_tokens.weight"],
        ["lm_head.weight"],
        ["model.embed_tokens.weight", "lm_head.weight"],
    ):
        with torch.no_grad():
            for name in names:
                learner.module.get_parameter(name).mul_(1.37)
        generator.flat.copy_(learner.flat.to(wire))
        sent = dict(learner.module.named_parameters(remove_duplicate=False))
        received = dict(generator.module.named_parameters(remove_duplicate=False))
        assert sent.keys() == received.keys()
        assert "lm_head.weight" in sent
        for name in sent:
            assert torch.equal(received[name], sent[name].to(wire).float()), name
        assert torch.equal(generator.head.weight, received["lm_head.weight"])


def test_bf16_publishing_rounds_both_sides_to_the_same_values(
    saved: Callable[[PreTrainedConfig], Path], sizes: dict[str, Any]
) -> None:
    folder = saved(LlamaConfig(**sizes))
    exact = load_policy(folder, published_dtype="float32", with_grad=False)
    generator = load_policy(folder, published_dtype="bfloat16", with_grad=False)
    learner = load_policy(folder, published_dtype="bfloat16", with_grad=True)
    assert torch.equal(learner.flat, exact.flat)  # the optimizer takes its masters from it before rounding
    learner.round_to_published()
    rounded = exact.flat.to(torch.bfloat16).float()
    assert not torch.equal(rounded, exact.flat)
    assert torch.equal(generator.flat, rounded)
    assert torch.equal(learner.flat, rounded)


def test_parameters_that_are_not_floating_point_are_refused(sizes: dict[str, Any]) -> None:
    module = module_of(sizes, tied=False)
    module.register_parameter(
        "counter", torch.nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    )
    with pytest.raises(ModelError, match="counter is torch"):
        build_manifest(module, "float32")
