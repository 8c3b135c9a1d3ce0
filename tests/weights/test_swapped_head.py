"""A pushed head is the head that scores: no copy of the old one outlives a push, written in place or swapped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headway.generate import FinishedMember, GroupRequest, TorchEngine
from headway.model import load_policy
from headway.types import PolicyVersion, Sampling
from headway.weights import FlatServed, Stager, WeightPublisher
from headway.weights.shm import ShmReceiver, ShmSender

VOCAB_SIZE = 32


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=48, initializer_range=0.3, tie_word_embeddings=request.param,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(str(tmp_path))
    return tmp_path


def engine_of(folder: Path, dtype: str) -> TorchEngine:
    policy = load_policy(folder, published_dtype=dtype, with_grad=False)
    return TorchEngine(
        policy, max_running=8, kv_tokens=256, prefill_tokens=64, kv="keep", decode=lambda ids: ""
    )


def sample(engine: TorchEngine) -> list[FinishedMember]:
    for number in range(3):
        prompt = [3 + number, 9, 30 - number]
        engine.add(GroupRequest(number, prompt, 2, Sampling(1.0, 8, []), 50 + number))
    done: list[FinishedMember] = []
    while engine.num_running + engine.num_waiting:
        done += engine.step()
    return sorted(done, key=lambda member: (member.request_id, member.member))


@pytest.mark.parametrize(("dtype", "swap"), [("float32", True), ("float32", False), ("bfloat16", False)])
def test_log_probs_after_a_push_and_back_are_those_of_fresh_engines(
    folder: Path, name: str, dtype: str, swap: bool
) -> None:
    engine = engine_of(folder, dtype)
    manifest = engine.manifest
    publisher = WeightPublisher(ShmSender(name, manifest), manifest, merged=0)
    receiver = ShmReceiver(name, manifest, whole_only=swap)
    stager = Stager(receiver, FlatServed(engine, manifest), manifest, swap=swap)
    states = [engine.flat.clone()]
    states.append(states[0] + 0.2 * torch.randn(len(states[0]), generator=torch.Generator().manual_seed(2)))
    seen: list[list[FinishedMember]] = []
    addresses: set[int] = set()
    for step, number in enumerate((0, 1, 0)):
        digest = publisher.publish(states[number], PolicyVersion(0, step)).digest
        while stager.turn():
            pass
        assert stager.commit() == PolicyVersion(0, step)
        while stager.turn():
            pass
        assert [proof.digest for proof in stager.proofs()] == [digest]
        addresses.add(engine.policy.head.weight.data_ptr())
        fresh = engine_of(folder, dtype)
        state = states[number].bfloat16().float() if dtype == "bfloat16" else states[number]

        def copy(flat: torch.Tensor, state: torch.Tensor = state, step: int = step) -> PolicyVersion:
            flat.copy_(state)
            return PolicyVersion(0, step)

        fresh.apply(copy)
        mine, theirs = sample(engine), sample(fresh)
        for got, want in zip(mine, theirs, strict=True):
            assert got.token_ids.tolist() == want.token_ids.tolist()
            assert got.logprobs.tobytes() == want.logprobs.tobytes()
        seen.append(mine)
    assert (len(addresses) > 1) == swap
    assert seen[0][0].logprobs.tobytes() != seen[1][0].logprobs.tobytes()
    assert seen[0][0].logprobs.tobytes() == seen[2][0].logprobs.tobytes()
    stager.close()
    publisher.close()
