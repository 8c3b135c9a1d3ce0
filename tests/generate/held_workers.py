"""A process with a vLLM engine of two workers that never stops stepping: `python held_workers.py FOLDER`.

Prints one line once it steps: the workers' process ids.
"""

from __future__ import annotations

import sys
from pathlib import Path

from headway.generate import GroupRequest
from headway.generate.vllm import open_vllm
from headway.generate.vllm.start import Sizes
from headway.types import PolicyVersion, Sampling


def step_for_ever(folder: Path) -> None:
    """See the module's docstring."""
    engine = open_vllm(
        folder,
        published_dtype="float32",
        sizes=Sizes(8, 0, 512),
        kv="keep",
        options={"tensor_parallel_size": 2},
        decode=str,
    )
    engine.apply(lambda flat: (flat.fill_(0.01), PolicyVersion(0, 0))[1])
    number = 0
    while True:
        if not engine.num_running:
            engine.add(GroupRequest(number, [3, 4, 5], 4, Sampling(1.0, 40, []), number))
            number += 1
        engine.step()
        if engine.num_sampled == 8:
            assert engine._workers is not None
            print(*engine._workers.pids, flush=True)


if __name__ == "__main__":
    step_for_ever(Path(sys.argv[1]))
