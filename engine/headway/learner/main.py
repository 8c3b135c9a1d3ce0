"""A learner process: builds the parts, runs the loop, says how it ended."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from headway.checkpoint import Attempt, Attempts
from headway.config import RunConfig, RunFolder, open_run, threads
from headway.errors import HeadwayError
from headway.journal import Journal
from headway.learner.checkpoints import Checkpoints, open_state
from headway.learner.desk import Desk
from headway.learner.intake import Intake
from headway.learner.listening import open_stream
from headway.learner.live import LiveSettings, Settings
from headway.learner.loop import LearnerLoop
from headway.learner.machine import Machine
from headway.learner.peers import NO_TIME
from headway.learner.publisher import Publisher, PushInterval
from headway.learner.records import Recorder
from headway.learner.resume import resume_desk, resume_parts, resume_rows
from headway.learner.setup import LearnerParts, build_learner
from headway.learner.state import LearnerState
from headway.model import save_policy
from headway.stream import LearnerControl, LearnerSocket
from headway.telemetry import SplitClock, log_to, spans_in, watch_parent
from headway.types import LearnerStatus, PolicyVersion
from headway.weights import WeightPublisher, choose_channel, open_publisher
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
        self._weight_address = ""
        self._lost: list[tuple[int, int, str]] = []

    def stop(self, reason: str) -> None:
        """End after the current step; from a signal handler too."""
        self._stop_reason = self._stop_reason or reason

    def run(self) -> LearnerStatus:
        """Build or resume, train, save.

        Raises:
            HeadwayError: before anything could be trained.
        """
        attempt = Attempts(self._folder).last()
        Attempts(self._folder).write_machine(attempt.epoch, Machine.current().encode())
        parts = build_learner(self._config, self._note)
        state = open_state(self._folder, self._config, attempt, parts)
        parts = resume_parts(parts, self._config, attempt, state)
        desk = self._make_desk(parts)
        with contextlib.ExitStack() as stack:
            journal = stack.enter_context(self._open_journal())
            if attempt.epoch:
                found = resume_desk(self._folder, self._config, attempt, parts, state, desk)
                self._note(f"resumed at version {attempt.version}: {found}")
            desk.chronicle.journal = journal
            desk.chronicle.opened(self._folder.run_id, attempt.version)
            channel = stack.enter_context(contextlib.closing(self._open_channel(parts)))
            return self._run(attempt, parts, state, desk, channel, stack)

    def _run(
        self,
        attempt: Attempt,
        parts: LearnerParts,
        state: LearnerState | None,
        desk: Desk,
        channel: WeightPublisher,
        stack: contextlib.ExitStack,
    ) -> LearnerStatus:
        spans = self._folder.spans if self._config.telemetry.spans else None
        clock = SplitClock(spans=spans_in(spans, "learner", "learner", f"learner-{attempt.epoch}"))
        stack.callback(clock.close)
        interval = PushInterval(self._config.push.interval)
        settings = Settings(
            self._config, desk, parts.trainer, interval, self._note,
            lambda step, change: desk.chronicle.changed(step, change.key, change.value),
        )  # fmt: skip
        recorder = Recorder(desk, settings.take_changes, clock)
        resume_rows(state, settings, recorder)
        stream = self._config.stream
        patience_s = stream.rollout_deadline_s + stream.startup_deadline_s
        intake = Intake(desk, self._open_socket, patience_s, self._config.journal.full_wait_s)
        stack.callback(lambda: intake.close(self._stop_reason or "the run is over"))
        live = LiveSettings(self._control, intake, settings, self.stop)
        checkpoints = Checkpoints(
            self._folder, self._config, attempt, parts, desk, settings, recorder, intake.lock, self._note
        )
        loop = LearnerLoop(
            self._config,
            attempt.version,
            intake,
            parts.trainer,
            Publisher(channel, parts.policy, interval),
            recorder,
            settings.observe,
            checkpoints,
            clock,
            lambda record: self._send(Event(record=record)),
            lambda: self._serve(live),
            lambda: self._stop_reason,
            self._note,
        )
        self._send(Event(ready=str(intake.endpoints)))
        status, cause = self._train(loop)
        if status != "failed":
            cause = self._save(cause, loop.version, checkpoints, parts)
        with intake.lock:
            desk.buffer.close()
            return recorder.status(status, cause)

    def _save(self, cause: str, version: PolicyVersion, checkpoints: Checkpoints, parts: LearnerParts) -> str:
        """The last checkpoint, and the policy; returns the cause with what could not be saved."""
        stopped = bool(self._stop_reason)
        try:
            saved = checkpoints.save_last(version.step, stopped=stopped)
        except HeadwayError as error:
            saved, cause = False, f"{cause}; {error}" if cause else str(error)
        if stopped and saved:
            self._note(
                f"checkpoint {version} is written; headway run --resume {self._folder.path} goes on from it"
            )
        if self._config.save:
            save_policy(parts.policy, parts.folder, self._folder.policy)
        return cause

    def _open_channel(self, parts: LearnerParts) -> WeightPublisher:
        choice = choose_channel(self._config)
        self._note(f"weights are pushed over {choice.name}: {choice.why}")
        manifest = parts.policy.manifest
        publisher = open_publisher(self._config, manifest, self._folder.run_id)
        self._weight_address = publisher.address
        facts = {"address": publisher.address, "manifest_digest": manifest.digest, "dtype": manifest.dtype}
        self._folder.weights.write_text(json.dumps(facts) + "\n", encoding="utf-8")
        return publisher

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
                weight_channel=self._weight_address,
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

    def _open_journal(self) -> Journal:
        journal = Journal.open(self._folder.journal, max_bytes=self._config.journal.max_bytes)
        if journal.torn is not None:
            _log.warning("the journal: %s", journal.torn)
        return journal

    def _open_socket(self) -> LearnerSocket:
        return open_stream(self._config, self._folder.run_id)

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
    log_to()
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
