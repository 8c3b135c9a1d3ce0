"""Whole runs with adapters: they learn, pushes hold the adapters alone, and what is saved is what was served."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import headway
from headway.checkpoint.resume import Resumed, resume_run
from headway.config import RunConfig
from headway.engine import start_run
from headway.errors import ConfigError
from headway.learner.export import export
from headway.model import Lora, load_policy
from headway.model.builtin import builtin_folder
from headway.serial.run import SerialRun

RECIPE: dict[str, Any] = {
    "model": {"path": "builtin:sort5", "lora": {"rank": 8}},
    "env": {"name": "sort", "args": {"digits": 5, "seed": 42}},
    "batch": {"prompts": 8, "samples": 16},
    "sampling": {"max_new_tokens": 8},
    "learner": {"lr": 1e-3, "threads": 1},
    "generator": {"threads": 1},
    "staleness": {"max_lag": 2},
    "checkpoint": {"interval": 10},
}


def test_an_asynchronous_run_learns_with_adapters_and_leaves_its_base(tmp_path: Path) -> None:
    with headway.Engine(None, run_dir=str(tmp_path / "run"), steps=25, **RECIPE) as engine:
        records = list(engine)
    assert engine.status is not None
    assert engine.status.status == "finished", engine.status.cause
    assert len(records) == 25
    assert max(record.lag_max for record in records) > 0
    first, last = (sum(record.reward for record in part) / 5 for part in (records[:5], records[-5:]))
    assert last > first + 0.1
    folder = builtin_folder("sort5")
    policy = load_policy(folder, with_grad=False, lora=Lora(8, 32.0))
    assert policy.manifest.num_bytes < 0.12 * 4 * sum(p.numel() for p in policy.module.parameters())
    assert 0 < max(record.push_bytes for record in records) <= policy.manifest.num_bytes + 4096
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "run" / "policy"))
    assert before.keys() == after.keys()
    adapted = {f"{name}.weight" for name in policy.adapters.layers} if policy.adapters else set()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == (name not in adapted), name


def play(started: Resumed, most: int) -> Any:
    """Make at most so many updates on one thread, each with a checkpoint; returns the policy."""
    run = SerialRun(started.config, folder=started.folder, attempt=started.attempt)
    for row in itertools.islice(run.steps(), most):
        assert run.checkpoints.save_last(row.step, stopped=False)
    run.close()
    started.lock.release()
    return run.parts.policy


@pytest.fixture
def asked(tiny_config: Callable[..., RunConfig]) -> Callable[[Path], RunConfig]:
    return lambda folder: tiny_config(
        run_dir=str(folder),
        model={"lora": {"rank": 4, "alpha": 6.0}},
        push={"dtype": "bfloat16"},
        learner={"lr": 1e-2},
        staleness={"max_lag": 0},
        checkpoint={"interval": 2, "keep": 9},
    )


def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(
    asked: Callable[[Path], RunConfig], tmp_path: Path
) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    play(start_run(asked(straight)), 4)
    play(start_run(asked(stopped)), 2)
    with pytest.raises(ConfigError, match=r"model\.lora\.alpha.*6\.0 cannot become 8\.0"):
        resume_run(stopped, {"model.lora.alpha": 8.0})
    play(resume_run(stopped, {}), 4)
    one, other = straight / "checkpoints" / "0.4", stopped / "checkpoints" / "1.4"
    for name in ("model.safetensors", "optimizer.safetensors", "rng.msgpack"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    names = load_file(one / "model.safetensors").keys()
    assert all(".lora_" in name for name in names)
    assert len(names) == 2 * 7 * 4


def test_an_export_is_what_was_served_merged_and_as_an_adapter(
    asked: Callable[[Path], RunConfig], tmp_path: Path
) -> None:
    served = play(start_run(asked(tmp_path / "run")), 4)
    export(tmp_path / "run", tmp_path / "out")
    ids = torch.tensor([[4, 9, 5, 7]])
    served.module.set_attn_implementation("eager")
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(str(tmp_path / "out")).eval()
        assert (plain(input_ids=ids).logits - served.module(input_ids=ids).logits).abs().max() <= 1e-5
    tensors = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == len(served.manifest.tensors)
    for spec in served.manifest.tensors:
        values = served.flat[spec.offset : spec.offset + spec.size].view(spec.shape)
        assert torch.equal(tensors[f"base_model.model.{spec.name}"], values)
        assert values.any()
