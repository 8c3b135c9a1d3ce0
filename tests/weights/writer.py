"""A publisher in a process of its own: `writer.py SEGMENT hammer` or `writer.py SEGMENT torn`.

hammer: publishes versions whose elements all equal the step, as fast as it can, until its standard input ends.
torn:   publishes 1, then stops in the middle of writing 2, and says so, to be killed there.
"""

from __future__ import annotations

import select
import sys

import torch

from headway.types import Manifest, PolicyVersion, TensorSpec
from headway.weights import ShmPublisher, shm, weights_digest

NUM_ELEMENTS = 20_000


def manifest() -> Manifest:
    return Manifest(
        "float32", [TensorSpec("a", [], [NUM_ELEMENTS], 0, NUM_ELEMENTS, True)], NUM_ELEMENTS, 0, {}
    )


def main(name: str, mode: str) -> None:
    torch.set_num_threads(1)
    publisher = ShmPublisher(name, manifest())
    flat = torch.full((NUM_ELEMENTS,), 1.0)
    publisher.publish(flat, PolicyVersion(0, 1))
    if mode == "torn":

        def stuck(published: torch.Tensor) -> str:
            """The bytes are half written, the slot's number is odd."""
            published[NUM_ELEMENTS // 2 :] = 1.0
            print("torn", flush=True)
            sys.stdin.read()
            return weights_digest(published)

        shm.weights_digest = stuck
        publisher.publish(flat.fill_(2.0), PolicyVersion(0, 2))
        return
    print("ready", flush=True)
    step = 1
    while not select.select([sys.stdin], [], [], 0)[0]:
        step += 1
        publisher.publish(flat.fill_(float(step)), PolicyVersion(0, step))
    print(step, flush=True)
    publisher.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
