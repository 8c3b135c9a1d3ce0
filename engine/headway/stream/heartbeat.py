"""Heartbeats: the thread that sends them and hears them answered, and the judgement about peers that stop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import zmq

from headway.errors import WireError
from headway.stream.endpoint import check_connect
from headway.stream.security import ClientSecurity
from headway.stream.transport import Context, Socket, milliseconds, open_socket, receive_frames, send_frames
from headway.stream.waker import Waker
from headway.wire.codec import DEFAULT_LIMITS, decode, encode
from headway.wire.messages import Heartbeat, HeartbeatAck

_log = logging.getLogger(__name__)


class HeartbeatThread:
    """Sends `snapshot()` every `interval_s` from a thread with a context and a socket of its own.

    It beats while the main loop is busy or hung; the snapshot's `stalled_s` is what tells the two apart. When
    no learner is there the beat is dropped, not queued: only the newest state matters. The learner answers each
    beat; how long it has not is what tells a half-open connection, or a frozen learner, from a quiet one.
    """

    def __init__(
        self,
        endpoint: str,
        snapshot: Callable[[], Heartbeat],
        interval_s: float,
        *,
        security: ClientSecurity | None = None,
        insecure: bool = False,
    ) -> None:
        """Start beating at once; the first beat goes out when the connection stands.

        Args:
            endpoint: the learner's heartbeat endpoint.
            snapshot: called in the heartbeat thread; `incarnation` must not change. When it raises, the error
                is logged and the beats end, so the learner notices.
            security, insecure: as GeneratorSocket.connect takes them.
        """
        check_connect(endpoint, secured=security is not None or insecure)
        self._security = security
        self._heard_s = time.monotonic()
        self._waker = Waker()
        self._endpoint = endpoint
        self._snapshot = snapshot
        self._interval_s = interval_s
        self._incarnation = snapshot().incarnation
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="headway-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        context: Context = zmq.Context()
        try:
            socket = open_socket(
                context, zmq.DEALER, send_mark=2, limits=DEFAULT_LIMITS, heartbeat_s=self._interval_s
            )
            if self._security is not None:
                self._security.protect(socket)
            socket.routing_id = self._incarnation.encode()
            socket.immediate = True
            socket.connect(self._endpoint)
            # The learner should hear of a new generator now, not one interval later.
            self._wait(socket, zmq.POLLOUT)
            while not self._stopped:
                send_frames(socket, encode(self._snapshot()))
                self._wait(socket, zmq.POLLIN)
        except Exception:
            _log.exception("the heartbeat ends: the learner will take this generator for lost")
        finally:
            context.destroy(linger=0)
            self._waker.close()

    def _wait(self, socket: Socket, until: int) -> None:
        """One interval, cut short by `stop`, and by the socket turning writable; answers are taken in meanwhile."""
        poller = zmq.Poller()
        poller.register(socket, until)
        poller.register(self._waker.fd, zmq.POLLIN)
        end = time.monotonic() + self._interval_s
        while not self._stopped and (left := end - time.monotonic()) > 0:
            events = dict(poller.poll(milliseconds(left)))
            if until == zmq.POLLOUT and socket in events:
                return
            self._hear(socket)

    def _hear(self, socket: Socket) -> None:
        """Take the answers in. What is none says nothing about the learner, and is dropped."""
        for _ in range(64):
            try:
                frames = receive_frames(socket, DEFAULT_LIMITS.max_frames)
                if frames is None:
                    return
                if isinstance(decode(frames), HeartbeatAck):
                    self._heard_s = time.monotonic()
            except WireError as fault:
                _log.debug("dropped a message on the heartbeat socket: %s", fault)

    @property
    def silent_s(self) -> float:
        """Seconds since the learner answered last, or since the start."""
        return time.monotonic() - self._heard_s

    @property
    def alive(self) -> bool:
        """Whether beats are still sent."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the beats; returns at once, or after the snapshot that is being taken. Idempotent."""
        self._stopped = True
        self._waker.wake()
        self._thread.join(self._interval_s + 1.0)


class LivenessMonitor:
    """Which peers have gone silent or hang. Pure: the caller passes the time, in seconds of one clock.

    Call `lost` at least once per interval, after the heartbeats that wait have been read. Time during which
    nobody looked (the watcher itself was stopped, or the machine slept) is held against nobody.
    """

    def __init__(self, interval_s: float, stall_limit_s: float) -> None:
        """A peer is lost after more than two intervals of silence, or when stalled longer than the limit."""
        self._interval_s = interval_s
        self._stall_limit_s = stall_limit_s
        self._seen: dict[bytes, float] = {}
        self._stalled: dict[bytes, float] = {}
        self._looked: float | None = None

    def beat(self, peer: bytes, now: float, stalled_s: float = 0.0) -> None:
        """A sign of life; `stalled_s` as in its Heartbeat."""
        self._seen[peer] = now
        self._stalled[peer] = stalled_s

    def forget(self, peer: bytes) -> None:
        """It left, or its loss has been dealt with."""
        self._seen.pop(peer, None)
        self._stalled.pop(peer, None)

    def lost(self, now: float) -> dict[bytes, str]:
        """Lost peers, each with why; reported until it beats again or is forgotten."""
        if self._looked is not None and now - self._looked > self._interval_s:
            unwatched_s = now - self._looked - self._interval_s
            self._seen = {peer: min(now, seen + unwatched_s) for peer, seen in self._seen.items()}
        self._looked = now
        reasons: dict[bytes, str] = {}
        for peer, seen in self._seen.items():
            stalled_s = self._stalled[peer]
            if now - seen > 2 * self._interval_s:
                reasons[peer] = f"silent for {now - seen:.1f} s (heartbeat every {self._interval_s:g} s)"
            # Written so that NaN counts as stalled.
            elif not stalled_s <= self._stall_limit_s:
                reasons[peer] = (
                    f"its loop has not turned for {stalled_s:.1f} s (limit {self._stall_limit_s:g} s)"
                )
        return reasons
