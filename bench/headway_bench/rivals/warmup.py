"""Makes the checkpoint that every contestant starts from: `python -m headway_bench.rivals.warmup FOLDER`.

Run by the bench in the headway environment, once; the folder appears only when it is whole.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch

from headway_bench.rivals.task import make_checkpoint

# The reward must leave room to learn, and it must not be zero: RL needs right answers to choose from.
LEAST_REWARD, MOST_REWARD = 0.05, 0.30


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.folder.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=given.folder.parent) as scratch:
        made = Path(scratch) / "checkpoint"
        reward = make_checkpoint(made, steps=given.steps, seed=given.seed)
        record = {"steps": given.steps, "seed": given.seed, "sampled_reward": reward}
        (made / "warmup.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
        if not LEAST_REWARD <= reward <= MOST_REWARD:
            print(
                f"warm-up ended at a sampled reward of {reward:.3f}, expected {LEAST_REWARD} to {MOST_REWARD}"
            )
            return 1
        try:
            os.replace(made, given.folder)
        except OSError:
            # Another bench may have made the same checkpoint meanwhile; a full folder is never replaced.
            if not (given.folder / "model.safetensors").exists():
                raise
    print(f"made {given.folder} in {time.perf_counter() - began:.0f} s, sampled reward {reward:.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
