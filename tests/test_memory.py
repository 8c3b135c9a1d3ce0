"""Memory over a long run: flat in every process, for nothing is kept of what is done."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import psutil
import pytest

import headway
from headway.config import RunConfig

NUM_STEPS, WARM, EVERY = 2000, 200, 20


def resident(engine: headway.Engine) -> dict[str, int]:
    """Bytes of the learner, the generator and its reward worker."""
    found: dict[str, int] = {}
    for child in psutil.Process().children(recursive=True):
        line = child.cmdline()
        if str(engine.run_dir) in line:
            found["learner" if "learner" in line else "generator"] = child.memory_info().rss
            for worker in child.children():
                found["reward worker"] = worker.memory_info().rss
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_is_flat_over_two_thousand_updates_with_journal_and_checkpoints(
    tiny_config: Callable[..., RunConfig],
) -> None:
    config = tiny_config(
        steps=NUM_STEPS, save=False, checkpoint={"interval": 100}, staleness={"max_lag": 2}, batch={"samples": 2},
        sampling={"max_new_tokens": 4},
    )  # fmt: skip
    early: dict[str, list[int]] = {}
    late: dict[str, list[int]] = {}
    with headway.Engine(config) as engine:
        for record in engine:
            if record.step < WARM or record.step % EVERY:
                continue
            seen = early if record.step < 2 * WARM else late
            if seen is early or record.step >= NUM_STEPS - WARM:
                for name, size in resident(engine).items():
                    seen.setdefault(name, []).append(size)
    assert engine.status is not None
    assert engine.status.step == NUM_STEPS
    assert early.keys() == late.keys() == {"learner", "generator", "reward worker"}
    growth = {name: median(late[name]) / median(early[name]) for name in early}
    assert max(growth.values()) < 1.05, growth
