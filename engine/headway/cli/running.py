"""`headway run`, `headway set` and `headway selfcheck`: the recipe, the view, the signals and the exit status."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from types import FrameType

from headway.checkpoint import Resumed, resume_run
from headway.cli.errors import EXIT_FAILED
from headway.config import RunConfig, load_recipe, open_run
from headway.engine import Engine, start_run
from headway.errors import ConfigError, HeadwayError
from headway.launch import PlainView, stop_within_s
from headway.launch.tally import Tally
from headway.stream import request
from headway.telemetry import JsonlSink, MetricsSink, open_sinks, printable
from headway.types import LearnerStatus, StepRecord
from headway.wire.messages import Command

_INTERRUPTS = {signal.SIGINT: "interrupted by Ctrl-C", signal.SIGTERM: "ended by SIGTERM"}


def recipe(words: Sequence[str]) -> RunConfig:
    """The config of a command line: one recipe, and dotted overrides in any order.

    Raises:
        ConfigError: no recipe, or it or an override is wrong.
    """
    path, overrides = split_words(words)
    if path is None:
        raise ConfigError([("", "no recipe was given: headway run RECIPE.toml [--section.key VALUE ...]")])
    return load_recipe(path, overrides, os.environ)


def split_words(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The recipe and the words of the overrides. The recipe is the first word that belongs to no override."""
    path: Path | None = None
    overrides: list[str] = []
    takes_value = False
    for word in words:
        if path is None and not takes_value and not word.startswith("--"):
            path = Path(word)
            continue
        overrides.append(word)
        takes_value = word.startswith("--") and "=" not in word and not takes_value
    return path, overrides


def resume(path: Path, words: Sequence[str], checkpoint: str, without: Sequence[str]) -> Resumed:
    """A run that is to go on, with dotted overrides of its recipe.

    Raises:
        ConfigError, RunLocked, CheckpointError: as headway.checkpoint.resume_run.
    """
    recipe_path, overrides = split_words(words)
    if recipe_path is not None:
        raise ConfigError(
            [("", f"{recipe_path}: a run that goes on has its recipe; give changes of it only")]
        )
    return resume_run(path, overrides, checkpoint=checkpoint, without=without)


def run(config: RunConfig, view: str, logs: bool = False, resumed: Resumed | None = None) -> int:
    """Runs with child processes.

    Args:
        resumed: a run to go on with; None: a new one.
        view: "live", "plain" or "none".
        logs: print what the processes print, each line with its process, to standard error.

    Returns:
        The exit status: 0, 1, or 128 + the signal that ended the run.
    """
    engine = Engine(
        None if resumed else config,
        sinks=lambda folder: _views(config, folder, view),
        echo=_echo if logs else None,
        resume=resumed,
    )
    caught: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        caught.append(number)
        if len(caught) == 1:
            engine.stop(_INTERRUPTS[signal.Signals(number)], within_s=stop_within_s(config))
        else:
            engine.kill()

    with _handling(interrupt), engine:
        status = engine.wait()
    assert status is not None
    if caught:
        return 128 + caught[0]
    if status.status == "failed" and view == "none":
        print(f"headway: the run failed: {printable(status.cause)}", file=sys.stderr)
    return EXIT_FAILED if status.status == "failed" else 0


def run_serially(config: RunConfig, view: str, resumed: Resumed | None = None) -> int:
    """Runs all components in this process. Returns the exit status."""
    from headway.serial import run_serial

    run = resumed or start_run(config)
    folder = run.folder
    caught: list[int] = []
    views = _views(config, folder.path, view)
    tally = Tally()

    def on_record(record: StepRecord) -> None:
        tally.add(record)
        for sink in sinks:
            sink.step(record)

    def on_note(text: str) -> None:
        for sink in views:
            sink.note(text)

    def interrupt(number: int, _frame: FrameType | None) -> None:
        caught.append(number)
        if len(caught) > 1:
            raise _Interrupted(number)

    def stopping() -> str:
        return _INTERRUPTS[signal.Signals(caught[0])] if caught else ""

    try:
        chosen = open_sinks(config, folder, on_note)
    except BaseException:
        run.lock.release()
        raise
    sinks: list[MetricsSink] = [JsonlSink(folder.metrics, folder.summary), *chosen, *views]
    try:
        with _handling(interrupt):
            status = run_serial(config, folder.path, on_record, on_note, run.attempt, stopping)
    except _Interrupted as interrupted:
        status = tally.status("stopped", _INTERRUPTS[signal.Signals(interrupted.number)])
        _finish(sinks, status)
        return 128 + interrupted.number
    except HeadwayError as error:
        _finish(sinks, tally.status("failed", f"{type(error).__name__}: {error}"))
        raise
    except Exception as error:
        _finish(sinks, tally.status("failed", repr(error)))
        raise
    finally:
        run.lock.release()
    _finish(sinks, status)
    if caught:
        return 128 + caught[0]
    return EXIT_FAILED if status.status == "failed" else 0


def selfcheck(config: RunConfig) -> int:
    """The frozen-policy check. Returns the exit status."""
    from headway.serial.selfcheck import selfcheck as check

    return check(config)


class _Interrupted(BaseException):
    """A signal came while the serial loop ran; not an Exception, so that nothing on the way swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _echo(name: str, line: str) -> None:
    print(f"[{name}] {line}", file=sys.stderr, flush=True)


def _finish(sinks: Sequence[MetricsSink], status: LearnerStatus) -> None:
    for sink in sinks:
        sink.finish(status)


def _views(config: RunConfig, folder: Path, view: str) -> list[MetricsSink]:
    if view == "live":
        from headway.launch.live import LiveView

        return [LiveView(config, folder)]
    return [PlainView(config, folder, sys.stdout)] if view == "plain" else []


@contextlib.contextmanager
def _handling(handler: signal._HANDLER) -> Generator[None]:  # pyright: ignore[reportPrivateUsage]
    """Ctrl-C and SIGTERM go to the handler while the block runs."""
    before = {number: signal.signal(number, handler) for number in _INTERRUPTS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def change(run_dir: Path, key: str, value: str, timeout_s: float) -> None:
    """`headway set`: change a key of a live run.

    Raises:
        ConfigError: not a run's folder, or the key cannot be changed to this value.
        StreamError: the run is not alive. DeadlineExceeded: it did not answer in time.
    """
    folder, _ = open_run(run_dir)
    command = Command(command_id=0, action="set", key=key, value=value)
    error = request(folder.run_id, command, timeout_s)
    if error:
        raise ConfigError([(key, error.removeprefix(f"{key}: "))])
