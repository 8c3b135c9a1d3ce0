"""headway's command line, whose vLLM generator dies once in the middle of writing a push.

    python killed_in_push.py FOLDER learner|generator ...

Half of the tensors have the new values and half the old ones when it is killed; FOLDER/killed then holds the version.
FOLDER/staged has a line `PID KIND VERSION` for every payload that a generator begins to stage.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.cli import main as headway_main
from headway.generate.vllm.weights import VLLMServed
from headway.types import PolicyVersion
from headway.weights import PayloadHeader, Stager
from headway_kernels.weight_delta import apply_slices

WRITES = 3  # the one that is not finished


def die_in_a_write(folder: Path) -> None:
    """The first process to write for the third time does not survive it."""
    write, count = VLLMServed.write, [0]

    def dying(self: VLLMServed, version: PolicyVersion, deltas: Sequence[Any]) -> None:
        count[0] += 1
        if count[0] != WRITES or (folder / "killed").exists():
            return write(self, version, deltas)
        self._engine.tear()
        fresh = [tensor.clone() for tensor in self._tensors]
        for delta in deltas:
            apply_slices(delta, self._table, fresh, cast=True)
        changed = [(old, new) for old, new in zip(self._tensors, fresh, strict=True) if not old.equal(new)]
        assert len(changed) > 1, "a push that changes nothing proves nothing"
        for old, new in changed[: len(changed) // 2]:
            old.copy_(new)
        (folder / "killed").write_text(str(version))
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    VLLMServed.write = dying  # type: ignore[method-assign]


def tell_what_is_staged(folder: Path) -> None:
    """See the module's docstring."""
    stage = Stager._stage

    def telling(self: Stager, header: PayloadHeader) -> None:
        with (folder / "staged").open("a") as file:
            file.write(f"{os.getpid()} {header.kind.name} {header.version}\n")
        stage(self, header)

    Stager._stage = telling  # type: ignore[method-assign]


if __name__ == "__main__":
    die_in_a_write(Path(sys.argv[1]))
    tell_what_is_staged(Path(sys.argv[1]))
    headway_main(sys.argv[2:])
