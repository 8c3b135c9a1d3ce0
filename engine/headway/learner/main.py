"""A learner process: builds the parts, runs the loop, says how it ended."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from headway.config import RunConfig, RunFolder, open_run, threads
from headway.errors import HeadwayError
from headway.learner.desk import Desk
from headway.learner.intake import Intake
from headway.learner.live import LiveSettings, Settings
from headway.learner.loop import LearnerLoop
from headway.learner.peers import NO_TIME
from headway.learner.publisher import Publisher, PushInterval
from headway.learner.records import Recorder
from headway.learner.setup import LearnerParts, build_learner
from headway.model import save_policy
from headway.stream import LearnerControl, LearnerSocket, ipc_directory, ipc_endpoint
from headway.telemetry import SplitClock, watch_parent
from headway.types import LearnerStatus, PolicyVersion
from headway.weights import ShmPublisher, segment_name
from headway.wire.messages import Event, Welcome

_log = logging.getLogger(__name__)


class LearnerProcess:
    """One learner.

    Args:
        folder, config: of the run; control: to the supervisor, None without one.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, control: LearnerControl | None) -> None:
        self._folder = folder
        self._config = config
        self._control = control
        self._stop_reason = ""
        self._lost: list[tuple[int, int, str]] = []

    def stop(self, reason: str) -> None:
        """End after the current step; from a signal handler too."""
        self._stop_reason = self._stop_reason or reason

    def run(self) -> LearnerStatus:
        """Build, train, save.

        Raises:
            HeadwayError: before anything could be trained.
        """
        parts = build_learner(self._config, self._note)
        clock = SplitClock()
        desk = self._make_desk(parts)
        channel = ShmPublisher(self._channel_name, parts.policy.manifest)
        stream = self._config.stream
        intake: Intake | None = None
        interval = PushInterval(self._config.push.interval)
        settings = Settings(self._config, desk, parts.trainer, interval, self._note)
        recorder = Recorder(desk, settings.take_changes, clock)
        try:
            intake = Intake(desk, self._open_socket, stream.rollout_deadline_s + stream.startup_deadline_s)
            live = LiveSettings(self._control, intake, settings, self.stop)
            loop = LearnerLoop(
                self._config,
                intake,
                parts.trainer,
                Publisher(channel, parts.policy, interval),
                recorder,
                settings.observe,
                clock,
                lambda record: self._send(Event(record=record)),
                lambda: self._serve(live),
                lambda: self._stop_reason,
                self._note,
            )
            self._send(Event(ready=str(intake.endpoints)))
            status, cause = self._train(loop)
            if status != "failed" and self._config.save:
                save_policy(parts.policy, parts.folder, self._folder.policy)
            with intake.lock:
                desk.buffer.close()
                return recorder.status(status, cause)
        finally:
            if intake is not None:
                intake.close(self._stop_reason or "the run is over")
            channel.close()

    @property
    def _channel_name(self) -> str:
        return segment_name(self._folder.run_id, os.getpid())

    def _train(self, loop: LearnerLoop) -> tuple[str, str]:
        try:
            cause = loop.run()
        except HeadwayError as error:
            _log.error("%s", error)
            return "failed", str(error)
        return ("stopped" if self._stop_reason else "finished"), cause

    def _make_desk(self, parts: LearnerParts) -> Desk:
        def welcome(version: PolicyVersion) -> Welcome:
            return Welcome(
                manifest_digest=parts.policy.manifest.digest,
                weight_channel=self._channel_name,
                version=version,
                heartbeat_s=self._config.stream.heartbeat_s,
            )

        def lost(index: int, pid: int, why: str) -> None:
            # Called on the intake's thread; the control socket belongs to the main one.
            _log.warning("generator %d is given up: %s", index, why)
            self._lost.append((index, pid, why))

        return Desk(
            self._config,
            self._folder.run_id,
            parts.gate,
            parts.prompts,
            parts.tickets,
            welcome,
            lost,
            time.monotonic,
        )

    def _open_socket(self) -> LearnerSocket:
        if self._config.stream.transport == "tcp":
            return LearnerSocket()
        directory = ipc_directory(self._folder.run_id)
        return LearnerSocket(ipc_endpoint(directory, "data"), ipc_endpoint(directory, "beat"))

    def _serve(self, live: LiveSettings) -> None:
        """Commands in, news of lost generators out."""
        live.serve()
        while self._lost:
            index, pid, why = self._lost.pop(0)
            self._send(Event(lost=index, lost_pid=pid, note=why))

    def _note(self, line: str) -> None:
        _log.info("%s", line)
        self._send(Event(note=line))

    def _send(self, event: Event) -> None:
        if self._control is not None:
            self._control.send(event)


def main(run_dir: Path, control: str) -> int:
    """Entry of `headway learner`; returns the exit status: 0 finished or stopped, 1 failed."""
    logging.basicConfig(level=logging.INFO, format="%(levelname).1s %(message)s")
    folder, config = open_run(run_dir)
    torch.set_num_threads(threads(config, "learner", os.cpu_count() or 1))
    _log.info("torch uses %d threads", torch.get_num_threads())
    channel = LearnerControl(control) if control else None
    process = LearnerProcess(folder, config, channel)
    _stop_on_signals(process.stop)
    watch_parent()
    with contextlib.closing(channel) if channel is not None else contextlib.nullcontext():
        try:
            status = process.run()
        except HeadwayError as error:
            status = _failed(str(error))
        print(f"{status.status}: {status.cause or 'all updates done'}", file=sys.stderr)
        if channel is not None:
            channel.send(Event(status=msgspec.json.encode(status)))
    return 1 if status.status == "failed" else 0


def _failed(cause: str) -> LearnerStatus:
    """The status of a learner that never trained."""
    return LearnerStatus("failed", cause, 0, 0.0, 0.0, 0.0, 0.0, 0, [], NO_TIME, NO_TIME, {}, {}, {}, {})


def _stop_on_signals(stop: Callable[[str], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: stop(f"signal {signal.Signals(received).name}"))
