"""A learner and a generator without a model: what a supervisor sees of them, and every way they can end.

    python fake_headway.py learner --run DIR --control ENDPOINT
    python fake_headway.py generator --run DIR --connect ENDPOINTS --index I

env.args of the recipe says how they behave: `learner` names a method of FakeLearner, `generator` a case
below. A generator leaves a file DIR/generator-I.PID when it starts, which the learner counts, and ends when
it sees DIR/over. It imports nothing of headway, so that it starts quickly.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
import tomllib
from pathlib import Path


def argument(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def generate() -> int:
    folder, index = Path(argument("--run")), argument("--index")
    behaviour = (
        tomllib.loads((folder / "config.toml").read_text())["env"].get("args", {}).get("generator", "")
    )
    first = not list(folder.glob(f"generator-{index}.*"))
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM"):
        print(name, os.environ[name], flush=True)
    (folder / f"generator-{index}.{os.getpid()}").touch()
    if behaviour == "is_wrong":
        print("headway: ConfigError: env.name: no such data set", flush=True)
        return 2
    if behaviour == "always_dies" or (behaviour == "dies_once" and first):
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "freezes_once" and first:
        os.kill(os.getpid(), signal.SIGSTOP)
    if behaviour == "leaves_once" and first:
        return 0
    end_s = time.monotonic() + 60
    while not (folder / "over").exists() and time.monotonic() < end_s:
        time.sleep(0.02)
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "learner":
        runpy.run_path(str(Path(__file__).with_name("fake_learner.py")), run_name="__main__")
    else:
        sys.exit(generate())
