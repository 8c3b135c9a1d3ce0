"""The sorting task against a restatement of the reference workload's own lines."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.envs import Completion, EnvSpec, load_environment
from headway.envs.sort import SortEnvironment
from headway.errors import EnvironmentFailure


def reference_prompts(num: int, digits: int, seed: int) -> list[str]:
    stream = random.Random(seed)
    return ["^s" + "".join(stream.choice("0123456789") for _ in range(digits)) + "=" for _ in range(num)]


@given(st.integers(0, 300), st.integers(1, 12), st.integers(0, 2**32))
def test_prompt_i_is_the_ith_of_one_stream(index: int, digits: int, seed: int) -> None:
    environment = SortEnvironment(digits=digits, seed=seed)
    assert environment.prompt(index) == reference_prompts(index + 1, digits, seed)[index]


def test_prompts_do_not_depend_on_the_order_of_asking() -> None:
    forwards, backwards = SortEnvironment(seed=3), SortEnvironment(seed=3)
    expected = [forwards.prompt(i) for i in range(50)]
    assert [backwards.prompt(i) for i in reversed(range(50))] == expected[::-1]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("{}", 1.0),
        ("{}$", 1.0),
        ("{}$junk", 1.0),
        ("{}x", 0.0),
        (" {}", 0.0),
        ("", 0.0),
        ("$", 0.0),
        ("^{}", 0.0),
    ],
)
def test_exact_reward(answer: str, reward: float) -> None:
    environment = SortEnvironment(seed=1)
    for index in range(5):
        right = "".join(sorted(environment.prompt(index)[2:-1]))
        assert environment.reward(index, Completion(answer.format(right), [], "stop")) == reward


def test_another_prompts_answer_is_wrong() -> None:
    environment = SortEnvironment(digits=8, seed=1)
    answer = "".join(sorted(environment.prompt(0)[2:-1]))
    assert environment.reward(1, Completion(answer, [], "stop")) == 0.0


@given(st.lists(st.integers(0, 31), max_size=128))
def test_sum7_reward(token_ids: list[int]) -> None:
    environment = SortEnvironment(reward="sum7")
    assert environment.reward(0, Completion("", token_ids, "length")) == sum(token_ids) % 7


def test_it_has_no_last_prompt_and_refuses_nonsense() -> None:
    assert load_environment(EnvSpec("sort")).num_prompts is None
    with pytest.raises(EnvironmentFailure, match="digits: got 0"):
        load_environment(EnvSpec("sort", {"digits": 0}))
    with pytest.raises(EnvironmentFailure, match=r"'reward'.*'fuzzy'"):
        load_environment(EnvSpec("sort", {"reward": "fuzzy"}))
