"""The contract of requests that every inference engine keeps: run against each of contract/conftest.py's ENGINES."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.generate.vllm_case import PROMPT

from headway.generate import FinishedMember, GroupRequest, Unservable
from headway.types import DropReason, FinishReason

Finish = Callable[..., dict[tuple[int, int], FinishedMember]]
RequestOf = Callable[..., GroupRequest]


@pytest.fixture
def engine(under_test: Callable[..., Any], versions: Any) -> Any:
    """Serves version 0."""
    engine = under_test().engine
    versions.push(engine, 0)
    return engine


def tokens_of(member: FinishedMember) -> list[int]:
    return member.token_ids.tolist()


def test_logprobs_are_those_of_the_distribution_that_sampled(
    engine: Any, oracle: Any, request_of: RequestOf, finish: Finish
) -> None:
    temperatures = (0.5, 1.0, 1.3)
    for number, temperature in enumerate(temperatures):
        engine.add(request_of(number, members=4, budget=12, temperature=temperature))
    done = finish(engine)
    assert len(done) == 12
    for (number, _), member in done.items():
        expected = oracle.fresh(request_of(number).prompt_ids, tokens_of(member), temperatures[number])
        assert np.abs(member.logprobs - expected).max() <= 1e-4
        assert member.finish_reason is FinishReason.LENGTH


def test_greedy_takes_the_most_likely_token_and_reports_it_at_temperature_1(
    engine: Any, versions: Any, oracle: Any, request_of: RequestOf, finish: Finish
) -> None:
    engine.add(request_of(0, prompt=PROMPT, budget=6, temperature=0.0))
    member = finish(engine)[0, 0]
    assert np.abs(member.logprobs - oracle.fresh(PROMPT, tokens_of(member), 1.0)).max() <= 1e-4
    for place, token in enumerate(tokens_of(member)):
        prefix = [*PROMPT, *tokens_of(member)[:place]]
        best = max(range(48), key=lambda other: float(oracle.fresh(prefix, [other], 1.0)[0]))
        assert token == best


def test_a_seed_gives_the_same_tokens_alone_and_in_company(
    engine: Any, request_of: RequestOf, finish: Finish
) -> None:
    engine.add(request_of(3, members=1, budget=10))
    alone = finish(engine)[3, 0]
    for number in (3, 4, 5):
        engine.add(request_of(number, members=6, budget=10))
    company = finish(engine)
    assert tokens_of(company[3, 0]) == tokens_of(alone)
    assert (
        np.abs(company[3, 0].logprobs - alone.logprobs).max() <= 1e-5
    )  # a GEMM's rows differ by their count
    assert len({tuple(tokens_of(company[3, member])) for member in range(6)}) > 1


def test_members_that_are_held_elsewhere_are_not_sampled(
    engine: Any, request_of: RequestOf, finish: Finish
) -> None:
    engine.add(request_of(0, members=4, budget=6))
    whole = finish(engine)
    request = request_of(0, members=4, budget=6)
    engine.add(GroupRequest(0, request.prompt_ids, 4, request.sampling, request.seed, frozenset({1, 2})))
    part = finish(engine)
    assert sorted(part) == [(0, 0), (0, 3)]
    assert all(tokens_of(part[key]) == tokens_of(whole[key]) for key in part)


def test_stops_and_budgets_end_a_member_with_their_reason(
    engine: Any, versions: Any, request_of: RequestOf, finish: Finish
) -> None:
    engine.add(request_of(0, prompt=PROMPT, budget=12, temperature=0.0))
    greedy = tokens_of(finish(engine)[0, 0])
    stop, text = greedy[4], versions.decode(greedy)
    first = greedy.index(stop)
    engine.add(request_of(1, prompt=PROMPT, budget=12, temperature=0.0, stop_ids=[stop, 47]))
    engine.add(request_of(2, prompt=PROMPT, budget=12, temperature=0.0, stop_ids=[stop], ignore_eos=True))
    engine.add(request_of(3, prompt=PROMPT, budget=12, temperature=0.0, stop_strings=["never", text[2:4]]))
    engine.add(request_of(4, prompt=PROMPT, budget=first + 1, temperature=0.0, stop_ids=[stop]))
    done = finish(engine)
    assert (tokens_of(done[1, 0]), done[1, 0].finish_reason) == (greedy[: first + 1], FinishReason.STOP)
    assert (tokens_of(done[2, 0]), done[2, 0].finish_reason) == (greedy, FinishReason.LENGTH)
    assert done[3, 0].finish_reason is FinishReason.STOP
    assert versions.decode(tokens_of(done[3, 0])).endswith(text[2:4])
    assert (len(done[4, 0].token_ids), done[4, 0].finish_reason) == (first + 1, FinishReason.STOP)
    assert engine.num_running == engine.num_waiting == 0


def test_stop_ids_outside_the_vocabulary_never_stop(
    engine: Any, request_of: RequestOf, finish: Finish
) -> None:
    engine.add(request_of(0, prompt=PROMPT, budget=4, stop_ids=[48, 100_000, -1]))
    assert finish(engine)[0, 0].finish_reason is FinishReason.LENGTH


def test_an_aborted_group_ends_alone_and_its_tokens_are_counted(
    engine: Any, request_of: RequestOf, finish: Finish
) -> None:
    before = engine.num_sampled
    engine.add(request_of(0, members=3, budget=12))
    engine.add(request_of(1, members=2, budget=12))
    for _ in range(4):
        assert engine.step() == []
    assert engine.abort(0) == 12
    assert engine.abort(0) == engine.abort(99) == 0
    assert sorted(finish(engine)) == [(1, 0), (1, 1)]
    assert engine.num_sampled - before == 12 + 24


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt": [3] * 60, "budget": 5}, DropReason.PROMPT_TOO_LONG),
        ({"prompt": []}, DropReason.PROMPT_EMPTY),
        ({"budget": 0}, DropReason.NO_BUDGET),
        ({"prompt": [3, 48]}, DropReason.INVALID),
        ({"prompt": [3, -1]}, DropReason.INVALID),
        ({"members": 65}, DropReason.PROMPT_TOO_LONG),  # more than max_running
    ],
    ids=str,
)
def test_what_can_never_be_served_is_refused_by_its_reason(
    engine: Any, request_of: RequestOf, change: dict[str, Any], reason: DropReason
) -> None:
    with pytest.raises(Unservable, match="request 7") as caught:
        engine.add(request_of(7, **change))
    assert caught.value.reason is reason
    assert engine.num_waiting == engine.num_running == 0


def test_an_id_that_is_in_the_engine_is_refused_and_its_group_goes_on(
    engine: Any, request_of: RequestOf, finish: Finish
) -> None:
    engine.add(request_of(1, members=2, budget=6))
    engine.step()
    with pytest.raises(ValueError, match="request 1 is in the engine already"):
        engine.add(request_of(1, members=2, budget=6))
    together = finish(engine)
    assert sorted(together) == [(1, 0), (1, 1)]
    engine.add(request_of(1, members=2, budget=6))  # it is free again
    assert {key: tokens_of(member) for key, member in finish(engine).items()} == {
        key: tokens_of(member) for key, member in together.items()
    }


def test_prompt_and_budget_that_fill_the_context_exactly_are_served(
    engine: Any, oracle: Any, request_of: RequestOf, finish: Finish
) -> None:
    request = request_of(0, prompt=60, budget=4)
    engine.add(request)
    member = finish(engine)[0, 0]
    assert len(member.token_ids) == 4
    assert np.abs(member.logprobs - oracle.fresh(request.prompt_ids, tokens_of(member), 1.0)).max() <= 1e-4
