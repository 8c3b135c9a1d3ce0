"""A learner in a process of its own: `writer.py SEGMENT hammer` or `writer.py SEGMENT torn STAGE`.

hammer: publishes versions whose elements all equal the step, as fast as it can, until its standard input ends.
torn:   publishes 1, then stops inside the publish of 2 at STAGE, says so, and waits to be killed there:
        reserved (buffer marked, nothing written), cast (half of the bytes are new), delta (state whole, slot not
        finished), finished (slot says 2, the index still says 1)
"""

from __future__ import annotations

import select
import sys
from collections.abc import Callable
from typing import Any

import torch

from headway.types import Manifest, PolicyVersion, TensorSpec
from headway.weights import WeightPublisher, publisher
from headway.weights.shm import ShmSender

NUM_ELEMENTS = 150_000
STAGES = ("reserved", "cast", "delta", "finished")


def manifest() -> Manifest:
    return Manifest(
        "float32", [TensorSpec("a", [], [NUM_ELEMENTS], 0, NUM_ELEMENTS, True)], NUM_ELEMENTS, 0, {}
    )


def stuck(*_: Any) -> Any:
    print("torn", flush=True)
    sys.stdin.read()


def after(call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*arguments: Any) -> Any:
        call(*arguments)
        return stuck()

    return wrapped


def main(name: str, mode: str, stage: str = "") -> None:
    torch.set_num_threads(1)
    sender = ShmSender(name, manifest())
    weights = WeightPublisher(sender, manifest(), merged=0)
    flat = torch.full((NUM_ELEMENTS,), 1.0)
    weights.publish(flat, PolicyVersion(0, 1))
    if mode == "torn":
        control = sender._control
        if stage == "reserved":
            control.begin = after(control.begin)  # type: ignore[method-assign]
        elif stage == "cast":

            def half(source: torch.Tensor, target: torch.Tensor, **_: Any) -> None:
                target[: len(target) // 2] = source[: len(target) // 2]
                stuck()

            publisher.cast_and_diff = half
        elif stage == "delta":
            control.finish = stuck  # type: ignore[method-assign]
        else:
            control.publish = stuck  # type: ignore[method-assign]
        weights.publish(flat.fill_(2.0), PolicyVersion(0, 2))
        return
    print("ready", flush=True)
    step = 1
    while not select.select([sys.stdin], [], [], 0)[0]:
        step += 1
        weights.publish(flat.fill_(float(step)), PolicyVersion(0, step))
    print(step, flush=True)
    weights.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
