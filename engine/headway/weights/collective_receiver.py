"""A generator's end of the collective channel: joins broadcasts, says how they went, and joins again when dropped.

Used by one thread, which waits in `wait` and `fetch` only; its signs of life are its calls.
"""

from __future__ import annotations

import logging
import time
import urllib.parse

from headway.errors import DeadlineExceeded, StreamError, WeightError
from headway.types import PolicyVersion
from headway.weights.channel import PayloadHeader
from headway.weights.collective_group import (
    DEFAULT_TIMING,
    BroadcastGroup,
    CollectiveTiming,
    Go,
    Hello,
    Offer,
    Ready,
    Rendezvous,
    check_backend,
)
from headway.weights.tcp_link import local_host
from headway.weights.tcp_wire import payload_key, short

_log = logging.getLogger(__name__)
POLL_S = 0.02
JOIN_S = 30.0


class CollectiveReceiver:
    """A ChannelReceiver over torch.distributed.

    Args:
        address: the sender's; run_id, manifest_digest: must equal the learner's; name: for its errors.
        learner_host: in place of an address's 0.0.0.0 or [::].

    Raises:
        StreamError: nobody answers there. WeightError: it is another run, or another model.
        BackendUnavailable: the learner's backend cannot run here.
    """

    def __init__(
        self,
        address: str,
        run_id: str,
        manifest_digest: str,
        *,
        name: str = "receiver",
        learner_host: str = "127.0.0.1",
        timing: CollectiveTiming = DEFAULT_TIMING,
        join_s: float = JOIN_S,
    ) -> None:
        parsed = urllib.parse.urlsplit(address)
        if parsed.scheme != "collective" or not parsed.hostname or not parsed.port:
            raise StreamError(
                f"{address!r} is no address of the collective channel; expected collective://HOST:PORT"
            )
        self._name, self._timing = name, timing
        host = learner_host if parsed.hostname in ("0.0.0.0", "::") else parsed.hostname
        self._rendezvous = Rendezvous(
            host, parsed.port, local_host=local_host(f"tcp://{host}:{parsed.port}"), timeout_s=join_s
        )
        if not self._rendezvous.wait("hello", join_s):
            raise StreamError(f"no answer from the collective channel at {address} after {join_s:.1f} s")
        hello = self._rendezvous.get("hello", Hello)
        assert hello is not None
        for what, theirs, ours in (
            ("run", hello.run_id, run_id),
            ("manifest", hello.manifest_digest, manifest_digest),
        ):
            if theirs != ours:
                raise WeightError(
                    f"the learner's {what} at {address} is {theirs!r}, this receiver's is {ours!r}"
                )
        check_backend(hello.backend)
        self._backend = hello.backend
        self._offer: Offer | None = None
        self._seen = 0
        self._attempt = 0
        self._beat = 0
        self._group: tuple[tuple[int, int, int], BroadcastGroup] | None = None
        self._number = 0
        self._join()

    def _join(self) -> None:
        self._number = self._rendezvous.count("joined", 1)
        self._attempt = 0
        self._live()
        self._rendezvous.put(f"name/{self._number}", f"{self._name}-{self._number}")

    def _live(self) -> None:
        """A sign of life; whoever was dropped joins again."""
        if self._rendezvous.text(f"expelled/{self._number}") is not None:
            self._rendezvous.remove(f"expelled/{self._number}")
            self._drop_group()
            self._join()
            return
        self._beat += 1
        self._rendezvous.put(f"beat/{self._number}", str(self._beat))

    def wait(self, timeout_s: float) -> None:
        """Return when another version has been offered since the last call (ChannelReceiver.wait)."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._look()
            push = 0 if self._offer is None else self._offer.push
            left = deadline - time.monotonic()
            if push != self._seen or left <= 0:
                self._seen = push
                return
            time.sleep(min(POLL_S, left))

    def _look(self) -> None:
        self._live()
        self._offer = self._rendezvous.get("offer", Offer)

    def newest(self, held: PolicyVersion | None, base_digest: str) -> PayloadHeader | None:
        """A delta from `base_digest`, else the whole state, else None (ChannelReceiver.newest)."""
        self._look()
        headers = [] if self._offer is None else self._offer.headers
        if not headers or (base_digest and held is not None and headers[-1].version <= held):
            return None
        deltas = (header for header in headers if base_digest and header.base_digest == base_digest)
        return next(deltas, headers[-1])

    def fetch(self, header: PayloadHeader, into: memoryview, deadline_s: float) -> None:
        """Take part in a broadcast of a payload (ChannelReceiver.fetch).

        Raises:
            WeightError: it was replaced, broke off, or came with another digest.
            DeadlineExceeded: no broadcast in time.
        """
        if into.nbytes != header.num_bytes:
            raise WeightError(f"a destination of {into.nbytes} bytes for a payload of {header.num_bytes}")
        deadline = time.monotonic() + deadline_s
        go = self._await_go(header, deadline_s)
        words = ""
        try:
            if go.error:
                raise WeightError(f"weights {header.version}: {go.error}")
            self._receive(go, into.cast("B"), deadline)
        except Exception as error:
            words = short(str(error)) or repr(error)
            self._drop_group()
            raise
        finally:
            if not go.error:
                self._rendezvous.put(f"done/{self._number}/{self._attempt}", words)

    def _await_go(self, header: PayloadHeader, deadline_s: float) -> Go:
        self._live()
        self._say(payload_key(header), "")
        key = f"go/{self._number}/{self._attempt}"
        deadline = time.monotonic() + deadline_s
        while (left := deadline - time.monotonic()) > 0:
            if self._rendezvous.wait(key, min(left, 1.0)):
                go = self._rendezvous.get(key, Go)
                if go is not None:
                    return go
            number = self._number
            self._live()
            if number != self._number:
                raise WeightError(
                    f"weights {header.version}: the learner had dropped this receiver; it has joined again"
                )
        self._say("", "")  # too late: do not wait for us
        raise DeadlineExceeded(f"no broadcast of weights {header.version} in {deadline_s:.1f} s")

    def _say(self, payload: str, error: str) -> None:
        self._attempt += 1
        self._rendezvous.put(f"ready/{self._number}", Ready(self._attempt, payload, error))

    def _receive(self, go: Go, into: memoryview, deadline: float) -> None:
        place = (go.group, go.rank, go.size)
        if self._group is None or self._group[0] != place:
            self._drop_group()
            made = BroadcastGroup(
                self._rendezvous,
                str(go.group),
                go.rank,
                go.size,
                backend=self._backend,
                stall_s=self._timing.stall_s,
            )
            self._group = (place, made)
        digest = self._group[1].receive(into, deadline)
        if not self._rendezvous.wait(go.digest_key, self._timing.stall_s):
            raise WeightError("the learner did not say which digest the broadcast has")
        expected = self._rendezvous.text(go.digest_key)
        if digest != expected:
            raise WeightError(f"a broadcast came with digest {digest}, the learner sent {expected}")

    def ask_whole(self, reason: str) -> None:
        """Refuse what is offered, in own words, which the learner's publish raises."""
        try:
            self._say("", short(reason) or "no reason given")
        except WeightError as error:
            _log.info("cannot tell the learner: %s", error)

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group[1].close()
            self._group = None

    def close(self) -> None:
        """Leave."""
        self._drop_group()
        try:
            self._rendezvous.put(f"beat/{self._number}", "left")
        except WeightError as error:
            _log.info("cannot say goodbye: %s", error)
