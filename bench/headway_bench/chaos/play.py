"""Playing a schedule: attempts until every update is done, faults in between, and how soon they were noticed."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from headway.errors import DeadlineExceeded
from headway_bench.chaos.attempt import RECIPE, RUN
from headway_bench.chaos.child import CLOCK, FULL
from headway_bench.chaos.proxy import Proxy
from headway_bench.chaos.schedule import HEARTBEAT_S, Fault, Schedule, Strike

MAX_ATTEMPTS = 12
ATTEMPT_S = 150.0
POLL_S = 0.02
NOTICED = {Fault.KILL_GENERATOR, Fault.FREEZE_GENERATOR, Fault.KILL_LEARNER, Fault.FREEZE_LEARNER}


@dataclass
class Outcome:
    """What happened to a schedule.

    Attributes:
        ends: per attempt, (status, cause); "killed" for one whose supervisor was killed.
        noticed_s: per fault that must be noticed, the seconds until somebody said so.
        struck: strikes that found their target alive; wall_s: of everything.
    """

    ends: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    noticed_s: list[tuple[Fault, float]] = field(default_factory=list[tuple[Fault, float]])
    struck: list[Strike] = field(default_factory=list[Strike])
    wall_s: float = 0.0


class Play:
    """One schedule in one folder.

    Args:
        folder: empty; holds the run's folder afterwards.
    """

    def __init__(self, schedule: Schedule, folder: Path) -> None:
        self.outcome = Outcome()
        self.run = folder / RUN
        self._folder = folder
        self._waiting = list(schedule.strikes)
        self._restore: list[tuple[float, Callable[[], None]]] = []
        self._watching: list[tuple[Fault, float, int]] = []
        self._proxy = Proxy()
        self._news: queue.SimpleQueue[tuple[float, dict[str, Any]]] = queue.SimpleQueue()
        (folder / RECIPE).write_text(json.dumps(schedule.sections))

    def play(self) -> Outcome:
        """Until the run is finished.

        Raises:
            DeadlineExceeded: an attempt neither ended nor finished in time, or too many were needed.
        """
        began = time.monotonic()
        try:
            while not self.outcome.ends or self.outcome.ends[-1][0] != "finished":
                if len(self.outcome.ends) == MAX_ATTEMPTS:
                    raise DeadlineExceeded(f"not finished after {MAX_ATTEMPTS} attempts: {self.outcome.ends}")
                self.outcome.ends.append(self._attempt())
        finally:
            self._undo(everything=True)
            self._proxy.close()
            for process in self.processes():
                process.kill()
        self.outcome.wall_s = time.monotonic() - began
        return self.outcome

    def processes(self, kind: str = "") -> list[psutil.Process]:
        """Live processes of the run; `kind` is learner, generator or headway_bench.chaos.attempt."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter(["cmdline", "status"]):
            line = process.info["cmdline"] or []
            ours = str(self._folder) in line or any(str(self.run) in word for word in line)
            if ours and process.info["status"] != psutil.STATUS_ZOMBIE and (not kind or kind in line):
                found.append(process)
        return found

    def _attempt(self) -> tuple[str, str]:
        command = [
            sys.executable, "-P", "-m", "headway_bench.chaos.attempt", str(self._proxy.control), str(self._folder)
        ]  # fmt: skip
        with (self._folder / "attempts.log").open("a") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        end: tuple[str, str] | None = None
        step, deadline = 0, time.monotonic() + ATTEMPT_S
        while process.poll() is None or not self._news.empty():
            if time.monotonic() > deadline:
                process.kill()
                raise DeadlineExceeded(
                    f"an attempt went on for {ATTEMPT_S:g} s at step {step}; {self.outcome}"
                )
            self._undo()
            self._strike(step)
            with contextlib.suppress(queue.Empty):
                at, news = self._news.get(timeout=POLL_S)
                step = news.get("row", step)
                self._notice(at, news)
                if "end" in news:
                    end = (news["end"], news["cause"])
        process.wait()
        self._watching.clear()
        return end or ("killed", "")

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                self._news.put((time.monotonic(), json.loads(line)))

    def _strike(self, step: int) -> None:
        """The next strike, when its step is reached and its target runs."""
        if not self._waiting or self._waiting[0].step > step:
            return
        strike = self._waiting[0]
        targets = self._targets(strike.fault)
        if not targets:
            return
        self._waiting.pop(0)
        time.sleep(strike.delay_s)
        self.outcome.struck.append(strike)
        if strike.fault in NOTICED:
            self._watching.append((strike.fault, time.monotonic(), targets[0].pid))
        self._do(strike, targets)

    def _targets(self, fault: Fault) -> list[psutil.Process]:
        generators, learners = self.processes("generator"), self.processes("learner")
        if not generators or not learners:
            return []
        if fault is Fault.KILL_ALL:
            return self.processes()
        if "generator" in fault:
            return generators[:1]
        if "supervisor" in fault:
            return self.processes("headway_bench.chaos.attempt")[:1]
        return learners[:1]

    def _do(self, strike: Strike, targets: list[psutil.Process]) -> None:
        match strike.fault:
            case Fault.KILL_GENERATOR | Fault.KILL_LEARNER | Fault.KILL_SUPERVISOR | Fault.KILL_ALL:
                for target in targets:
                    _send(target, signal.SIGKILL)
            case Fault.FREEZE_GENERATOR | Fault.FREEZE_LEARNER:
                _send(targets[0], signal.SIGSTOP)
            case Fault.PAUSE_GENERATOR | Fault.PAUSE_LEARNER:
                _send(targets[0], signal.SIGSTOP)
                self._later(min(strike.seconds, 0.8 * HEARTBEAT_S), lambda: _send(targets[0], signal.SIGCONT))
            case Fault.CUT:
                self._proxy.cut()
            case Fault.SLOW:
                self._proxy.delay_s = 0.1 * strike.seconds
                self._later(3 * strike.seconds, lambda: setattr(self._proxy, "delay_s", 0.0))
            case Fault.SILENCE:
                self._proxy.silent = True
                self._later(4 * strike.seconds, lambda: setattr(self._proxy, "silent", False))
            case Fault.FULL_DISK:
                (self._folder / FULL).touch()
                self._later(2 * strike.seconds, lambda: (self._folder / FULL).unlink(missing_ok=True))
            case Fault.CLOCK_JUMP:
                (self._folder / CLOCK).write_text(str((strike.seconds - 0.6) * 1e5))
                self._later(4 * strike.seconds, lambda: (self._folder / CLOCK).unlink(missing_ok=True))

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._restore.append((time.monotonic() + seconds, action))

    def _undo(self, everything: bool = False) -> None:
        now = time.monotonic()
        due = [action for at, action in self._restore if everything or at <= now]
        self._restore = [(at, action) for at, action in self._restore if not everything and at > now]
        for action in due:
            action()

    def _notice(self, at: float, news: dict[str, Any]) -> None:
        text = str(news.get("note", "")) + (
            f" learner: {news['cause']}" if news.get("end") == "failed" else ""
        )
        for watched in list(self._watching):
            fault, since, pid = watched
            if f"pid {pid}" in text or ("learner" in fault and "learner:" in text):
                self.outcome.noticed_s.append((fault, at - since))
                self._watching.remove(watched)


def _send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
