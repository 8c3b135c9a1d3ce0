"""The learner of fake_headway.py."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from headway.config import RunFolder, open_run
from headway.launch.leftovers import shared_directory
from headway.launch.tally import Tally
from headway.stream import LearnerControl
from headway.telemetry import watch_parent
from headway.types import StepRecord, TimeSplit
from headway.wire.messages import Event

SPLIT = TimeSplit(0.5, 0.1, 0.3, 0.1)


def argument(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def record(step: int) -> StepRecord:
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(StepRecord):
        kind = str(field.type)
        values[field.name] = (
            SPLIT if "TimeSplit" in kind else [] if "list" in kind else {} if "dict" in kind
            else False if "bool" in kind else 0
        )  # fmt: skip
    counts = {"issued": 8 * step, "trained": 8 * step, "dropped": 0, "in_flight": 0, "buffered": 0}
    values |= {"step": step, "elapsed_s": 0.5 * step, "reward": 0.1 * step, "lag_histogram": [40, 10]}
    values |= {"num_trajectories": 8, "num_tokens": 50, "tickets": counts, "lag_max": 1}
    return StepRecord(**values)


class FakeLearner:
    """Emits a record a turn, serves commands, and ends as its behaviour says."""

    def __init__(self, folder: RunFolder, steps: int, control: str, arguments: dict[str, Any]) -> None:
        self.folder, self.steps, self.arguments = folder, steps, arguments
        self.control = LearnerControl(control)
        self.tally = Tally()
        self.stopped = ""

    def started(self) -> int:
        return len(list(self.folder.path.glob("generator-*.*")))

    def first_pid(self) -> int:
        starts = sorted(self.folder.path.glob("generator-*.*"), key=lambda path: path.stat().st_mtime)
        return int(starts[0].name.rpartition(".")[2])

    def frozen(self) -> bool:
        """Whether the first generator has stood still for longer than it takes to be given up."""
        starts = [path.stat().st_mtime for path in self.folder.path.glob("generator-*.*")]
        return bool(starts) and time.time() - starts[0] > 0.5

    def serve(self, wait_s: float = 0.02) -> None:
        for command in self.control.poll(wait_s):
            if command.action == "stop" and not self.arguments.get("deaf"):
                self.stopped = command.value
            error = "out of range" if command.value == "3" else ""
            self.control.send(Event(answered=command.command_id, error=error))

    def run(self) -> int:
        (shared_directory() / f"headway-{self.folder.run_id}-{os.getpid()}").write_bytes(b"weights")
        self.control.send(Event(ready="tcp://127.0.0.1:1,tcp://127.0.0.1:2"))
        wanted = int(self.arguments.get("starts", 1))
        reported = not self.arguments.get("lost")
        while self.started() < wanted and not self.stopped:
            self.serve()
            if not reported and self.frozen():
                reported = True
                self.control.send(Event(lost=0, lost_pid=self.first_pid(), note="silent for 0.2 s"))
        for step in range(1, self.steps + 1):
            record_ = record(step)
            self.tally.add(record_)
            self.control.send(Event(record=record_))
            self.serve()
            if step == 2:
                getattr(self, str(self.arguments.get("learner", "goes_on")))()
            if self.stopped:
                return self.end("stopped")
        return self.end("finished")

    def end(self, status: str) -> int:
        (self.folder.path / "over").touch()
        self.control.send(Event(status=msgspec.json.encode(self.tally.status(status, ""))))
        self.control.close()
        if self.arguments.get("learner") == "freezes_at_the_end":
            self.freezes()
        return 0

    def freezes_at_the_end(self) -> None:
        pass

    def goes_on(self) -> None:
        pass

    def is_killed(self) -> None:
        print("about to be killed", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def raises(self) -> None:
        raise RuntimeError("the optimizer is gone")

    def leaves(self) -> None:
        sys.exit(0)

    def freezes(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def says_it_failed(self) -> None:
        self.control.send(Event(status=msgspec.json.encode(self.tally.status("failed", "three bad steps"))))
        self.control.close()
        sys.exit(1)

    def waits(self) -> None:
        while not self.stopped:
            self.serve()


def main() -> int:
    watch_parent(grace_s=0.5)
    folder, config = open_run(Path(argument("--run")))
    return FakeLearner(folder, config.steps, argument("--control"), config.env.args).run()


if __name__ == "__main__":
    sys.exit(main())
