"""The supervisor: starts the learner and the generators, watches, restarts, and ends the run in one way.

One thread owns the control socket and all children; other threads ask through `request_stop` and `command`.

    waits for       an Event of the learner, at most TICK_S; the end of a child is noticed at the next tick
    unblocked by    Event, command, request_stop
"""

from __future__ import annotations

import contextlib
import shlex
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from headway.config import RunConfig, RunFolder
from headway.config.live_keys import mirrored
from headway.config.loading import parse_value
from headway.errors import DeadlineExceeded, HeadwayError, RunFailed
from headway.launch.child import Child, Echo
from headway.launch.fleet import Fleet
from headway.launch.leftovers import remove_run, remove_stale
from headway.launch.program import HEADWAY, learner_command
from headway.launch.surroundings import child_environment
from headway.launch.tally import Tally
from headway.stream import RequestServer, SupervisorControl
from headway.telemetry import MetricsSink, read_records
from headway.types import LearnerStatus, StepRecord
from headway.wire.messages import Command, Event

TICK_S = 0.1
STOP_WITHIN_S = 5.0  # of an interrupted run, from the signal to the end
STOPPED_S = 0.5  # for the generators to leave by themselves before they are asked to
FAREWELL_S = 30.0  # for the learner to exit after its last event
Answer = Callable[[str], None]


def stop_within_s(config: RunConfig) -> float:
    """How long an interrupted run may take to its end: longer when it has a last checkpoint to write."""
    return config.checkpoint.stop_within_s if config.checkpoint.interval else STOP_WITHIN_S


@dataclass(frozen=True)
class StopRequest:
    """Why a run is to end before its last update, and when patience ends (None: after the current step)."""

    cause: str
    at_s: float
    within_s: float | None


class Supervisor:
    """Runs one run on a thread of its own and feeds its sinks. `start` once; `join` to wait."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        sinks: Sequence[MetricsSink],
        program: Sequence[str] = HEADWAY,
        echo: Echo | None = None,
    ) -> None:
        """
        Args:
            config, folder: of the run; the folder holds the config already.
            sinks: fed from the supervisor's thread; one that raises is left out from then on, with a note.
            program: command before `learner` and `generator`.
            echo: takes the name of a process and each line it prints, besides its log.
        """
        self._config = config
        self._in_force = config
        self._folder = folder
        self._sinks = list(sinks)
        self._program = program
        self._echo = echo
        self._tally = Tally()
        for record in read_records(folder.metrics):  # of earlier attempts
            self._tally.add(record)
        self._commands: deque[tuple[Command, Answer]] = deque()
        self._waiting: dict[int, tuple[Command, Answer]] = {}
        self._next_command = 0
        # Reentrant: a second signal's handler may run inside the first's, on the same thread, lock in hand.
        self._lock = threading.RLock()
        self._stop: StopRequest | None = None
        self._kill, self._over = threading.Event(), threading.Event()
        self._status: LearnerStatus | None = None
        self._learner: Child | None = None
        self._ready = False
        self._fleet = Fleet(config, folder, program, self._note, echo)
        self._requests: RequestServer | None = None  # opened by its thread
        self._control = SupervisorControl()
        self._control.release()  # the supervisor's thread takes it over
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    @property
    def config(self) -> RunConfig:
        """The recipe with the changes that the learner has said are in force, whoever asked for them."""
        return self._in_force

    def start(self) -> None:
        """Starts the run."""
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for: the end of the run, at most `timeout_s`. Returns whether it has ended."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        # Never Thread.join: when a signal's exception interrupts it, it takes the thread for ended.
        # In slices: a signal's handler runs on the main thread between two of them.
        while not self._over.is_set() and (end is None or time.monotonic() < end):
            self._over.wait(0.2 if end is None else max(0.0, min(0.2, end - time.monotonic())))
        return self._over.is_set()

    def command(self, action: str, key: str, value: str, answer: Answer) -> None:
        """Sends the learner a command.

        `answer` is called with its error, "" when it took effect. Any thread.
        """
        with self._lock:
            command = Command(command_id=self._next_command, action=action, key=key, value=value)
            self._next_command += 1
            self._commands.append((command, answer))
        self._control.wake()

    def request_stop(self, cause: str, within_s: float | None = None) -> None:
        """Ends the run in order: after the current step, or by force when `within_s` is over. Any thread."""
        with self._lock:
            if self._stop is None or within_s is not None:
                self._stop = StopRequest(cause, time.monotonic(), within_s)
        self.command("stop", "", cause, lambda _error: None)

    def kill(self) -> None:
        """Ends every process now. Any thread."""
        self._kill.set()
        self._control.wake()

    def _run(self) -> None:
        try:
            status = self._supervise()
        except HeadwayError as error:
            status = self._tally.status("failed", str(error))
        except Exception:
            status = self._tally.status("failed", f"the supervisor itself failed:\n{traceback.format_exc()}")
        try:
            self._end_children(status)
        finally:
            self._refuse_commands()
            self._feed(lambda sink: sink.finish(status))
            with contextlib.suppress(HeadwayError, OSError):
                self._control.close()
                if self._requests is not None:
                    self._requests.close()
            remove_run(self._folder.run_id)
            self._over.set()

    def _supervise(self) -> LearnerStatus:
        """The main loop: until the learner said how it ended, or nothing more can be done."""
        for path in remove_stale():
            self._note(f"removed {path}, left behind by a run that was killed")
        self._requests = RequestServer(self._folder.run_id)
        self._learner = self._start_learner()
        while self._status is None:
            for event in self._control.poll(TICK_S):
                self._take(event)
            self._take_requests(self._requests)
            self._send_commands()
            if self._status is None:
                self._check_learner(self._learner)
                self._fleet.check(restart=not self._is_ending())
            if self._stop is not None and self._patience_is_over(self._stop):
                return self._tally.status("stopped", self._stop.cause)
        return self._farewell(self._learner, self._status)

    def _start_learner(self) -> Child:
        return Child(
            "learner",
            learner_command(self._program, self._folder.path, self._control.endpoint),
            child_environment(self._config, "learner"),
            self._folder.logs / "learner.log",
            self._echo,
        )

    def _take(self, event: Event) -> None:
        """One event of the learner."""
        if event.ready and not self._ready:
            self._ready = True
            self._fleet.start(event.ready)
        if event.record is not None:
            self._record(event.record)
        if event.lost >= 0:
            self._fleet.lost(event.lost, event.lost_pid, event.note)
        elif event.note:
            self._note(event.note)
        if event.answered >= 0:
            self._answered(event)
        if event.status:
            status = msgspec.json.decode(event.status, type=LearnerStatus)
            if status.status == "stopped" and self._stop is not None:
                status = msgspec.structs.replace(status, cause=self._stop.cause)
            self._status = status

    def _answered(self, event: Event) -> None:
        command, answer = self._waiting.pop(event.answered, (None, None))
        if command is None or answer is None:
            return
        if command.action == "set" and not event.error:
            self._follow([(command.key, command.value)])
        answer(event.error)

    def _follow(self, changes: Sequence[tuple[str, str]]) -> None:
        """Changes that are in force, in their order."""
        config = self._in_force
        for key, value in changes:
            config = mirrored(config, key, parse_value(key, value))
        self._in_force = config

    def _record(self, record: StepRecord) -> None:
        self._follow([(change.key, change.value) for change in record.changes])  # those of target_ess too
        self._tally.add(record)
        self._feed(lambda sink: sink.step(record))

    def _take_requests(self, requests: RequestServer) -> None:
        """What other processes of this user ask for: settings only, a run is stopped by its signals."""
        for who, command in requests.poll():
            if command.action != "set":
                requests.answer(who, command.command_id, f"unknown action {command.action!r}; there is: set")
                continue

            def answer(error: str, who: bytes = who, command: Command = command) -> None:
                requests.answer(who, command.command_id, error)
                if not error:
                    self._note(f"set {command.key} = {command.value}")

            self.command("set", command.key, command.value, answer)

    def _send_commands(self) -> None:
        """Hands waiting commands to the learner, in order; they wait while it is not connected."""
        while self._commands:
            command, answer = self._commands[0]
            if not self._control.send(command):
                return
            self._commands.popleft()
            self._waiting[command.command_id] = (command, answer)

    def _check_learner(self, learner: Child) -> None:
        """
        Raises:
            RunFailed: the learner has ended without a status, or is frozen.
            DeadlineExceeded: it did not come up in time.
        """
        if learner.poll() is not None:
            for event in self._control.poll(TICK_S):  # what it said before its end may still be on its way
                self._take(event)
            if self._status is None and self._stop is None:
                raise RunFailed(f"{learner.ending()}\n{self._advice()}")
            self._status = self._status or self._stopped()
        elif learner.is_frozen(self._config.stream.heartbeat_s):
            self._end_frozen(learner)
            raise RunFailed(
                f"learner (pid {learner.pid}) was frozen by a signal (SIGSTOP); it was killed\n{self._advice()}"
            )
        elif not self._ready and learner.age_s > self._config.stream.startup_deadline_s:
            learner.kill()
            raise DeadlineExceeded(
                f"the learner did not come up within stream.startup_deadline_s = "
                f"{self._config.stream.startup_deadline_s:g} s: {learner.ending()}"
            )

    def _end_frozen(self, learner: Child) -> None:
        self._note(f"learner (pid {learner.pid}) is frozen by a signal (SIGSTOP): it is killed, the run ends")
        learner.kill()

    def _advice(self) -> str:
        return (
            f"to go on from the last checkpoint: headway run --resume {shlex.quote(str(self._folder.path))}"
        )

    def _is_ending(self) -> bool:
        done = self._tally.last is not None and self._tally.last.step >= self._config.steps
        return done or self._stop is not None

    def _stopped(self) -> LearnerStatus:
        assert self._stop is not None
        return self._tally.status("stopped", self._stop.cause)

    def _patience_is_over(self, stop: StopRequest) -> bool:
        waited_s = time.monotonic() - stop.at_s
        return self._kill.is_set() or (stop.within_s is not None and waited_s > 0.5 * stop.within_s)

    def _farewell(self, learner: Child, status: LearnerStatus) -> LearnerStatus:
        """Waits for: the learner's exit after its last event, so that what it saves is whole."""
        end_s = time.monotonic() + FAREWELL_S
        while learner.poll() is None and time.monotonic() < end_s:
            if self._stop is not None and self._patience_is_over(self._stop):
                break
            if learner.is_frozen(self._config.stream.heartbeat_s):
                self._end_frozen(learner)
            learner.wait(TICK_S)
        code = learner.poll()
        if status.status == "finished" and code != 0:
            learner.kill()
            return self._tally.status("failed", f"after its last update, {learner.ending()}")
        return status

    def _end_children(self, status: LearnerStatus) -> None:
        """Ends what still runs: in order after a good end, by SIGTERM else, and by SIGKILL soon after."""
        children = [child for child in (self._learner, *self._fleet.children()) if child is not None]
        if status.status == "finished":
            self._wait_for(children, STOPPED_S)  # the learner told the generators to stop
        for child in children:
            child.terminate()
        within_s = (
            self._stop.within_s
            if self._stop is not None and self._stop.within_s is not None
            else STOP_WITHIN_S
        )
        self._wait_for(children, 0.3 * within_s)
        for child in children:
            child.close()

    def _wait_for(self, children: Sequence[Child], timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        for child in children:
            while child.poll() is None and time.monotonic() < end_s and not self._kill.is_set():
                child.wait(0.05)

    def _refuse_commands(self) -> None:
        with self._lock:
            unsent = [answer for _, answer in self._commands]
            self._commands.clear()
        for answer in (*unsent, *(answer for _, answer in self._waiting.values())):
            answer("the run has ended")
        self._waiting.clear()

    def _note(self, text: str) -> None:
        self._feed(lambda sink: sink.note(text))

    def _feed(self, call: Callable[[MetricsSink], None]) -> None:
        """Gives something to every sink; one that raises must not end the run."""
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:
                self._sinks.remove(sink)
                self._note(f"{type(sink).__name__} is left out from here on: {error!r}")
