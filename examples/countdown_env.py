"""Countdown, as an example of an environment of one's own: reach a target with all of the given numbers.

    [env]
    name = "examples/countdown_env.py"
    args = { numbers = 3, largest = 9, seed = 0 }

An environment is a class with `num_prompts`, `prompt(index)` and `reward(index, completion)`. It needs no
base class and no import of headway. `prompt` must depend on nothing but the constructor's arguments and the
index: the learner and every reward worker build the class anew. `reward` runs in a worker process, under a
deadline; what it raises is counted as a failure, never as a reward of 0.
"""

from __future__ import annotations

import ast
import operator
import random
from typing import Any

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
SIGNS = "+-*"
FORMAT_REWARD = 0.1


class Countdown:
    """`Numbers: 3 7 2. Target: 23.` is answered by `3 * 7 + 2`.

    Args:
        numbers: how many a problem has.
        largest: none is larger.
        seed: of the problems.
    """

    num_prompts: int | None = None

    def __init__(self, *, numbers: int = 3, largest: int = 9, seed: int = 0) -> None:
        if numbers < 2 or largest < 1:
            raise ValueError(f"numbers: got {numbers}, expected >= 2; largest: got {largest}, expected >= 1")
        self.numbers, self.largest, self.seed = numbers, largest, seed

    def problem(self, index: int) -> tuple[list[int], int]:
        """The numbers and a target that some expression of all of them has."""
        stream = random.Random(f"{self.seed}/{index}")
        numbers = [stream.randint(1, self.largest) for _ in range(self.numbers)]
        solution = str(numbers[0]) + "".join(f" {stream.choice(SIGNS)} {n}" for n in numbers[1:])
        stream.shuffle(numbers)
        return numbers, evaluate(ast.parse(solution, mode="eval").body)[0]

    def prompt(self, index: int) -> str:
        """One line, which the policy continues."""
        numbers, target = self.problem(index)
        return f"Numbers: {' '.join(map(str, numbers))}. Target: {target}. Expression:"

    def reward(self, index: int, completion: Any) -> float:
        """1 for an expression of exactly these numbers that makes the target, 0.1 for another, else 0."""
        numbers, target = self.problem(index)
        text = completion.text.split("\n")[0].split("=")[0].strip()
        try:
            value, used = evaluate(ast.parse(text, mode="eval").body)
        except (SyntaxError, ValueError):
            return 0.0
        return 1.0 if value == target and sorted(used) == sorted(numbers) else FORMAT_REWARD


def evaluate(node: ast.AST) -> tuple[int, list[int]]:
    """The value of an expression of integers, +, - and *, and the integers in it.

    Raises:
        ValueError: it holds anything else.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value, [node.value]
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        (left, left_used), (right, right_used) = evaluate(node.left), evaluate(node.right)
        return OPERATORS[type(node.op)](left, right), left_used + right_used
    raise ValueError(f"not arithmetic: {ast.dump(node)[:60]}")
