"""The order of prompts: passes, shuffles that depend on the seed only, ends, and prompts that come back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.learner.prompts import PromptSource

MakePrompts = Callable[..., PromptSource]


def take(source: PromptSource, count: int) -> list[int]:
    return [prompt.index for prompt in (source.next() for _ in range(count)) if prompt is not None]


def test_a_bounded_set_wraps_and_counts_its_passes(make_prompts: MakePrompts) -> None:
    source = make_prompts(3)
    assert take(source, 8) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert source.passes_done == 2
    assert not source.exhausted


def test_passes_end_it(make_prompts: MakePrompts) -> None:
    source = make_prompts(3, passes=2)
    assert take(source, 10) == [0, 1, 2, 0, 1, 2]
    assert source.exhausted
    assert source.next() is None


def test_an_endless_set_never_wraps(make_prompts: MakePrompts) -> None:
    source = make_prompts(None, passes=1, shuffle=True)
    assert take(source, 5) == [0, 1, 2, 3, 4]
    assert (source.exhausted, source.passes_done) == (False, 0)


def test_a_shuffle_is_a_new_permutation_each_pass_and_repeats_with_the_seed(
    make_prompts: MakePrompts,
) -> None:
    order = take(make_prompts(20, shuffle=True, seed=4), 60)
    passes = [order[:20], order[20:40], order[40:]]
    assert all(sorted(each) == list(range(20)) for each in passes)
    assert passes[0] != passes[1] != passes[2] != list(range(20))
    assert take(make_prompts(20, shuffle=True, seed=4), 60) == order
    assert take(make_prompts(20, shuffle=True, seed=5), 60) != order


def test_the_text_is_encoded(make_prompts: MakePrompts) -> None:
    source = make_prompts(None)
    source.cursor = 407
    prompt = source.next()
    assert prompt is not None
    assert (prompt.index, prompt.token_ids) == (407, [7, 3, 10])


@pytest.mark.parametrize("shuffle", [False, True])
@given(losses=st.lists(st.booleans(), max_size=40))
def test_every_prompt_is_served_once_a_pass_whatever_comes_back(
    make_prompts: MakePrompts, shuffle: bool, losses: list[bool]
) -> None:
    source = make_prompts(7, passes=2, shuffle=shuffle, seed=1)
    kept: list[int] = []
    fates = iter(losses)
    while (prompt := source.next()) is not None:
        if next(fates, False):
            source.give_back(prompt)
            assert not source.exhausted
        else:
            kept.append(prompt.index)
    assert source.exhausted
    assert sorted(kept) == sorted([*range(7)] * 2)
