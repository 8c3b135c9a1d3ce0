"""Ctrl-C in a script that embeds the engine, twice: nothing is left, and the folder says how the run ended."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

FAKE = Path(__file__).parents[1] / "launch" / "fake_headway.py"

SCRIPT = f"""
import os, signal, sys, threading, time
import headway

signal.signal(signal.SIGINT, signal.default_int_handler)


def again():
    end = time.monotonic() + 20
    while engine._supervisor._stop is None and time.monotonic() < end:  # close has asked the run to end
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGINT)


with headway.Engine(
    None, program=(sys.executable, {str(FAKE)!r}), run_dir="run", steps=5, model={{"path": "none"}},
    env={{"name": "none", "args": {{"learner": "waits", "deaf": True}}}}, checkpoint={{"stop_within_s": 60.0}},
) as engine:
    for step in engine:
        if step.step == 2:
            threading.Thread(target=again, daemon=True).start()
            print("interrupted", flush=True)
            os.kill(os.getpid(), signal.SIGINT)
"""


def test_a_second_ctrl_c_ends_a_run_at_once_and_its_status_is_written(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "interrupted\n"
    began = time.monotonic()
    _, errors = process.communicate(timeout=40)  # the learner does not listen and has 60 s for its checkpoint
    assert time.monotonic() - began < 15.0
    assert "KeyboardInterrupt" in errors
    assert process.returncode != 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["step", "step", "status"]
    assert rows[-1]["status"] == "stopped"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["updates"] == 2
    run_id = json.loads((tmp_path / "run" / "run.json").read_text())["run_id"]
    assert not list(Path("/dev/shm").glob(f"headway-{run_id}-*"))
