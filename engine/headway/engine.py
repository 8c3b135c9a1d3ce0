"""The embedding API: a run as a context manager that yields one record per optimizer step.

    with headway.Engine("recipe.toml", learner={"lr": 1e-6}) as engine:
        for step in engine:
            if step.ess < 0.5:
                engine.set("staleness.max_lag", 1)

The run lives in child processes, watched by a thread; it goes on while the program does something else
between two records. Nothing is forked and no `if __name__ == "__main__"` is needed. The command line uses
this class too.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headway.checkpoint import Attempts, Resumed, RunLock, resume_run
from headway.config import RunConfig, create_run, load_recipe
from headway.config.live_keys import as_text, mirrored
from headway.errors import ConfigError, DeadlineExceeded, RunFailed
from headway.launch import Supervisor, stop_within_s
from headway.launch.child import Echo
from headway.launch.program import HEADWAY
from headway.telemetry import JsonlSink, MetricsSink, open_sinks, require_sinks
from headway.types import LearnerStatus, StepRecord

Sinks = Callable[[Path], Sequence[MetricsSink]]
COMMAND_DEADLINE_S = 60.0  # the learner answers between two steps
KILLED_WITHIN_S = 10.0
SLICE_S = 0.2


class Engine:
    """One run. Starts when it is made; ends at its last update, at `stop`, or at `close`."""

    def __init__(
        self,
        recipe: str | Path | RunConfig | None = None,
        *,
        sinks: Sinks | None = None,
        echo: Echo | None = None,
        program: Sequence[str] = HEADWAY,
        resume: str | Path | Resumed | None = None,
        from_checkpoint: str = "",
        without: Sequence[str] = (),
        **sections: Any,
    ) -> None:
        """
        Args:
            recipe: a TOML file, a loaded config, or None when the sections say everything.
            sinks: fed with every record besides the files of the run folder and telemetry.sinks; called on the
            supervisor's thread. program: command before `learner` and `generator`; other launchers give their own.
            resume: folder of a run to go on with, in place of a recipe; the sections are changes of its recipe.
            from_checkpoint, without: `checkpoint` and `without` of headway.checkpoint.resume_run.
            sections: overrides, as mappings (`learner={"lr": 1e-6}`) or top-level values (`steps=20`).

        Raises:
            ConfigError: the recipe or an override is wrong, or a sink of telemetry.sinks cannot start.
            UnsupportedOption: the package of one is missing.
            RunLocked, CheckpointError: as headway.checkpoint.resume_run.
        """
        run = (
            _start(recipe, sections)
            if resume is None
            else _resume(resume, recipe, sections, from_checkpoint, without)
        )
        self._folder = run.folder
        self.resumed = run.lines
        self._inbox: queue.SimpleQueue[StepRecord | LearnerStatus] = queue.SimpleQueue()
        self._status: LearnerStatus | None = None
        fed: list[MetricsSink] = [JsonlSink(self._folder.metrics, self._folder.summary)]
        try:
            views = sinks(self._folder.path) if sinks is not None else ()
            chosen = open_sinks(run.config, self._folder, lambda text: _say(views, text))
        except BaseException:
            run.lock.release()
            raise
        fed += [*chosen, *views, _Inbox(self._inbox), _Unlock(run.lock)]
        self._supervisor = Supervisor(run.config, self._folder, fed, program, echo)
        self._supervisor.start()

    @property
    def config(self) -> RunConfig:
        """In force: the recipe with every change made since, by `set`, `headway set` or target_ess."""
        return self._supervisor.config

    @property
    def run_dir(self) -> Path:
        """The folder of the run: recipe, metrics, logs, summary, final policy."""
        return self._folder.path

    @property
    def status(self) -> LearnerStatus | None:
        """How the run ended; None while it goes on, or while records of it are still to be taken."""
        return self._status

    def __iter__(self) -> Iterator[StepRecord]:
        """The records in order, until the run has ended.

        Waits for: the next optimizer step; a dead process ends the wait.

        Raises:
            RunFailed: the run failed; the message names the process and the cause.
        """
        while self._status is None:
            record = self._take(None)
            if record is not None:
                yield record
        self._raise_failure()

    def set(self, key: str, value: Any, timeout_s: float = COMMAND_DEADLINE_S) -> None:
        """Changes a key while the run goes on; the change is in force when this returns.

        Args:
            key: one of headway.config.live_keys.LIVE_KEYS.
            value: as in a recipe.
            timeout_s: how long to wait for the learner, which answers between two steps.

        Raises:
            ConfigError: the key cannot be changed live, or the value contradicts the rest of the recipe.
            DeadlineExceeded: the learner did not answer in time.
        """
        mirrored(self.config, key, value)
        answered: Future[str] = Future()
        self._supervisor.command("set", key, as_text(value), answered.set_result)
        try:
            error = answered.result(timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(f"the learner did not answer `set {key}` within {timeout_s:g} s") from None
        if error:
            raise ConfigError([(key, error)])

    def stop(self, cause: str = "stopped by the program", within_s: float | None = None) -> None:
        """Asks the run to end after the current step; iterate on to see its last records.

        Args:
            cause: for the status.
            within_s: after this long the processes are ended by force; None waits for the step.
        """
        self._supervisor.request_stop(cause, within_s)

    def kill(self) -> None:
        """Ends every process at once, without saving anything."""
        self._supervisor.request_stop("killed", 0.0)
        self._supervisor.kill()

    def wait(self, timeout_s: float | None = None) -> LearnerStatus | None:
        """Waits for: the end of the run, at most `timeout_s`, passing over its records. Does not raise for a
        failed run: look at the status. Where the time passes first, no record is lost: iterate on.
        """
        if timeout_s is None or self._supervisor.join(timeout_s):
            while self._status is None:
                self._take(None)  # as they come: a long run's records would pile up
            self._supervisor.join()
        return self._status

    def close(self) -> None:
        """Ends the run if it goes on, within seconds, and removes what it left on the machine. Idempotent.

        With checkpoints, that takes up to checkpoint.stop_within_s: the last one is written first. Ctrl-C
        meanwhile ends every process at once; how the run ended is written all the same.
        """
        try:
            if not self._supervisor.join(0.0):
                self._supervisor.request_stop("closed by the program", stop_within_s(self.config))
            self.wait()
        except KeyboardInterrupt:
            self.kill()
            self._supervisor.join(KILLED_WITHIN_S)  # its thread dies with this one, its last row unwritten
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, timeout_s: float | None) -> StepRecord | None:
        item = self._next(timeout_s)
        if isinstance(item, LearnerStatus):
            self._status = item
            return None
        return item

    def _next(self, timeout_s: float | None) -> StepRecord | LearnerStatus:
        """In slices: a signal that comes while the handler of another one runs is heard between two of them."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                slice_s = SLICE_S if end is None else max(0.0, min(SLICE_S, end - time.monotonic()))
                return self._inbox.get(timeout=slice_s)
            except queue.Empty:
                if end is not None and time.monotonic() >= end:
                    raise

    def _raise_failure(self) -> None:
        if self._status is not None and self._status.status == "failed":
            raise RunFailed(f"{self._status.cause}\nrun folder: {self.run_dir}")


class _Inbox:
    """The sink from which an Engine is iterated: at most one record per optimizer step of the run."""

    def __init__(self, inbox: queue.SimpleQueue[StepRecord | LearnerStatus]) -> None:
        self._inbox = inbox

    def step(self, record: StepRecord) -> None:
        self._inbox.put(record)

    def note(self, text: str) -> None:
        pass

    def finish(self, status: LearnerStatus) -> None:
        self._inbox.put(status)


class _Unlock:
    """The last sink: when the run has ended, others may have it."""

    def __init__(self, lock: RunLock) -> None:
        self._lock = lock

    def step(self, record: StepRecord) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def finish(self, status: LearnerStatus) -> None:
        self._lock.release()


def start_run(config: RunConfig) -> Resumed:
    """A new run's folder, locked, with its first attempt noted.

    Raises:
        ConfigError: run_dir is taken, or cannot be written.
        UnsupportedOption: a package that telemetry.sinks needs is missing.
    """
    require_sinks(config.telemetry.sinks)
    folder = create_run(config)
    lock = RunLock(folder.path)
    return Resumed(folder, config, Attempts(folder).begin(config), lock, [])


def _say(sinks: Sequence[MetricsSink], text: str) -> None:
    for sink in sinks:
        sink.note(text)


def _start(recipe: str | Path | RunConfig | None, sections: Mapping[str, Any]) -> Resumed:
    return start_run(_resolve(recipe, sections))


def _resume(
    resume: str | Path | Resumed,
    recipe: str | Path | RunConfig | None,
    sections: Mapping[str, Any],
    checkpoint: str,
    without: Sequence[str],
) -> Resumed:
    if recipe is not None:
        raise ConfigError([("", "give a recipe, or a run to resume, which has its own")])
    if isinstance(resume, Resumed):
        return resume
    return resume_run(Path(resume), sections, checkpoint=checkpoint, without=without)


def _resolve(recipe: str | Path | RunConfig | None, sections: Mapping[str, Any]) -> RunConfig:
    if not isinstance(recipe, RunConfig):
        return load_recipe(recipe, sections)
    if not sections:
        return recipe
    return load_recipe(None, {**_dotted(recipe.model_dump()), **_dotted(sections)})


def _dotted(tree: Mapping[str, Any]) -> dict[str, Any]:
    from headway.config.loading import dotted

    return dict(dotted(tree)[0])
