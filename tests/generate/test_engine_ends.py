"""How sequences end: stop ids, stop strings, budget, non-finite logits; what is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headway.generate import FinishedMember, GroupRequest
from headway.types import FinishReason, PolicyVersion

LETTERS = "_^$0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOP"
Finish = Callable[..., dict[tuple[int, int], FinishedMember]]
RequestOf = Callable[..., GroupRequest]


@pytest.fixture(scope="module")
def free_run(versions: Any, request_of: RequestOf, finish: Finish) -> Callable[..., list[int]]:
    """The tokens that member 0 samples when nothing stops it."""

    def run(budget: int = 24) -> list[int]:
        engine = versions.engine()
        engine.add(request_of(0, prompt=5, budget=budget))
        return finish(engine)[0, 0].token_ids.tolist()

    return run


@pytest.mark.parametrize("which", [0, 3, 7])
def test_any_of_several_stop_ids_ends_a_member_and_is_kept_with_its_logprob(
    versions: Any,
    oracle: Any,
    request_of: RequestOf,
    finish: Finish,
    free_run: Callable[..., list[int]],
    which: int,
) -> None:
    tokens = free_run()
    stop = tokens[which]
    end = tokens.index(stop) + 1
    unused = next(token for token in range(48) if token not in tokens)
    engine = versions.engine()
    request = request_of(0, prompt=5, budget=24, stop_ids=[unused, stop])  # a secondary EOS
    engine.add(request)
    member = finish(engine)[0, 0]
    assert member.finish_reason is FinishReason.STOP
    assert member.token_ids.tolist() == tokens[:end]
    assert len(member.logprobs) == end
    assert np.abs(member.logprobs - oracle.fresh(request.prompt_ids, tokens[:end], 1.0)).max() <= 1e-5
    assert member.spans[-1].end == 5 + end


def test_a_pad_id_that_is_also_the_eos_is_an_ordinary_stop(
    versions: Any, request_of: RequestOf, finish: Finish
) -> None:
    # Only token 0 (the pad) stops; it is likely enough to end some of the members within the budget.
    engine = versions.engine()
    engine.add(request_of(0, prompt=5, members=64, budget=40, temperature=3.0, stop_ids=[0]))
    ends = finish(engine).values()
    stopped = [member for member in ends if member.finish_reason is FinishReason.STOP]
    assert 0 < len(stopped) < 64
    for member in ends:
        assert (member.token_ids[-1] == 0) == (member.finish_reason is FinishReason.STOP)
        assert (member.token_ids[:-1] != 0).all()
        assert member.logprobs[-1] < 0
        assert len(member.token_ids) == 40 or member.finish_reason is FinishReason.STOP


def test_a_stop_on_the_last_token_of_the_budget_is_a_stop(
    versions: Any, request_of: RequestOf, finish: Finish, free_run: Callable[..., list[int]]
) -> None:
    tokens = free_run()
    end = tokens.index(tokens[6]) + 1
    for budget, reason in ((end, FinishReason.STOP), (end - 1, FinishReason.LENGTH)):
        engine = versions.engine()
        engine.add(request_of(0, prompt=5, budget=budget, stop_ids=[tokens[6]]))
        member = finish(engine)[0, 0]
        assert (member.finish_reason, len(member.token_ids)) == (reason, budget)


def test_a_stop_string_ends_a_member_when_its_text_contains_it(
    versions: Any, request_of: RequestOf, finish: Finish, free_run: Callable[..., list[int]]
) -> None:
    text = "".join(LETTERS[token] for token in free_run())
    string = text[8:11]  # spans three tokens
    end = text.index(string) + len(string)
    engine = versions.engine()
    engine.add(request_of(0, prompt=5, budget=24, stop_strings=["never", string]))
    engine.add(request_of(1, prompt=5, budget=24))
    done = finish(engine)
    assert done[0, 0].finish_reason is FinishReason.STOP
    assert len(done[0, 0].token_ids) == end
    assert done[1, 0].finish_reason is FinishReason.LENGTH


def test_the_prompt_does_not_count_for_stop_strings(
    versions: Any, request_of: RequestOf, finish: Finish
) -> None:
    engine = versions.engine()
    prompt = request_of(0, prompt=5).prompt_ids
    string = "".join(LETTERS[token] for token in prompt)
    engine.add(request_of(0, prompt=prompt, budget=3, stop_strings=[string]))
    assert finish(engine)[0, 0].finish_reason is FinishReason.LENGTH


def test_ignore_eos_runs_to_the_budget(
    versions: Any, request_of: RequestOf, finish: Finish, free_run: Callable[..., list[int]]
) -> None:
    tokens = free_run()
    letters = [LETTERS[token] for token in tokens]
    engine = versions.engine()
    engine.add(request_of(0, prompt=5, budget=24, stop_ids=tokens, stop_strings=letters, ignore_eos=True))
    member = finish(engine)[0, 0]
    assert member.token_ids.tolist() == tokens
    assert member.finish_reason is FinishReason.LENGTH


def test_stop_ids_outside_the_vocabulary_never_stop(
    versions: Any, request_of: RequestOf, finish: Finish
) -> None:
    engine = versions.engine()
    engine.add(request_of(0, prompt=5, budget=4, stop_ids=[48, 100_000, -1]))
    assert finish(engine)[0, 0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("stops", [{}, {"stop_strings": ["zzz"]}, {"stop_ids": [0]}], ids=str)
def test_logits_that_are_not_finite_end_a_member_as_an_error(
    versions: Any, request_of: RequestOf, finish: Finish, stops: dict[str, Any]
) -> None:
    engine = versions.engine()
    engine.add(request_of(0, prompt=5, members=3, budget=8, **stops))
    engine.step()
    sampled = engine.num_sampled

    def poison(flat: torch.Tensor) -> PolicyVersion:
        flat.fill_(float("nan"))
        return PolicyVersion(0, 1)

    engine.apply(poison)
    done = finish(engine)
    assert len(done) == 3
    for member in done.values():
        assert member.finish_reason is FinishReason.ERROR
        assert len(member.token_ids) == 2
        assert member.token_ids[-1] == -1
        assert np.isnan(member.logprobs[-1])
        assert np.isfinite(member.logprobs[0])
    assert engine.num_sampled == sampled + 3
    versions.push(engine, 0, step=2)  # good weights again: the engine goes on
    engine.add(request_of(1, prompt=5, budget=4))
    assert finish(engine)[1, 0].finish_reason is FinishReason.LENGTH


def test_num_sampled_counts_every_token_of_finished_and_aborted_members(
    versions: Any, request_of: RequestOf, finish: Finish
) -> None:
    engine = versions.engine(prefill_tokens=4)
    for number in range(6):
        engine.add(request_of(number, prompt=3 + number, members=2, budget=6, stop_ids=[number]))
    done: list[FinishedMember] = []
    for _ in range(4):
        done += engine.step()
    lost = engine.abort(2) + engine.abort(5)
    assert lost > 0
    done += finish(engine).values()
    assert engine.num_sampled == lost + sum(len(member.token_ids) for member in done)
