"""Behaviour log-probs of mixed continuous batches are those of each sequence alone; tokens follow the seeds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headway.generate import FinishedMember, GroupRequest, TorchEngine, mix
from headway.types import FinishReason

TEMPERATURES = (0.3, 0.6, 1.0, 1.3)
Finish = Callable[..., dict[tuple[int, int], FinishedMember]]
RequestOf = Callable[..., GroupRequest]


def requests(request_of: RequestOf, seed: int, count: int = 14) -> list[GroupRequest]:
    draw = random.Random(seed)
    return [
        request_of(
            number,
            prompt=draw.randint(1, 20),
            members=draw.randint(1, 4),
            budget=draw.randint(1, 14),
            temperature=TEMPERATURES[number % len(TEMPERATURES)],
            stop_ids=draw.sample(range(48), 2),
        )
        for number in range(count)
    ]


def serve(
    engine: TorchEngine, asked: list[GroupRequest], finish: Finish
) -> dict[tuple[int, int], FinishedMember]:
    """Add in three instalments, some steps apart, so that prompts and decoding mix."""
    done: dict[tuple[int, int], FinishedMember] = {}
    for start in range(0, len(asked), 5):
        for request in asked[start : start + 5]:
            engine.add(request)
        for _ in range(3):
            done |= {(m.request_id, m.member): m for m in engine.step()}
    return done | finish(engine)


OPTIONS = [
    {},
    {"prefill_tokens": 7},  # prompts in chunks
    {"prefill_tokens": 1},
    {"max_running": 4},  # requests wait for others to end
    {"kv_tokens": 80, "prefill_tokens": 9},  # and for room in the pool
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_behaviour_logprobs_equal_a_forward_of_each_sequence(
    versions: Any, oracle: Any, request_of: RequestOf, finish: Finish, options: dict[str, Any]
) -> None:
    engine = versions.engine(**options)
    asked = requests(request_of, seed=1)
    done = serve(engine, asked, finish)
    assert len(done) == sum(request.num_members for request in asked)
    spread = []
    for request in asked:
        for member in range(request.num_members):
            result = done[request.request_id, member]
            tokens = result.token_ids.tolist()
            assert result.token_ids.dtype == np.int32
            assert result.logprobs.dtype == np.float32
            assert 1 <= len(tokens) == len(result.logprobs) <= request.sampling.max_new_tokens
            expected = oracle.fresh(request.prompt_ids, tokens, request.sampling.temperature)
            assert np.abs(result.logprobs - expected).max() <= 1e-5
            spread += expected.tolist()
    assert np.std(spread) > 0.5, "nearly uniform distributions would hide a mistake"


def test_the_pool_runs_dry_and_requests_wait(versions: Any, request_of: RequestOf) -> None:
    engine = versions.engine(kv_tokens=80)
    for request in requests(request_of, seed=1):
        engine.add(request)
    engine.step()
    assert engine.num_waiting > 0


def test_a_shift_by_one_is_far_from_agreement(
    versions: Any, oracle: Any, request_of: RequestOf, finish: Finish
) -> None:
    engine = versions.engine()
    request = request_of(0, prompt=6, members=8, budget=20)
    engine.add(request)
    for member in finish(engine).values():
        expected = oracle.fresh(request.prompt_ids, member.token_ids.tolist(), 1.0)
        assert np.abs(member.logprobs - expected).max() <= 1e-5
        assert np.abs(member.logprobs[1:] - expected[:-1]).mean() > 0.1
        assert np.abs(member.logprobs[:-1] - expected[1:]).mean() > 0.1


@pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
def test_the_same_seed_gives_the_same_tokens_alone_and_in_any_batch(
    versions: Any, request_of: RequestOf, finish: Finish, options: dict[str, Any]
) -> None:
    asked = requests(request_of, seed=2)
    done = serve(versions.engine(**options), asked, finish)
    backwards = serve(versions.engine(), asked[::-1], finish)
    for request in asked:
        engine = versions.engine()
        engine.add(request)
        alone = finish(engine)
        assert len(alone) == request.num_members
        for key, member in alone.items():
            for other in (done[key], backwards[key]):
                assert other.token_ids.tolist() == member.token_ids.tolist()
                assert other.finish_reason == member.finish_reason
                assert np.abs(other.logprobs - member.logprobs).max() <= 1e-5


def test_members_of_a_group_and_replicas_with_the_same_prompt_are_distinct(
    versions: Any, request_of: RequestOf, finish: Finish
) -> None:
    streams = []
    for run_seed in (7, 7, 8):
        for ticket in (0, 1):  # two replicas serve the same prompt under two tickets
            engine = versions.engine()
            engine.add(request_of(ticket, prompt=[5, 6, 7], members=8, budget=12, seed=mix(run_seed, ticket)))
            streams.append([member.token_ids.tolist() for member in finish(engine).values()])
    first, second, first_again, second_again, *others = streams
    assert (first, second) == (first_again, second_again)
    everything = [str(tokens) for stream in (first, second, *others) for tokens in stream]
    assert len(set(everything)) == len(everything)


def test_tokens_follow_the_distribution(
    versions: Any, oracle: Any, request_of: RequestOf, finish: Finish
) -> None:
    engine = versions.engine(max_running=512, prefill_tokens=4)
    engine.add(request_of(0, prompt=6, members=512, budget=1, temperature=1.3))
    counts = np.bincount([member.token_ids[0] for member in finish(engine).values()], minlength=48)
    prompt = request_of(0, prompt=6).prompt_ids
    expected = 512 * np.exp([oracle.fresh(prompt, [token], 1.3)[0] for token in range(48)])
    assert expected.sum() == pytest.approx(512)
    assert ((counts - expected) ** 2 / expected).sum() < 90  # 47 degrees of freedom: p < 2e-4 above


def test_greedy_takes_the_largest_logit_and_reports_its_logprob_at_temperature_1(
    versions: Any, oracle: Any, request_of: RequestOf, finish: Finish
) -> None:
    engine = versions.engine(prefill_tokens=3)
    request = request_of(3, prompt=7, members=2, budget=5, temperature=0.0)
    engine.add(request)
    done = finish(engine)
    tokens = done[3, 0].token_ids.tolist()
    assert done[3, 1].token_ids.tolist() == tokens
    for place, token in enumerate(tokens):
        options = [
            oracle.fresh([*request.prompt_ids, *tokens[:place]], [other], 1.0)[0] for other in range(48)
        ]
        assert int(np.argmax(options)) == token
    assert np.abs(done[3, 0].logprobs - oracle.fresh(request.prompt_ids, tokens, 1.0)).max() <= 1e-5


def test_times_and_spans_of_a_run_without_pushes(versions: Any, request_of: RequestOf) -> None:
    now = [100.0]
    engine = versions.engine(clock=lambda: now[0])
    engine.add(request_of(0, prompt=4, budget=3))
    for second in (101.0, 102.0):
        now[0] = second
        assert engine.step() == []
    now[0] = 103.0
    (member,) = engine.step()
    assert (member.started_s, member.finished_s) == (101.0, 103.0)
    assert [(span.start, span.end, span.version.step) for span in member.spans] == [(4, 7, 0)]
    assert member.finish_reason is FinishReason.LENGTH
