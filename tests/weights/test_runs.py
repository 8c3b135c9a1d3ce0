"""Whole runs of the demo recipe, each over another weight channel: real processes, two generators."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headway.weights.segment import shared_directory

pytestmark = pytest.mark.slow
RECIPE = Path(__file__).parents[2] / "examples" / "sort.toml"
STEPS = 8

WAYS = {
    "auto": ("auto", "shm"),
    "shm copy": ("shm", "shm", "--push.apply", "copy"),
    "shm double": ("shm", "shm", "--push.apply", "double", "--push.dtype", "bfloat16"),
    "tcp": ("tcp", "tcp"),
    "tcp chain": (
        "tcp",
        "tcp",
        "--push.fan_out",
        "1",
        "--push.compression",
        "zstd",
        "--push.dtype",
        "bfloat16",
    ),
    "tcp double": ("tcp", "tcp", "--push.apply", "double"),
    "store": ("store", "store"),
    "collective": ("collective", "collective"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.timeout(500)  # the first one may have to make the demo's model
def test_the_demo_runs_over_every_channel_and_says_which(way: str, tmp_path: Path) -> None:
    channel, picked, *keys = WAYS[way]
    run = tmp_path / "run"
    words = [
        str(RECIPE), "--run_dir", str(run), "--steps", str(STEPS), "--generator.replicas", "2",
        "--push.channel", channel, "--push.store", str(tmp_path / "store") if channel == "store" else "", *keys,
    ]  # fmt: skip
    command = [sys.executable, "-P", "-m", "headway", "run", *words, "--view", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=480, check=False)
    assert done.returncode == 0, done.stderr
    logs = "".join(path.read_text() for path in run.rglob("*.log"))
    assert f"weights are pushed over {picked}: " in logs
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in steps if row["kind"] == "step"]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["push_bytes"] > 0 for row in rows)
    assert all(row["changed_share"] > 0 for row in rows)
    assert "did not get through" not in logs
    run_id = json.loads((run / "run.json").read_text())["run_id"]
    assert not list(shared_directory().glob(f"headway-{run_id}-*"))
