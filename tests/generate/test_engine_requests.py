"""Requests: what can never be served is refused with its reason, aborts free everything, any schedule balances."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.generate import FinishedMember, GroupRequest, TorchEngine, Unservable
from headway.types import DropReason

CONTEXT = 64
Finish = Callable[..., dict[tuple[int, int], FinishedMember]]
RequestOf = Callable[..., GroupRequest]


def num_free(engine: TorchEngine) -> int:
    return engine._regions.num_free


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt": [3] * (CONTEXT + 1)}, DropReason.PROMPT_TOO_LONG),
        ({"prompt": [3] * CONTEXT}, DropReason.PROMPT_TOO_LONG),
        ({"prompt": [3] * CONTEXT, "budget": 1}, DropReason.PROMPT_TOO_LONG),
        ({"prompt": [3] * (CONTEXT - 4), "budget": 5}, DropReason.PROMPT_TOO_LONG),
        ({"prompt": []}, DropReason.PROMPT_EMPTY),
        ({"prompt": [], "budget": 0}, DropReason.PROMPT_EMPTY),
        ({"budget": 0}, DropReason.NO_BUDGET),
        ({"budget": -3}, DropReason.NO_BUDGET),
        ({"prompt": [3, 48]}, DropReason.INVALID),
        ({"prompt": [3, -1]}, DropReason.INVALID),
        ({"members": 9}, DropReason.PROMPT_TOO_LONG),  # more than max_running
        ({"members": 8, "budget": 60, "prompt": [3]}, DropReason.PROMPT_TOO_LONG),  # more than the pool
    ],
    ids=str,
)
def test_what_can_never_be_served_is_refused_and_the_run_goes_on(
    versions: Any,
    oracle: Any,
    request_of: RequestOf,
    finish: Finish,
    change: dict[str, Any],
    reason: DropReason,
) -> None:
    engine = versions.engine(max_running=8, kv_tokens=200)
    good = request_of(1, prompt=4, members=3, budget=6)
    engine.add(good)
    engine.step()
    with pytest.raises(Unservable, match="request 7") as caught:
        engine.add(request_of(7, **change))
    assert caught.value.reason is reason
    assert engine.num_waiting == 0
    for member in finish(engine).values():
        expected = oracle.fresh(good.prompt_ids, member.token_ids.tolist(), 1.0)
        assert np.abs(member.logprobs - expected).max() <= 1e-5
    assert num_free(engine) == 200


def test_an_id_that_is_in_the_engine_is_refused_and_its_group_goes_on(
    versions: Any, request_of: RequestOf, finish: Finish
) -> None:
    """Rows, regions and seeds are found by it: a second group of one id would free the first one's memory."""
    alone = finish_alone(versions, request_of, finish)
    engine = versions.engine(max_running=2)
    for request_id in (1, 2):
        engine.add(request_of(request_id, members=2, budget=6))
    engine.step()  # 1 runs, 2 waits
    for request_id in (1, 2):
        with pytest.raises(ValueError, match=f"request {request_id} is in the engine already"):
            engine.add(request_of(request_id, members=2, budget=6))
    assert engine.num_waiting == 2
    together = finish(engine)
    assert {key: member.token_ids.tolist() for key, member in together.items()} == alone
    assert num_free(engine) == engine._regions.num_tokens
    engine.add(request_of(1, members=2, budget=6))  # it is free again
    again = {key: member.token_ids.tolist() for key, member in finish(engine).items()}
    assert again == {key: tokens for key, tokens in alone.items() if key[0] == 1}


def finish_alone(versions: Any, request_of: RequestOf, finish: Finish) -> dict[tuple[int, int], list[int]]:
    tokens: dict[tuple[int, int], list[int]] = {}
    for request_id in (1, 2):
        engine = versions.engine(max_running=2)
        engine.add(request_of(request_id, members=2, budget=6))
        tokens |= {key: member.token_ids.tolist() for key, member in finish(engine).items()}
    return tokens


def test_prompt_and_budget_that_fill_the_context_exactly_are_served(
    versions: Any, oracle: Any, request_of: RequestOf, finish: Finish
) -> None:
    engine = versions.engine()
    request = request_of(0, prompt=CONTEXT - 4, budget=4)
    engine.add(request)
    member = finish(engine)[0, 0]
    assert len(member.token_ids) == 4
    expected = oracle.fresh(request.prompt_ids, member.token_ids.tolist(), 1.0)
    assert np.abs(member.logprobs - expected).max() <= 1e-5


def test_aborts_at_any_stage_free_the_regions_and_leave_the_others_alone(
    versions: Any, oracle: Any, request_of: RequestOf, finish: Finish
) -> None:
    engine = versions.engine(kv_tokens=130, prefill_tokens=5, max_running=8)
    first = request_of(0, prompt=4, members=2, budget=10)
    for request in (
        first,
        request_of(1, prompt=30, members=2, budget=20),
        request_of(2, prompt=8, members=4),
    ):
        engine.add(request)
    done = engine.step()
    assert engine.num_waiting == 4  # request 2
    assert engine.abort(1) == 0  # in the middle of its prompt
    assert engine.abort(2) == 0  # not yet admitted
    assert (engine.num_waiting, engine.num_running) == (0, 2)
    engine.add(request_of(3, prompt=6, members=3, budget=5))
    done += engine.step()
    done += engine.step()
    done += engine.step()
    assert engine.abort(3) > 0  # while decoding
    assert engine.abort(3) == 0
    assert engine.abort(99) == 0
    assert num_free(engine) == 130 - 4 - 2 * 10
    results = {(m.request_id, m.member): m for m in done} | finish(engine)
    assert {key[0] for key in results} == {0}
    for member in results.values():
        expected = oracle.fresh(first.prompt_ids, member.token_ids.tolist(), 1.0)
        assert np.abs(member.logprobs - expected).max() <= 1e-5
    assert num_free(engine) == 130


def test_members_that_ended_before_the_abort_are_not_lost_twice(
    versions: Any, request_of: RequestOf, finish: Finish
) -> None:
    engine = versions.engine(kv_tokens=400)
    engine.add(
        request_of(0, prompt=4, members=12, budget=20, temperature=2.0, stop_ids=list(range(0, 48, 6)))
    )
    done: list[FinishedMember] = []
    while not done:
        done += engine.step()
    assert engine.num_running == 12 - len(done) > 0
    lost = engine.abort(0)
    assert engine.num_sampled == lost + sum(len(member.token_ids) for member in done)
    assert num_free(engine) == 400


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 12), st.integers(1, 4), st.integers(1, 8)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.integers(0, 11)),
        st.tuples(st.just("push"), st.integers(0, 3)),
    ),
    max_size=24,
)


@settings(max_examples=25, deadline=None)
@given(actions=ACTIONS, kv=st.sampled_from(["keep", "recompute"]))
def test_any_schedule_ends_every_member_once_and_frees_the_pool(
    versions: Any, request_of: RequestOf, finish: Finish, actions: list[tuple[Any, ...]], kv: str
) -> None:
    engine = versions.engine(kv_tokens=64, max_running=6, prefill_tokens=5, kv=kv)
    owed: set[tuple[int, int]] = set()
    done: dict[tuple[int, int], FinishedMember] = {}
    lost = pushes = added = 0

    def take(finished: list[FinishedMember]) -> None:
        for member in finished:
            owed.remove((member.request_id, member.member))
            done[member.request_id, member.member] = member

    for kind, *values in actions:
        if kind == "add":
            prompt, members, budget = values
            engine.add(request_of(added, prompt=prompt, members=members, budget=budget, stop_ids=[5, 6, 7]))
            owed |= {(added, member) for member in range(members)}
            added += 1
        elif kind == "step":
            for _ in range(values[0]):
                take(engine.step())
        elif kind == "abort":
            lost += engine.abort(values[0])
            owed -= {key for key in owed if key[0] == values[0]}
        else:
            pushes += 1
            versions.push(engine, values[0], step=pushes)
    take(list(finish(engine).values()))
    assert not owed
    assert engine.num_sampled == lost + sum(len(member.token_ids) for member in done.values())
    assert num_free(engine) == 64
    for member in done.values():
        edges = [(span.start, span.end) for span in member.spans]
        assert [end for _, end in edges[:-1]] == [start for start, _ in edges[1:]]
        assert edges[-1][1] - edges[0][0] == len(member.token_ids) == len(member.logprobs)
        assert np.isfinite(member.logprobs).all()


def test_members_that_are_held_elsewhere_are_not_sampled_and_the_others_draw_as_ever(
    versions: Any, request_of: RequestOf, finish: Finish
) -> None:
    whole, engine = versions.engine(), versions.engine()
    request = request_of(1, prompt=5, members=4, budget=6)
    whole.add(request)
    everything = finish(whole)
    free = num_free(engine)
    engine.add(dataclasses.replace(request, held=frozenset({0, 2})))
    assert engine.num_waiting == 2
    some = finish(engine)
    assert sorted(some) == [(1, 1), (1, 3)]
    for key, member in some.items():
        np.testing.assert_array_equal(member.token_ids, everything[key].token_ids)
    assert num_free(engine) == free
