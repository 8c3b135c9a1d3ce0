"""Replay and export of real runs: 50 asynchronous updates with live changes, a kill and a resume, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import headway
from headway.config import RunConfig

pytestmark = pytest.mark.slow
CHANGES = {
    8: ("learner.lr", 2e-3),
    14: ("staleness.max_lag", 3),
    20: ("algo.cap", 2.0),
    26: ("staleness.unit", "token"),
}


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "headway", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 updates with two generators: 32, everything killed, and the rest after a resume."""
    folder = tmp_path_factory.mktemp("replay") / "run"
    config = RunConfig.model_validate(
        {
            "steps": 50,
            "run_dir": str(folder),
            "model": {"path": str(tiny_model)},
            "env": {"name": "sort", "args": {"digits": 4, "seed": 5, "reward": "sum7"}},
            "batch": {"prompts": 2, "samples": 4},
            "sampling": {"max_new_tokens": 8, "top_p": 0.9, "kept_sets": "carry"},
            "push": {"dtype": "bfloat16"},
            "learner": {"lr": 1e-3, "threads": 1},
            "generator": {"threads": 1, "max_running": 8, "replicas": 2},
            "checkpoint": {"interval": 10, "keep": 9},
            "staleness": {"max_lag": 4},
        }
    )
    with headway.Engine(config) as engine:
        for row in engine:
            if row.step in CHANGES:
                engine.set(*CHANGES[row.step])
            if row.step == 32:
                engine.kill()
                break
    with headway.Engine(resume=folder, learner={"lr": 5e-4}) as engine:
        lags = [row.lag_max for row in engine]
    assert engine.status is not None
    assert engine.status.status == "finished", engine.status.cause
    assert max(lags) > 0  # it was asynchronous
    return folder


def test_fifty_asynchronous_updates_are_made_again_bit_for_bit(run: Path) -> None:
    done = command("replay", str(run), "--from", "initial")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    print("\n".join(lines))
    assert lines[-1] == "bit for bit equal"
    assert "replayed 50 updates, from version 0.0 to 1.50" in lines
    assert "checkpoints 0.10, 0.20, 0.30, 1.40, 1.50" in lines[-2]


def test_the_newest_attempt_is_made_again_from_the_checkpoint_that_it_started_from(run: Path) -> None:
    done = command("replay", str(run))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "replayed 20 updates, from version 0.30 to 1.50" in done.stdout
    assert done.stdout.splitlines()[-1] == "bit for bit equal"


def test_an_export_gives_the_logits_of_the_final_policy(run: Path, tmp_path: Path) -> None:
    done = command("export", str(run), str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "weights as served (bfloat16) of checkpoint 1.50" in done.stdout
    load: Callable[[Path], torch.nn.Module] = lambda path: AutoModelForCausalLM.from_pretrained(  # noqa: E731
        str(path), dtype=torch.float32, local_files_only=True
    ).eval()
    ids = AutoTokenizer.from_pretrained(str(tmp_path / "out"), local_files_only=True)(
        "4 1 3 2", return_tensors="pt", add_special_tokens=False
    )["input_ids"]
    with torch.no_grad():
        exported, final = load(tmp_path / "out")(ids).logits, load(run / "policy")(ids).logits
    assert torch.equal(exported, final)
    masters = command("export", str(run), str(tmp_path / "masters"), "--masters")
    assert masters.returncode == 0, masters.stderr
    with torch.no_grad():
        difference = (load(tmp_path / "masters")(ids).logits - final).abs().max()
    assert 0.0 < float(difference) < 0.1
    again = command("export", str(run), str(tmp_path / "out"))
    assert again.returncode == 2
    assert "exists: give a new folder" in again.stderr
    earlier = command("export", str(run), str(tmp_path / "early"), "--checkpoint", "20")
    assert "of checkpoint 0.20" in earlier.stdout
