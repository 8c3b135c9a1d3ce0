"""One attempt at a run, in a process of its own, so that the supervisor can be killed too.

    python -m headway_bench.chaos.attempt CONTROL_PORT FOLDER

FOLDER/recipe.json holds the sections; FOLDER/run becomes the run's folder, and is resumed when it is there. Lines
of JSON on standard output say what happens: {"row": step}, {"note": text}, {"end": status, "cause": text}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import headway
from headway.errors import HeadwayError
from headway.types import LearnerStatus, StepRecord

FOLDER, RUN, RECIPE = "folder", "run", "recipe.json"


def say(**news: Any) -> None:
    """One line."""
    print(json.dumps(news), flush=True)


class Speaker:
    """A sink that says what it is fed."""

    def step(self, record: StepRecord) -> None:
        say(row=record.step)

    def note(self, text: str) -> None:
        say(note=text)

    def finish(self, status: LearnerStatus) -> None:
        say(end=status.status, cause=status.cause)


def main(argv: Sequence[str]) -> int:
    """Run, or go on; 0 when every update is done."""
    control, folder = argv[0], Path(argv[1])
    program = [sys.executable, "-P", "-m", "headway_bench.chaos.child", control, str(folder)]
    run = folder / RUN
    speaker = [Speaker()]
    try:
        if (run / "run.json").exists():
            engine = headway.Engine(resume=run, program=program, sinks=lambda _path: speaker)
        else:
            sections = json.loads((folder / RECIPE).read_text())
            engine = headway.Engine(
                None, program=program, sinks=lambda _path: speaker, run_dir=str(run), **sections
            )
    except HeadwayError as error:
        say(end="refused", cause=f"{type(error).__name__}: {error}")
        return 1
    with engine:
        status = engine.wait()
    return 0 if status is not None and status.status == "finished" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
