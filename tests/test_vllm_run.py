"""Whole runs with vLLM as the generator: real processes, vLLM's CPU build, the builtin sort model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.live import one

import headway

DEADLINE_S = 120.0
RECIPE: dict[str, Any] = {
    "model": {"path": "builtin:sort5"},
    "env": {"name": "sort", "args": {"digits": 5, "seed": 42}},
    "seed": 42,
    "batch": {"prompts": 8, "samples": 16},
    "sampling": {"max_new_tokens": 8},
    "learner": {"lr": 1e-4, "warmup_steps": 10},
    "staleness": {"max_lag": 4},
}
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vllm is not installed here; `make test-vllm` runs these",
    ),
    pytest.mark.timeout(280),
]


def run(tmp_path: Path, name: str, **sections: Any) -> list[Any]:
    with headway.Engine(None, run_dir=str(tmp_path / name), steps=60, **RECIPE, **sections) as engine:
        return list(engine)


def test_vllm_learns_what_the_embedded_engine_learns_within_the_lag(tmp_path: Path) -> None:
    rewards: dict[str, float] = {}
    for name in ("torch", "vllm"):
        records = run(tmp_path, name, generator={"engine": name})
        assert len(records) == 60
        assert max(record.lag_max for record in records) <= 4
        assert all(record.ess > 0.9 for record in records)
        assert records[0].start_check["tokens"] > 0
        assert records[0].start_check["max_log_ratio"] < 1e-3
        rewards[name] = sum(record.reward for record in records[-10:]) / 10
        first = sum(record.reward for record in records[:10]) / 10
        assert rewards[name] > first + 0.15
    assert abs(rewards["vllm"] - rewards["torch"]) < 0.12


def test_vllm_learns_with_adapters_and_a_push_holds_these_alone(tmp_path: Path) -> None:
    sections = {**RECIPE, "model": {"path": "builtin:sort5", "lora": {"rank": 8}}, "learner": {"lr": 1e-3}}
    with headway.Engine(
        None, run_dir=str(tmp_path / "run"), steps=25, generator={"engine": "vllm"}, **sections
    ) as engine:
        records = list(engine)
    assert len(records) == 25
    assert records[0].start_check["max_log_ratio"] < 1e-3
    assert max(record.lag_max for record in records) <= 4
    assert all(record.ess > 0.5 for record in records), [record.ess for record in records]
    num_adapters = 4 * 8 * (2 * 256 + 2 * 192 + 3 * 512)  # layers, rank, in + out of each matrix
    assert 0 < max(record.push_bytes for record in records) <= 4 * num_adapters + 4096
    first, last = (sum(record.reward for record in part) / 5 for part in (records[:5], records[-5:]))
    assert last > first + 0.1


def test_top_p_with_kept_sets_has_ratios_of_one_on_a_frozen_policy(tmp_path: Path) -> None:
    sections = {**RECIPE, "sampling": {"max_new_tokens": 8, "top_p": 0.8, "kept_sets": "carry"}}
    sections["learner"] = {"lr": 1e-9}  # as good as frozen; pushes that change nothing would end the run
    with headway.Engine(
        None, run_dir=str(tmp_path / "run"), steps=8, generator={"engine": "vllm"}, **sections
    ) as engine:
        records = list(engine)
    assert len(records) == 8
    for record in records:
        assert record.ratio_mean == pytest.approx(1.0, abs=1e-3)  # 0.01 is asked for
        assert record.ratio_max == pytest.approx(1.0, abs=1e-2)
    assert records[0].start_check["max_log_ratio"] < 1e-3


def check_conserved(records: list[Any], steps: int) -> None:
    """All updates were made, every ticket is accounted for, each was trained once."""
    assert [record.step for record in records] == list(range(1, steps + 1))
    counts = records[-1].tickets
    assert (
        counts["issued"] == counts["trained"] + counts["dropped"] + counts["in_flight"] + counts["buffered"]
    )
    assert counts["trained"] == steps * 8
    assert max(record.lag_max for record in records) <= 4


def test_a_vllm_generator_killed_in_the_middle_of_a_push_is_replaced_and_gets_the_whole_state(
    tmp_path: Path,
) -> None:
    program = (sys.executable, "-P", str(Path(__file__).with_name("killed_in_push.py")), str(tmp_path))
    sections = {**RECIPE, "sampling": {"max_new_tokens": 24, "ignore_eos": True}}
    with headway.Engine(
        None,
        run_dir=str(tmp_path / "run"),
        steps=10,
        generator={"engine": "vllm"},
        stream={"heartbeat_s": 1.0},
        program=program,
        **sections,
    ) as engine:
        records = list(engine)
    assert (tmp_path / "killed").exists(), "nothing was killed"
    check_conserved(records, 10)
    staged = [line.split() for line in (tmp_path / "staged").read_text().splitlines()]
    first, second = list(dict.fromkeys(pid for pid, _, _ in staged))
    before, after = ([words[1:] for words in staged if words[0] == pid] for pid in (first, second))
    assert (tmp_path / "killed").read_text() in [version for _, version in before]
    assert after[0][0] == "WHOLE", "a newcomer knows no base"
    assert len(after) > 1, "and the pushes go on"


def test_a_killed_worker_of_two_takes_its_generator_along_and_nothing_is_lost(tmp_path: Path) -> None:
    sections = {**RECIPE, "sampling": {"max_new_tokens": 24, "ignore_eos": True}}
    with headway.Engine(
        None,
        run_dir=str(tmp_path / "run"),
        steps=6,
        generator={"engine": "vllm", "vllm": {"tensor_parallel_size": 2}},
        push={"kv": "recompute"},
        stream={"heartbeat_s": 1.0},
        **sections,
    ) as engine:
        records: list[Any] = []
        for record in engine:
            records.append(record)
            if len(records) == 2:  # with requests in flight, and pushes on their way
                workers = one(engine, "generator", DEADLINE_S).children()
                spawned = [each for each in workers if "--multiprocessing-fork" in each.cmdline()]
                assert len(spawned) == 2
                spawned[1].kill()
    check_conserved(records, 6)
    _, alive = psutil.wait_procs(spawned, timeout=10.0)
    assert not alive
    log = (tmp_path / "run" / "logs" / "generator-0.log").read_text()
    assert f"vLLM's worker 1 (process {spawned[1].pid}) has ended" in log
    assert records[0].start_check["max_log_ratio"] < 1e-3
