"""A generator process: a rollout loop between a learner's stream and an engine.

    while not stopped:
        handle(stream.receive())     # grants, cancels, version notices; waits only when there is nothing to decode
        rollout.refresh()            # newest weights, between two decode steps
        send(rollout.take_acks())    # the learner's next tickets wait for them
        rollout.turn()               # one decode step, rewards
        send(rollout.take())         # finished members

Waits for: tickets, rewards or weights. Unblocked by: the learner's messages, a reward worker's verdict.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from headway.config import RunConfig, open_run, threads
from headway.errors import EXIT_USER_ERROR, ConfigError, HeadwayError, StreamError, UnsupportedOption
from headway.generator.rollout import Rollout
from headway.generator.setup import build_engine, build_rewards, build_served, set_threads
from headway.model import load_tokenizer, resolve_model
from headway.stream import ClientSecurity, Endpoints, GeneratorSocket, HeartbeatThread, host_of
from headway.stream.keys import DEFAULT_CLIENT
from headway.stream.waker import Waker
from headway.telemetry import SplitClock, log_to, spans_in, watch_parent
from headway.types import Manifest
from headway.weights import StagerThread, open_stager
from headway.wire.messages import (
    SCHEMA,
    Bye,
    Cancel,
    DataMessage,
    Grant,
    Heartbeat,
    Hello,
    Refused,
    Stop,
    VersionNotice,
    Welcome,
)

_log = logging.getLogger(__name__)
IDLE_WAIT_S = 0.5


class GeneratorProcess:
    """One incarnation of one generator.

    Args:
        config: the recipe; run_id: of the run; index: of the generator.
        endpoints: the learner's; security: keys for it, None where it demands none.
        spans: folder for what this process does when; None: it is not recorded.

    Raises:
        HeadwayError: the model, the environment or the learner cannot be used.
    """

    def __init__(
        self,
        config: RunConfig,
        run_id: str,
        index: int,
        endpoints: Endpoints,
        security: ClientSecurity | None = None,
        spans: Path | None = None,
    ) -> None:
        self._config = config
        self._run_id = run_id
        self._index = index
        self._endpoints = endpoints
        self._security = security
        self._incarnation = f"g{index}-{uuid.uuid4().hex[:8]}"
        self._clock = SplitClock(spans=spans_in(spans, f"generator {index}", "generator", self._incarnation))
        self._turned_s = time.monotonic()
        self._beats = 0
        self._stop_reason = ""
        self._weights: StagerThread | None = None
        self._channel = ""
        self._waker = Waker()
        folder = resolve_model(config.model.path)
        self._tokenizer = load_tokenizer(folder)
        self._engine = build_engine(config, folder, self._tokenizer)
        self._clock.sampled_by(lambda: self._engine.num_sampled)
        self._rewards = build_rewards(config)
        self._rollout: Rollout | None = None
        self._stream: GeneratorSocket | None = None

    def stop(self, reason: str) -> None:
        """End the loop after the current turn; from a signal handler too."""
        self._stop_reason = reason

    def run(self) -> None:
        """Until the learner says Stop, or `stop` is called."""
        settings = self._config.stream
        stream = GeneratorSocket.connect(
            self._endpoints,
            self._hello,
            give_up_s=settings.startup_deadline_s,
            security=self._security,
            insecure=settings.insecure,
            heartbeat_s=settings.heartbeat_s,
        )
        self._stream = stream
        beat: HeartbeatThread | None = None
        try:
            stream.watch(self._rewards.fileno())
            stream.watch(self._waker.fd)
            self._join(stream)
            beat = HeartbeatThread(
                self._endpoints.heartbeat,
                self._heartbeat,
                settings.heartbeat_s,
                security=self._security,
                insecure=settings.insecure,
            )
            self._loop(stream, beat)
            beat.stop()  # a beat that came after the Bye would be a stranger's
            if stream.connected:
                stream.send(Bye(incarnation=self._incarnation, unsent=self._unsent()))
        finally:
            if beat is not None:
                beat.stop()
            if self._weights is not None:
                self._weights.close()
            unacked = stream.close()
            self._rewards.close()
            self._clock.close()
            _log.info("stopped (%s); %d messages not acknowledged", self._stop_reason, unacked)

    def _loop(self, stream: GeneratorSocket, beat: HeartbeatThread) -> None:
        rollout = self._rollout
        assert rollout is not None
        silence = Silence(2 * self._config.stream.heartbeat_s)
        while not self._stop_reason:
            self._receive(stream, rollout)
            if silence.is_news(beat.silent_s) and stream.connected:
                stream.reconnect(f"no heartbeat was answered for {beat.silent_s:.1f} s")
            self._waker.clear()
            with self._clock("push"):
                rollout.refresh()
            for ack in rollout.take_acks():
                stream.send(ack)
            with self._clock("work"):
                rollout.turn()
            message = rollout.take()
            if message is not None:
                stream.send(message)
            self._turned_s = time.monotonic()

    def _receive(self, stream: GeneratorSocket, rollout: Rollout) -> None:
        messages = stream.receive(0.0)
        if not messages and not rollout.has_work:
            with self._clock("idle"):
                messages = stream.receive(self._patience(rollout))
        for message in messages:
            self._handle(message, rollout)

    def _patience(self, rollout: Rollout) -> float:
        """Seconds to wait for a message or a verdict before deadlines are looked at again."""
        deadline = self._rewards.next_deadline_s() if rollout.num_scoring else None
        return IDLE_WAIT_S if deadline is None else min(IDLE_WAIT_S, deadline)

    def _join(self, stream: GeneratorSocket) -> None:
        """Wait for the learner's Welcome, attach to the weights, and put the newest version in force."""
        deadline = time.monotonic() + self._config.stream.startup_deadline_s
        held: list[DataMessage] = []
        while self._rollout is None and not self._stop_reason:
            if time.monotonic() > deadline:
                raise StreamError(
                    f"no Welcome from the learner at {self._endpoints.data} within the start-up deadline"
                )
            for message in stream.receive(0.2):
                if isinstance(message, Welcome):
                    self._attach(message)
                elif isinstance(message, Refused):
                    raise StreamError(f"the learner refuses this generator: {message.reason}")
                else:
                    held.append(message)
        if self._rollout is not None:
            for message in held:
                self._handle(message, self._rollout)

    def _attach(self, welcome: Welcome) -> None:
        manifest: Manifest = self._engine.manifest
        if welcome.manifest_digest != manifest.digest:
            raise StreamError(
                f"the learner's weights have manifest {welcome.manifest_digest}, this generator's model has "
                f"{manifest.digest}; both must load the same model folder with the same library versions"
            )
        if self._weights is not None:
            self._weights.close()
        served = build_served(self._config, self._engine)
        self._weights = StagerThread(
            lambda: open_stager(
                welcome.weight_channel,
                self._config,
                served,
                manifest,
                self._run_id,
                self._waker.wake,
                security=self._security,
                learner_host=host_of(self._endpoints.data),
            ),
            self._config.stream.startup_deadline_s,
        )
        self._channel = welcome.weight_channel
        if self._rollout is not None:
            self._rollout.attach(self._weights)
            return
        decode = self._tokenizer.decode_many
        self._rollout = Rollout(
            self._incarnation,
            self._engine,
            self._rewards,
            self._weights,
            decode,
            mode=self._config.push.mode,
        )

    def _handle(self, message: DataMessage, rollout: Rollout) -> None:
        match message:
            case Grant():
                rollout.grant(message.tickets)
            case Cancel():
                rollout.cancel(message.ticket_ids)
            case Stop():
                self._stop_reason = message.reason
            case Refused():
                raise StreamError(f"the learner refuses this generator: {message.reason}")
            case Welcome() if message.weight_channel != self._channel:
                self._attach(message)  # the learner that answers is a new one, and pushes somewhere else
            case VersionNotice() | Welcome():
                pass  # the stager looks at the channel itself
            case _:
                pass

    def _hello(self) -> Hello:
        return Hello(
            run_id=self._run_id,
            schema=SCHEMA,
            generator=self._index,
            incarnation=self._incarnation,
            pid=os.getpid(),
            host=socket.gethostname(),
            max_running=self._config.generator.max_running,
            serving=self._engine.version,
            tickets=self._tickets(),
        )

    def _tickets(self) -> list[int]:
        """Those that the learner may count on: held, or with members on their way to it."""
        held = set(self._rollout.tickets) if self._rollout is not None else set[int]()
        return sorted(held | self._stream.unacked_tickets) if self._stream is not None else []

    def _unsent(self) -> int:
        return self._rollout.num_unsent if self._rollout is not None else 0

    def _heartbeat(self) -> Heartbeat:
        """Called on the heartbeat thread: reads counters only."""
        self._beats += 1
        rollout = self._rollout
        return Heartbeat(
            incarnation=self._incarnation,
            seq=self._beats,
            stalled_s=max(0.0, time.monotonic() - self._turned_s),
            serving=self._engine.version,
            running=self._engine.num_running,
            waiting=self._engine.num_waiting,
            tickets=rollout.num_tickets if rollout is not None else 0,
            generated=self._engine.num_sampled,
            unsent=self._unsent(),
            split=self._clock.split(),
        )


class Silence:
    """Says once per stretch of `limit_s` that the learner does not answer."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._next_s = limit_s

    def is_news(self, silent_s: float) -> bool:
        """Whether so long a silence is one that nothing was said of yet."""
        if silent_s <= self._limit_s:
            self._next_s = self._limit_s
        if silent_s <= self._next_s:
            return False
        self._next_s = silent_s + self._limit_s
        return True


def main(run_dir: Path, connect: str, index: int, keys: Path | None = None) -> int:
    """Entry of `headway generator`; returns the exit status.

    0 after an orderly stop, EXIT_USER_ERROR where the recipe asks for what is not there, 1 on another error.
    """
    log_to()
    folder, config = open_run(run_dir)
    set_threads(threads(config, "generator", os.cpu_count() or 1), _log.info)
    try:
        if keys is None and config.stream.keys:
            keys = Path(config.stream.keys) / f"{DEFAULT_CLIENT}.key"
        security = ClientSecurity(keys) if keys is not None else None
        spans = folder.spans if config.telemetry.spans else None
        process = GeneratorProcess(config, folder.run_id, index, Endpoints.parse(connect), security, spans)
        _stop_on_signals(process.stop)
        watch_parent()
        process.run()
    except HeadwayError as error:
        _log.error("generator %d: %s", index, error)
        return EXIT_USER_ERROR if isinstance(error, (ConfigError, UnsupportedOption)) else 1
    return 0


def _stop_on_signals(stop: Callable[[str], None]) -> None:
    """The first signal ends the loop in order; a second Ctrl-C ends the process where it stands."""

    def first(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        stop(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, first)
