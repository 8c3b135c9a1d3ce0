"""Adapters over a frozen base: against float64 modules with merged weights, autograd, and PEFT itself."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from headway.errors import ModelError
from headway.model import Compute, Lora, Policy, load_policy, save_policy
from headway.packing import PackGroup, pack

LORA = Lora(rank=4, alpha=6.0, seed=3)
LEAVES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

peft_warns = pytest.mark.filterwarnings("ignore")  # its own and its dependencies'


class Sequence:
    """A sequence to pack."""

    prompt_length = 1

    def __init__(self, *ids: int) -> None:
        self.token_ids = np.array(ids, np.int32)
        self.loss_mask = np.arange(len(ids)) > 0


SEQUENCES = [Sequence(5, 9, 3, 7, 2, 8), Sequence(5, 9, 4, 4), Sequence(1, 11, 6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=24, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, attention_bias=True,
        tie_word_embeddings=True,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(config).save_pretrained(str(path))
    return path


def drawn(policy: Policy, seed: int = 1) -> Policy:
    """Adapters that matter, published values."""
    noise = torch.Generator().manual_seed(seed)
    for spec in policy.manifest.tensors:
        values = 0.2 * torch.randn(spec.size, generator=noise)
        policy.flat[spec.offset : spec.offset + spec.size] = values
    policy.round_to_published()
    return policy


def merged(folder: Path, policy: Policy) -> Any:
    """transformers' module in float64 with W + B A; the adapters are read from the flat buffer by the manifest."""
    module = AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager").double().eval()
    flat = {
        s.name: policy.flat[s.offset : s.offset + s.size].view(s.shape).double()
        for s in policy.manifest.tensors
    }
    with torch.no_grad():
        if policy.manifest.dtype == "bfloat16":
            for parameter in module.parameters():
                parameter.copy_(parameter.bfloat16())
        for name, parameter in module.named_parameters():
            stem = name.removesuffix(".weight")
            if f"{stem}.lora_A.weight" in flat:
                parameter += flat[f"{stem}.lora_B.weight"] @ flat[f"{stem}.lora_A.weight"]
    return module


def row() -> Any:
    (packed,) = pack([PackGroup(0, SEQUENCES)], 64, "tree").rows
    return packed


def logits_of(policy: Policy) -> torch.Tensor:
    """[T, V], of the row's head rows."""
    packed = row()
    ids, positions, heads = map(
        torch.from_numpy, (packed.token_ids, packed.position_ids, packed.hidden_index)
    )
    return policy.head.logits(policy.backbone(ids, positions, policy.context(packed))[heads])


def own_logits(module: Any) -> torch.Tensor:
    packed = row()
    each = [
        module(input_ids=torch.from_numpy(s.token_ids.astype(np.int64))[None]).logits[0] for s in SEQUENCES
    ]
    return torch.stack([each[q][t - 1] for q, t in zip(packed.sequence, packed.token, strict=True)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_rows_compute_what_the_merged_module_computes(folder: Path, dtype: str) -> None:
    policy = drawn(load_policy(folder, published_dtype=dtype, with_grad=False, lora=LORA))
    with torch.no_grad():
        expected = own_logits(merged(folder, policy))
        assert (logits_of(policy) - expected).abs().max() <= 1e-4
        plain = load_policy(folder, published_dtype=dtype, with_grad=False)
        assert (logits_of(plain) - expected).abs().max() > 0.1
        assert torch.equal(logits_of(policy.without_adapters()), logits_of(plain))
        assert (logits_of(policy) - expected).abs().max() <= 1e-4  # and they are on again


def test_layers_in_bfloat16_stay_near(folder: Path) -> None:
    compute = Compute(dtype="bfloat16")
    policy = drawn(
        load_policy(folder, published_dtype="bfloat16", with_grad=False, compute=compute, lora=LORA)
    )
    with torch.no_grad():
        expected = own_logits(merged(folder, policy))
        assert (logits_of(policy) - expected).abs().max() <= 0.05 * expected.abs().max()


def test_gradients_are_those_of_autograd_through_the_merged_module(folder: Path) -> None:
    """dL/dA = B' dL/dW and dL/dB = dL/dW A', with dL/dW from a float64 module that knows no adapters."""
    policy = drawn(load_policy(folder, with_grad=True, lora=LORA))
    module = merged(folder, policy)
    weight = torch.randn(len(row().token), 24, generator=torch.Generator().manual_seed(0))
    (logits_of(policy) * weight).sum().backward()
    (own_logits(module) * weight.double()).sum().backward()
    assert policy.grad is not None
    slices = {s.name: slice(s.offset, s.offset + s.size) for s in policy.manifest.tensors}
    of = dict(module.named_parameters())
    assert policy.adapters is not None
    for name in policy.adapters.layers:
        a, b = (slices[f"{name}.lora_{factor}.weight"] for factor in "AB")
        outer = of[f"{name}.weight"].grad
        for place, expected in (
            (a, policy.flat[b].double().view(-1, 4).T @ outer),
            (b, outer @ policy.flat[a].double().view(4, -1).T),
        ):
            apart = policy.grad[place] - expected.reshape(-1)
            assert apart.abs().max() <= 1e-4 * expected.abs().max(), name
    frozen = [p for name, p in policy.module.named_parameters() if ".lora_" not in name]
    assert all(p.grad is None and not p.requires_grad for p in frozen)


def test_the_manifest_holds_the_adapters_alone_a_before_b(folder: Path) -> None:
    policy = load_policy(folder, with_grad=True, lora=LORA)
    names = [spec.name for spec in policy.manifest.tensors]
    layers = [
        f"model.layers.{layer}.{'self_attn' if leaf in LEAVES[:4] else 'mlp'}.{leaf}"
        for layer in range(2)
        for leaf in LEAVES
    ]
    assert sorted(names) == sorted(f"{name}.lora_{factor}.weight" for name in layers for factor in "AB")
    assert [name[-8] for name in names] == ["A"] * 14 + ["B"] * 14
    assert policy.manifest.num_elements == policy.manifest.num_decayed == policy.flat.numel()
    first, second = policy.stretches
    assert (first.scale, second.scale, first.start, second.end) == (1.0, 1.5, 0, policy.flat.numel())
    assert not policy.flat[second.start :].any()


@peft_warns
def test_a_begins_as_peft_draws_it_by_the_seed_and_leaves_the_run_s_generator_alone(folder: Path) -> None:
    torch.manual_seed(9)
    before = torch.get_rng_state()
    flats = [load_policy(folder, with_grad=False, lora=Lora(4, 6.0, seed=seed)).flat for seed in (3, 3, 4)]
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(flats[0], flats[1])
    assert not torch.equal(flats[0], flats[2])
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(str(folder)), LoraConfig(r=4, target_modules=list(LEAVES))
    )
    policy = load_policy(folder, with_grad=False, lora=LORA)
    theirs = {name: p for name, p in model.named_parameters() if "lora_A" in name}
    mine = {name: p for name, p in policy.module.named_parameters() if "lora_A" in name}
    assert len(theirs) == len(mine) == 14
    for name, p in mine.items():
        other = theirs[f"base_model.model.{name.replace('.weight', '.default.weight')}"]
        bound = 1 / math.sqrt(p.shape[1])
        assert p.shape == other.shape
        assert 0.9 * bound < float(p.abs().max()) <= bound
        assert float(p.std()) == pytest.approx(float(other.std()), rel=0.25)  # 128 and 160 draws


def test_both_sides_refuse_bases_that_differ(folder: Path, tmp_path: Path) -> None:
    first = load_policy(folder, with_grad=True, lora=LORA).manifest
    assert load_policy(folder, with_grad=False, lora=LORA).manifest.digest == first.digest
    module = AutoModelForCausalLM.from_pretrained(str(folder))
    with torch.no_grad():
        module.model.norm.weight[3] += 1e-6
    module.save_pretrained(str(tmp_path))
    assert load_policy(tmp_path, with_grad=False, lora=LORA).manifest.digest != first.digest
    rounded = {"published_dtype": "bfloat16", "with_grad": False, "lora": LORA}
    assert load_policy(tmp_path, **rounded).manifest.digest == load_policy(folder, **rounded).manifest.digest


@peft_warns
def test_what_is_saved_is_what_is_served_merged_and_as_peft_loads_it(folder: Path, tmp_path: Path) -> None:
    policy = drawn(load_policy(folder, with_grad=True, lora=LORA))
    save_policy(policy, folder, tmp_path / "out")
    with torch.no_grad():
        served = logits_of(policy)
        plain = AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"), attn_implementation="eager")
        assert (own_logits(plain.eval()) - served).abs().max() <= 1e-4
        base = AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager")
        loaded = PeftModel.from_pretrained(base, str(tmp_path / "out" / "adapter")).eval()
        assert (own_logits(loaded) - served).abs().max() <= 1e-4
    tensors = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    for spec in policy.manifest.tensors:
        flat = policy.flat[spec.offset : spec.offset + spec.size].view(spec.shape)
        assert torch.equal(tensors[f"base_model.model.{spec.name}"], flat)
    config = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 4)
    assert sorted(config["target_modules"]) == sorted(LEAVES)


def test_targets_choose_layers_by_the_last_part_of_their_names(folder: Path) -> None:
    policy = load_policy(folder, with_grad=False, lora=Lora(2, 2.0, ("q_proj", "mlp.up_proj")))
    assert policy.adapters is not None
    assert {name.rpartition(".")[2] for name in policy.adapters.layers} == {"q_proj", "up_proj"}
    assert len(policy.adapters.layers) == 4


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (
            ("q_proj", "proj"),
            r"no layer of LlamaForCausalLM is named 'proj'; there are: down_proj, gate_proj",
        ),
        (("lm_head",), r"lm_head is the vocabulary head of LlamaForCausalLM"),
        (
            ("embed_tokens",),
            r"model\.embed_tokens of LlamaForCausalLM is a Embedding; only plain linear layers",
        ),
        (("mlp",), r"model\.layers\.0\.mlp of LlamaForCausalLM is a LlamaMLP"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused_by_name(
    folder: Path, targets: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ModelError, match=rf"model\.lora\.targets: .*{says}"):
        load_policy(folder, with_grad=False, lora=Lora(2, 2.0, targets))


def test_architectures_whose_matrices_are_no_linear_layers_are_refused_by_name(tmp_path: Path) -> None:
    moe = MixtralConfig(
        vocab_size=24, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, max_position_embeddings=32,
    )  # fmt: skip
    MixtralForCausalLM(moe).save_pretrained(str(tmp_path / "moe"))
    with pytest.raises(
        ModelError, match=r"multiplies by layers\.0\.mlp.* and 2 more.*name what to adapt, of k_proj"
    ):
        load_policy(tmp_path / "moe", with_grad=False, lora=Lora(2, 2.0))
    policy = load_policy(tmp_path / "moe", with_grad=False, lora=Lora(2, 2.0, ("q_proj",)))
    assert len(policy.manifest.tensors) == 2
    gpt = GPT2Config(vocab_size=24, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    GPT2LMHeadModel(gpt).save_pretrained(str(tmp_path / "gpt"))
    with pytest.raises(
        ModelError, match=r"model\.lora\.targets: GPT2LMHeadModel multiplies by .*c_attn\.weight"
    ):
        load_policy(tmp_path / "gpt", with_grad=False, lora=Lora(2, 2.0))


def test_two_layers_of_one_weight_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    from headway.model.lora import adapt

    module = LlamaForCausalLM.from_pretrained(str(folder))
    module.model.layers[1].mlp.up_proj.weight = module.model.layers[0].mlp.up_proj.weight
    with pytest.raises(
        ModelError, match=r"layers\.0\.mlp\.up_proj\.weight and model\.layers\.1.*are one weight"
    ):
        adapt(module, Lora(2, 2.0))
