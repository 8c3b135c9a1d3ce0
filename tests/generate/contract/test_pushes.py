"""The contract of pushes that every inference engine keeps: run against each of contract/conftest.py's ENGINES."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headway.types import FinishReason, PolicyVersion, Trajectory

UnderTest = Callable[..., Any]
MakeHarness = Callable[..., Any]
MODES = ("in_flight", "drain", "resume")
PROMPT = [5, 9, 30, 7, 41, 12]


def versions_of(trajectory: Trajectory) -> list[int]:
    """The step that sampled each token."""
    return [span.version.step for span in trajectory.spans for _ in range(span.start, span.end)]


def sampled(trajectory: Trajectory) -> list[int]:
    return trajectory.token_ids[trajectory.prompt_length :].tolist()


def logprobs(trajectory: Trajectory) -> np.ndarray:
    return trajectory.logprobs[trajectory.prompt_length :]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kv", ["keep", "recompute", 1])
def test_a_prompt_asked_again_after_a_push_sees_nothing_of_the_old_weights(
    under_test: UnderTest, harness: MakeHarness, versions: Any, oracle: Any, mode: str, kv: str | int
) -> None:
    run = harness(under_test(kv=kv), mode=mode)
    run.push(versions.flat[0], 0)
    run.turn()
    run.grant(0, PROMPT, 3, 4)  # ends before the push
    run.finish()
    run.grant(1, PROMPT, 4, 12)  # spans it
    run.turn(3)
    run.push(versions.flat[1], 1)
    run.turn()
    run.grant(2, PROMPT, 3, 6)  # the same prompt again
    after = [t for t in run.finish() if t.ticket_id == 2]
    assert len(after) == 3
    for trajectory in after:
        assert set(versions_of(trajectory)) == {1}
        assert trajectory.num_cached == 0
        expected = oracle.fresh(PROMPT, sampled(trajectory), 1.0, 1)
        assert np.abs(logprobs(trajectory) - expected).max() <= 1e-5


@pytest.mark.parametrize("mode", ["in_flight", "resume"])
def test_sixteen_long_requests_outlive_a_push_and_record_where_it_split_them(
    under_test: UnderTest, harness: MakeHarness, versions: Any, mode: str
) -> None:
    run = harness(under_test(), mode=mode)
    run.push(versions.flat[0], 0)
    run.turn()
    for number in range(4):
        run.grant(number, [*PROMPT, number + 3], 4, 20)
    run.turn(8)
    run.push(versions.flat[1], 1)
    done = run.finish()
    assert len(done) == 16
    for trajectory in done:
        assert trajectory.finish_reason is FinishReason.LENGTH
        assert [span.version.step for span in trajectory.spans] == [0, 1]
        assert trajectory.spans[0].end - trajectory.spans[0].start == 8


def test_a_drained_push_waits_for_what_runs_and_starts_nothing_meanwhile(
    under_test: UnderTest, harness: MakeHarness, versions: Any
) -> None:
    run = harness(under_test(), mode="drain")
    run.push(versions.flat[0], 0)
    run.turn()
    run.grant(0, PROMPT, 4, 12)
    run.turn(3)
    run.push(versions.flat[1], 1)
    run.turn()
    run.grant(1, PROMPT, 4, 6)  # arrives while the engine drains
    run.turn(2)
    run.push(versions.flat[2], 2)  # joins the one that waits
    run.turn()
    assert run.engine.version == PolicyVersion(0, 0)
    assert run.engine.num_running == 4
    done = run.finish()
    assert [set(versions_of(t)) for t in done] == [{0}] * 4 + [{2}] * 4
    assert [ack.version.step for ack in run.acks] == [0, 2]


@pytest.mark.parametrize("prefill_tokens", [512, 5])
def test_a_resumed_request_goes_on_from_its_prefix_under_the_new_weights_alone(
    under_test: UnderTest, harness: MakeHarness, versions: Any, oracle: Any, prefill_tokens: int
) -> None:
    run = harness(under_test(prefill_tokens=prefill_tokens), mode="resume")
    run.push(versions.flat[0], 0)
    run.turn()
    for number, length in enumerate((2, 6, 9)):
        run.grant(number, (PROMPT * 2)[:length], 3, 16)
    run.turn(6)
    sampled_before = run.engine.num_sampled
    run.push(versions.flat[1], 1)
    run.turn()
    assert run.engine.num_running == 9
    run.turn(2)
    run.push(versions.flat[2], 2)  # before every prefix is restored, where prefill is slow
    done = run.finish()
    assert len(done) == 9
    assert sampled_before > 0
    for trajectory in done:
        numbers = versions_of(trajectory)
        prompt = trajectory.token_ids[: trajectory.prompt_length].tolist()
        expected = oracle.fresh(prompt, sampled(trajectory), 1.0, numbers)
        assert np.abs(logprobs(trajectory) - expected).max() <= 1e-4
        assert numbers == sorted(numbers)
        assert numbers[-1] == 2


def test_a_number_for_kv_recomputes_exactly_what_is_older(
    under_test: UnderTest, harness: MakeHarness, versions: Any, oracle: Any
) -> None:
    """k = 1: right after push n, keys and values of versions n and n - 1 are kept, older ones are of version n."""
    run = harness(under_test(kv=1))
    run.push(versions.flat[0], 0)
    run.turn()
    run.grant(0, PROMPT, 2, 14)
    written: dict[int, int] = {}  # position -> version of its key and value, by the rule
    pushes = {4: 1, 7: 2, 9: 3}
    for step in range(14):
        if step in pushes:
            run.push(versions.flat[pushes[step]], pushes[step])
            now = pushes[step]
            written = {at: now if now - by > 1 else by for at, by in written.items()}
        run.turn()
        force = max((v for at, v in pushes.items() if at <= step), default=0)
        first = 0 if step == 0 else len(PROMPT) + step - 1
        written |= dict.fromkeys(range(first, len(PROMPT) + step), force)
    done = run.finish()
    for trajectory in done:
        numbers, tokens = versions_of(trajectory), sampled(trajectory)
        assert numbers == [0] * 4 + [1] * 3 + [2] * 2 + [3] * 5
        kept = oracle.cached([(PROMPT, 0)], tokens, 1.0, numbers)
        fresh = oracle.fresh(PROMPT, tokens, 1.0, numbers)
        mine = logprobs(trajectory)
        assert np.abs(mine[:7] - kept[:7]).max() <= 1e-4  # 0 is one version old under 1: kept
        assert np.abs(mine[7] - kept[7]) > 1e-3  # under 2 what 0 wrote is written anew: neither kept
        assert np.abs(mine[7] - fresh[7]) > 1e-3  # nor all of it new: what 1 wrote stays
    assert set(written.values()) == {2, 3}


@pytest.mark.parametrize("mode", MODES)
def test_there_and_back_equals_a_fresh_engine_bit_for_bit(
    under_test: UnderTest, harness: MakeHarness, versions: Any, mode: str
) -> None:
    travelled, fresh = harness(under_test(), mode=mode), harness(under_test())
    travelled.grant(9, PROMPT, 4, 12)
    for step, number in enumerate((0, 1, 0)):
        travelled.push(versions.flat[number], step)
        travelled.turn(2)
    travelled.finish()
    fresh.push(versions.flat[0], 2)
    fresh.turn()
    results = []
    for run in (travelled, fresh):
        run.done.clear()
        for number in range(3):
            run.grant(number, PROMPT[: 3 + number], 3, 10, admitted=2)
        results.append(run.finish())
    for mine, theirs in zip(*results, strict=True):
        assert np.array_equal(mine.token_ids, theirs.token_ids)
        assert np.array_equal(mine.logprobs, theirs.logprobs)


def test_each_ack_names_the_digest_of_what_is_served(
    under_test: UnderTest, harness: MakeHarness, versions: Any
) -> None:
    run = harness(under_test())
    for step in range(6):
        run.push(versions.flat[step % 4], step)
        run.turn(2)
    assert [(ack.version, ack.digest) for ack in run.acks] == list(run.digests.items())
    assert run.acks[0].digest == run.acks[4].digest != run.acks[1].digest
    assert all(ack.pause_s > 0 for ack in run.acks)


def push_under_load(under_test: UnderTest, harness: MakeHarness, mode: str, num_pushes: int) -> None:
    """Every tensor holds the version's number; a forward that sees two values, or another version's, fails."""
    subject = under_test(max_running=16)
    run = harness(subject, mode=mode)
    engine = subject.engine
    seen: set[float] = set()

    def check() -> None:
        low, high = subject.extremes()
        assert low == high
        # an engine may forward inside the apply (a cache rebuilt) before it names the version
        assert engine.version is not None
        seen.add(low)

    subject.watch(check)
    gaps = torch.ones(engine.manifest.num_elements)
    ticket = 0
    for step in range(num_pushes):
        run.push(gaps * (step % 200), step)  # bf16 would hold these too
        if run.rollout.num_tickets < 3:
            run.grant(ticket, PROMPT[: 1 + ticket % 6], 4, 1 + ticket % 7, admitted=0)
            ticket += 1
        run.turn({"in_flight": 1 + step % 2, "drain": 5, "resume": 4}[mode])
        if engine.num_running:
            assert engine.version is not None
            assert seen
    run.finish()
    assert len(seen) >= min(100, num_pushes // 3)
    assert ticket > num_pushes // 10


@pytest.mark.parametrize("mode", MODES)
def test_a_forward_never_sees_two_versions_over_pushes_under_load(
    under_test: UnderTest, harness: MakeHarness, mode: str
) -> None:
    push_under_load(under_test, harness, mode, 60)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_forward_never_sees_two_versions_over_a_thousand_pushes_under_load(
    under_test: UnderTest, harness: MakeHarness, mode: str
) -> None:
    push_under_load(under_test, harness, mode, 1000)


def test_while_a_version_is_unproved_nothing_that_it_sampled_leaves(
    under_test: UnderTest, harness: MakeHarness, versions: Any
) -> None:
    run = harness(under_test())
    run.push(versions.flat[0], 0)
    run.turn(2)
    run.grant(0, PROMPT, 2, 3)
    run.push(versions.flat[1], 1)
    while run.stager.turn():
        pass
    assert run.rollout.refresh()
    for _ in range(6):  # the stager's thread is slow: both members end meanwhile
        run.rollout.turn()
        assert (run.rollout.take_acks(), run.rollout.take()) == ([], None)
    assert run.engine.num_running == 0
    run.turn()
    assert [ack.version.step for ack in run.acks] == [0, 1]
    assert len(run.done) == 2
