"""Weights swapped between two decode steps: spans, and each token's log-prob against two-model references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headway.generate import FinishedMember, GroupRequest, TorchEngine
from headway.types import PolicyVersion

Finish = Callable[..., dict[tuple[int, int], FinishedMember]]
RequestOf = Callable[..., GroupRequest]


def run_with_pushes(
    versions: Any, engine: TorchEngine, pushes: dict[int, int], finish: Finish, late: dict[int, GroupRequest]
) -> dict[tuple[int, int], FinishedMember]:
    """Push version pushes[k], and add late[k], before step k."""
    done: dict[tuple[int, int], FinishedMember] = {}
    for step in range(max([*pushes, *late]) + 1):
        if step in pushes:
            versions.push(engine, pushes[step])
        if step in late:
            engine.add(late[step])
        done |= {(m.request_id, m.member): m for m in engine.step()}
    return done | finish(engine)


def token_versions(member: FinishedMember, prompt_length: int) -> list[int]:
    """Per token, by the spans; checks that they cover the tokens without gaps, as maximal runs."""
    out: list[int] = []
    at, last = prompt_length, None
    for span in member.spans:
        assert span.start == at < span.end
        assert span.version != last
        out += [span.version.step] * (span.end - span.start)
        at, last = span.end, span.version
    assert len(out) == len(member.token_ids)
    return out


PUSHES = {4: 1, 7: 2, 8: 3}


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_requests_in_flight_go_on_under_the_new_weights(
    versions: Any, oracle: Any, request_of: RequestOf, finish: Finish, kv: str
) -> None:
    engine = versions.engine(kv=kv)
    asked = {
        0: request_of(0, prompt=9, members=3, budget=14, temperature=1.0),
        2: request_of(1, prompt=4, members=2, budget=10, temperature=0.6),
        5: request_of(2, prompt=7, members=2, budget=6, temperature=1.3),
        8: request_of(3, prompt=5, members=1, budget=5, temperature=0.3),
    }
    done = run_with_pushes(versions, engine, PUSHES, finish, asked)
    in_force = [max((v for at, v in PUSHES.items() if at <= step), default=0) for step in range(40)]
    assert len(done) == 8
    for started, request in asked.items():
        for member in range(request.num_members):
            result = done[request.request_id, member]
            numbers = token_versions(result, len(request.prompt_ids))
            assert numbers == in_force[started : started + len(numbers)]
            tokens, temperature = result.token_ids.tolist(), request.sampling.temperature
            if kv == "keep":
                expected = oracle.cached([(request.prompt_ids, numbers[0])], tokens, temperature, numbers)
            else:
                expected = oracle.fresh(request.prompt_ids, tokens, temperature, numbers)
            assert np.abs(result.logprobs - expected).max() <= 1e-4
    assert max(len(member.spans) for member in done.values()) == 4


def test_the_two_references_differ_so_the_option_is_seen(
    versions: Any, oracle: Any, request_of: RequestOf, finish: Finish
) -> None:
    request = request_of(0, prompt=9, budget=14)
    done = run_with_pushes(versions, versions.engine(), PUSHES, finish, {0: request})
    numbers, tokens = token_versions(done[0, 0], 9), done[0, 0].token_ids.tolist()
    kept = oracle.cached([(request.prompt_ids, 0)], tokens, 1.0, numbers)
    recomputed = oracle.fresh(request.prompt_ids, tokens, 1.0, numbers)
    assert np.abs(kept[:4] - recomputed[:4]).max() <= 1e-5
    assert np.abs(kept[4:] - recomputed[4:]).mean() > 0.01


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_push_between_the_chunks_of_a_prompt(
    versions: Any, oracle: Any, request_of: RequestOf, finish: Finish, kv: str
) -> None:
    engine = versions.engine(kv=kv, prefill_tokens=3)
    request = request_of(0, prompt=8, members=2, budget=6)
    done = run_with_pushes(versions, engine, {1: 1, 2: 2, 4: 3}, finish, {0: request})
    chunks = [(request.prompt_ids[:3], 0), (request.prompt_ids[3:6], 1), (request.prompt_ids[6:], 2)]
    for member in done.values():
        numbers, tokens = token_versions(member, 8), member.token_ids.tolist()
        assert numbers == [2, 2, 3, 3, 3, 3]
        if kv == "keep":
            expected = oracle.cached(chunks, tokens, 1.0, numbers)
        else:
            expected = oracle.fresh(request.prompt_ids, tokens, 1.0, numbers)
        assert np.abs(member.logprobs - expected).max() <= 1e-4


def test_there_and_back_equals_a_fresh_engine_bit_for_bit(
    versions: Any, request_of: RequestOf, finish: Finish
) -> None:
    travelled = versions.engine()
    travelled.add(request_of(9, prompt=6, members=4, budget=12))
    for step, version in enumerate((0, 1, 0), 1):
        versions.push(travelled, version, step)
        travelled.step()
    finish(travelled)
    assert torch.equal(travelled.policy.flat, versions.flat[0])
    results = []
    for engine in (travelled, versions.engine()):
        for number in range(3):
            engine.add(request_of(number, prompt=5 + number, members=3, budget=10))
        results.append(finish(engine))
    for key, member in results[1].items():
        assert np.array_equal(results[0][key].token_ids, member.token_ids)
        assert np.array_equal(results[0][key].logprobs, member.logprobs)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_new_prompts_after_a_push_see_nothing_of_the_old_weights(
    versions: Any, oracle: Any, request_of: RequestOf, finish: Finish, kv: str
) -> None:
    engine = versions.engine(kv=kv)
    prompt = request_of(0, prompt=12).prompt_ids
    engine.add(request_of(0, prompt=prompt, members=3, budget=4))  # ends before the push
    finish(engine)
    engine.add(request_of(1, prompt=prompt, members=3, budget=12))  # spans it
    engine.step()
    versions.push(engine, 1)
    engine.add(request_of(2, prompt=prompt, members=3, budget=6))  # the same prompt again
    done = finish(engine)
    for member in range(3):
        result = done[2, member]
        assert [span.version.step for span in result.spans] == [1]
        assert np.abs(result.logprobs - oracle.fresh(prompt, result.token_ids.tolist(), 1.0, 1)).max() <= 1e-5


def test_pushes_of_the_same_weights_change_no_token(
    versions: Any, request_of: RequestOf, finish: Finish
) -> None:
    for kv in ("keep", "recompute"):
        engine, calm = versions.engine(kv=kv), versions.engine()
        for each in (engine, calm):
            each.add(request_of(0, prompt=9, members=4, budget=20))
        step, done = 0, {}
        while engine.num_running + engine.num_waiting:
            step += 1
            versions.push(engine, 0, step)
            done |= {(m.request_id, m.member): m for m in engine.step()}
        for key, member in finish(calm).items():
            assert done[key].token_ids.tolist() == member.token_ids.tolist()
            assert np.abs(done[key].logprobs - member.logprobs).max() <= 1e-5
            assert len(done[key].spans) == 20


def test_a_cache_is_rebuilt_in_pieces_no_larger_than_a_prefill(
    versions: Any, request_of: RequestOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = versions.engine(kv="recompute", prefill_tokens=8)
    for number in range(4):
        engine.add(request_of(number, prompt=6, members=2, budget=12))
    for _ in range(8):
        engine.step()
    sizes: list[int] = []
    backbone = engine.policy.backbone

    def counted(ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(len(ids))
        return backbone(ids, *rest)

    monkeypatch.setattr(engine.policy, "backbone", counted)
    versions.push(engine, 1)
    assert len(sizes) > 1
    assert max(sizes) <= 8


def test_stepping_before_any_weights_is_refused_and_a_failed_copy_names_no_version(
    versions: Any, request_of: RequestOf
) -> None:
    engine = versions.engine(version=None)
    assert engine.version is None
    engine.add(request_of(0))
    with pytest.raises(AssertionError, match="no weights"):
        engine.step()
    versions.push(engine, 1)

    def failing(flat: torch.Tensor) -> PolicyVersion:
        raise OSError("the learner has gone")

    with pytest.raises(OSError, match="gone"):
        engine.apply(failing)
    assert engine.version == PolicyVersion(0, 1)
