"""The example of a user's own environment, loaded and scored as a run does it."""

from __future__ import annotations

from itertools import permutations, product
from pathlib import Path

import pytest

from headway.envs import Completion, EnvSpec, RewardPool, load_environment
from headway.errors import EnvironmentFailure

FILE = str(Path(__file__).resolve().parents[2] / "examples" / "countdown_env.py")
SPEC = EnvSpec(FILE, {"numbers": 3, "seed": 1})


def solve(numbers: list[str], target: int) -> str:
    """Brute force over the orders and the signs."""
    for order in permutations(numbers):
        for first, second in product("+-*", repeat=2):
            text = f"{order[0]} {first} {order[1]} {second} {order[2]}"
            if eval(text) == target:
                return text
    raise AssertionError(f"{numbers} cannot make {target}")


def parse(prompt: str) -> tuple[list[str], int]:
    numbers, target = prompt.removeprefix("Numbers: ").removesuffix(". Expression:").split(". Target: ")
    return numbers.split(), int(target)


def test_every_problem_is_solvable_and_scored_through_a_pool() -> None:
    environment = load_environment(SPEC)
    with RewardPool(SPEC, 1, 30.0) as pool:
        for index in range(20):
            prompt = environment.prompt(index)
            assert isinstance(prompt, str)
            numbers, target = parse(prompt)
            right = solve(numbers, target)
            texts = [right, f"{right} = {target}\nmore", f"{abs(target)}", "1 +", "__import__('os')", ""]
            pool.submit(index, index, [Completion(text, [], "stop") for text in texts])
        results = []
        while len(results) < 20:
            results += pool.wait(30.0)
    for result in results:
        assert result.rewards == [1.0, 1.0, 0.1, 0.0, 0.0, 0.0]


def test_bad_arguments_are_reported() -> None:
    with pytest.raises(EnvironmentFailure, match="numbers: got 1"):
        load_environment(EnvSpec(FILE, {"numbers": 1}))
    with pytest.raises(EnvironmentFailure, match="'number'; did you mean 'numbers'"):
        load_environment(EnvSpec(FILE, {"number": 1}))
