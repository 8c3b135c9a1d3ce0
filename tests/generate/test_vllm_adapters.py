"""vLLM's own LoRA layers, written in place on its CPU build, against float64 forwards of merged weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.generate.vllm_case import LONG_PROMPT, NEEDS_VLLM, PROMPT

from headway.errors import UnsupportedOption, WeightError
from headway.generate.vllm import adapters, library, open_vllm
from headway.generate.vllm.start import Sizes
from headway.model import Lora, load_policy
from headway.types import PolicyVersion

pytestmark = NEEDS_VLLM
_alive: list[Any] = []  # process groups are shared, and go with the first engine that is collected


def open_engine(versions: Any, lora: Lora, dtype: str = "float32") -> Any:
    engine = open_vllm(
        versions.folder, published_dtype=dtype, sizes=Sizes(64, 0, 512), kv="keep", options={},
        decode=versions.decode, lora=lora,
    )  # fmt: skip
    _alive.append(engine)
    return engine


def push(engine: Any, flat: torch.Tensor, step: int) -> None:
    engine.apply(lambda into: (into.copy_(flat), PolicyVersion(0, step))[1])


def results(done: Any) -> list[tuple[list[int], list[float]]]:
    return [(member.token_ids.tolist(), member.logprobs.tolist()) for _, member in sorted(done.items())]


def test_each_push_gives_the_log_probs_of_its_merged_weights_and_there_and_back_a_fresh_vllm(
    adapted: Any, adapted_oracle: Any, request_of: Any, finish: Any
) -> None:
    """Rank 3 in room for 8, alpha / r = 5 / 3; the second request of a version reads the prefix that the first left."""
    engine = open_engine(adapted, adapted.lora)
    assert engine.manifest == adapted.manifest
    model = library.live_runner(engine._llm).model
    base = {name: p.clone() for name, p in model.named_parameters() if p.numel()}
    assert base
    seen: list[Any] = []
    for step, number in enumerate((0, 1, 2, 1)):
        push(engine, adapted.flat[number], step)
        state = engine.served.read(0, adapted.manifest.num_elements)
        for spec in adapted.manifest.tensors:
            place = slice(spec.offset, spec.offset + spec.size)
            assert np.array_equal(
                np.frombuffer(state, np.float32)[place], adapted.flat[number][place].numpy()
            )
        for again in range(2):
            engine.add(request_of(10 * step + again, prompt=LONG_PROMPT, members=2, budget=6, seed=4))
            done = finish(engine)
            for member in done.values():
                expected = adapted_oracle.fresh(LONG_PROMPT, member.token_ids.tolist(), 1.0, number)
                assert np.abs(member.logprobs - expected).max() <= 1e-4
        seen.append(results(done))
    assert [ids for ids, _ in seen[1]] == [ids for ids, _ in seen[3]] != [ids for ids, _ in seen[2]]
    fresh = open_engine(adapted, adapted.lora)
    push(fresh, adapted.flat[1], 0)
    for again in range(2):
        fresh.add(request_of(10 + again, prompt=LONG_PROMPT, members=2, budget=6, seed=4))
        done = finish(fresh)
    assert results(done) == seen[1] == seen[3]
    assert all(torch.equal(p, dict(model.named_parameters())[name]) for name, p in base.items())


def test_requests_in_flight_go_on_with_the_adapters_that_vllm_is_pushed(
    adapted: Any, adapted_oracle: Any, request_of: Any, finish: Any
) -> None:
    engine = open_engine(adapted, adapted.lora)
    push(engine, adapted.flat[1], 0)
    engine.add(request_of(1, prompt=PROMPT, members=2, budget=9))
    for _ in range(4):
        assert engine.step() == []
    push(engine, adapted.flat[2], 1)
    for member in finish(engine).values():
        numbers = [1 + span.version.step for span in member.spans for _ in range(span.start, span.end)]
        assert numbers == [1] * 4 + [2] * 5
        expected = adapted_oracle.cached([(PROMPT, 1)], member.token_ids.tolist(), 1.0, numbers)
        assert np.abs(member.logprobs - expected).max() <= 1e-4


def test_some_targets_in_bfloat16_are_served_bit_for_bit_by_vllm(
    adapted: Any, request_of: Any, finish: Any
) -> None:
    """q of a fused q, k, v, and up of a fused gate and up."""
    lora = Lora(2, 1.0, ("q_proj", "mlp.up_proj"), seed=1)
    policy = load_policy(adapted.folder, published_dtype="bfloat16", with_grad=False, lora=lora)
    for spec in policy.manifest.tensors:
        noise = torch.randn(spec.size, generator=torch.Generator().manual_seed(spec.offset))
        policy.flat[spec.offset : spec.offset + spec.size] = noise
    policy.round_to_published()
    engine = open_engine(adapted, lora, "bfloat16")
    push(engine, policy.flat, 0)
    state = engine.served.read(0, policy.manifest.num_elements)
    assert torch.equal(torch.frombuffer(bytearray(state), dtype=torch.bfloat16).float(), policy.flat)
    layers = dict(library.live_runner(engine._llm).model.named_modules())
    stacked = layers["model.layers.1.self_attn.qkv_proj"].lora_b_stacked
    assert stacked[0].any()
    assert not stacked[1].any()
    engine.add(request_of(1, prompt=PROMPT, budget=4))
    assert len(finish(engine)) == 1


def test_a_table_that_differs_from_vllm_s_loader_is_refused(
    adapted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = adapters.build_adapter_table

    def crossed(manifest: Any, slots: Any) -> Any:
        first, second = "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj"
        return build(manifest, {**slots, first: slots[second], second: slots[first]})

    monkeypatch.setattr(adapters, "build_adapter_table", crossed)
    with pytest.raises(WeightError, match="writes other values into adapter"):
        open_engine(adapted, adapted.lora)


def test_what_vllm_cannot_hold_is_refused_by_name(adapted: Any) -> None:
    with pytest.raises(UnsupportedOption, match=r"model\.lora\.rank = 1000: .* allowed: 1 to 512"):
        open_engine(adapted, Lora(1000, 1.0))
    with pytest.raises(
        WeightError, match=r"model\.lora\.targets: vLLM has no adapter .* model\.layers\.0\.self_attn"
    ):
        adapters.build_adapter_table(adapted.manifest, {})
