"""Reward functions that fork: the copies of a worker neither answer for it nor hide its death."""

from __future__ import annotations

import time
from pathlib import Path

from headway.envs import Completion, EnvSpec, RewardPool

DEADLINE_S = 20.0
COMPLETION = Completion("", [1], "stop")
FILE = """
import os, time

class Forks:
    num_prompts = None

    def prompt(self, index):
        return ""

    def reward(self, index, completion):
        if index == 0 and os.fork() == 0:
            return 99.0
        if index == 1:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            os._exit(3)
        return float(index)
"""


def test_copies_of_a_worker_neither_answer_nor_hide_its_death(tmp_path: Path) -> None:
    path = tmp_path / "forks.py"
    path.write_text(FILE)
    with RewardPool(EnvSpec(str(path)), 1, DEADLINE_S) as pool:
        pool.submit(0, 0, [COMPLETION, COMPLETION])
        (result,) = pool.wait(DEADLINE_S)
        assert result.rewards == [0.0, 0.0]
        started = time.monotonic()
        pool.submit(1, 1, [COMPLETION])
        (result,) = pool.wait(DEADLINE_S)
        assert result.errors == ["crash: exit status 3"]
        assert time.monotonic() - started < DEADLINE_S / 2
        pool.submit(2, 2, [COMPLETION])
        (result,) = pool.wait(DEADLINE_S)
        assert result.rewards == [2.0]
