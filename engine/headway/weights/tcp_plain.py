"""Fetching over plain data connections: from the parent that the learner named, and on from where it broke off.

Runs on the thread of whoever fetches, so nothing is written into a destination after the fetch has returned. Waits
for: records of the parent. Unblocked by: its answer or silence (stall_s), another parent, the deadline.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from headway.errors import WireError
from headway.types import PolicyVersion
from headway.weights.chunks import Assembly
from headway.weights.tcp_data import DataClient, Record
from headway.weights.tcp_link import TcpTiming
from headway.weights.tcp_wire import Want

MAX_BAD_CHUNKS = 5
BACKOFF_S = 0.1


class Outcome(Enum):
    """How asking one source ended."""

    COMPLETE = "complete"
    ABSENT = "it does not have the payload, and will not"
    IDLE = "it lives, but its generator does not fetch"
    BROKEN = "cut, unreachable or silent"
    DAMAGED = "what it sends does not match its digests"
    OVER = "the deadline has passed, or the channel is closed"


@dataclass(frozen=True)
class Sources:
    """What a fetch asks of its receiver; any thread may call these.

    Attributes:
        parent: endpoint of the relay to ask, "" for the learner; offered: whether the learner still offers a payload.
        complain: about a relay: (endpoint, payload, silent). stopped: whether the channel is closed.
    """

    parent: Callable[[], str]
    offered: Callable[[str], bool]
    complain: Callable[[str, str, bool], None]
    stopped: Callable[[], bool]


class PlainFetch:
    """Fetches payloads one after another; keeps its connection between them.

    Args:
        learner: endpoint of its data connections; changed: notified when an offer or a chunk has come.
        rejected: counts records that were none, by reason.
    """

    def __init__(
        self,
        learner: str,
        sources: Sources,
        changed: threading.Condition,
        timing: TcpTiming,
        rejected: Counter[str],
    ) -> None:
        self._learner = learner
        self._sources = sources
        self._changed = changed
        self._timing = timing
        self._rejected = rejected
        self._client: DataClient | None = None

    def run(self, key: str, version: PolicyVersion, assembly: Assembly, deadline: float) -> str:
        """Complete the assembly, if it can be done before the deadline; why it will never be, or ""."""
        num_bad = 0
        while not assembly.complete:
            relay = self._sources.parent()
            had = assembly.num_ready
            outcome = self._ask(relay or self._learner, Want(key, version, had), assembly, deadline)
            if outcome in (Outcome.COMPLETE, Outcome.OVER):
                return ""
            if outcome is Outcome.DAMAGED:
                num_bad += 1
                if not relay and num_bad >= MAX_BAD_CHUNKS:
                    return f"chunk {assembly.num_ready} of {key} from {self._learner} is damaged"
            if outcome is Outcome.ABSENT and not (relay and self._sources.offered(key)):
                return f"weights {version} have been replaced by newer ones"
            # A cut after some progress is worth another try before anybody is accused.
            if relay and not (outcome is Outcome.BROKEN and assembly.num_ready > had):
                silent = outcome in (Outcome.BROKEN, Outcome.DAMAGED)
                self._sources.complain(relay, key, silent)
            with self._changed:
                self._changed.wait_for(lambda relay=relay: self._sources.parent() != relay, BACKOFF_S)
        return ""

    def _ask(self, endpoint: str, want: Want, assembly: Assembly, deadline: float) -> Outcome:
        left = deadline - time.monotonic()
        if left <= 0 or self._sources.stopped():
            return Outcome.OVER
        try:
            client = self._connect(endpoint, min(left, self._timing.stall_s))
            client.request(want)
            outcome = self._stream(client, assembly, deadline)
        except WireError as fault:
            self._rejected[fault.reason] += 1
            outcome = Outcome.DAMAGED
        except OSError:
            outcome = Outcome.OVER if time.monotonic() >= deadline else Outcome.BROKEN
        if outcome is not Outcome.COMPLETE:
            self.close()  # more of the answer may be on its way
        return outcome

    def _connect(self, endpoint: str, timeout_s: float) -> DataClient:
        if self._client is not None and self._client.endpoint != endpoint:
            self.close()
        if self._client is None:
            self._client = DataClient(endpoint, timeout_s)
        return self._client

    def _stream(self, client: DataClient, assembly: Assembly, deadline: float) -> Outcome:
        moved_at = time.monotonic()
        while not assembly.complete:
            now = time.monotonic()
            if now >= deadline or self._sources.stopped():
                return Outcome.OVER
            record = client.receive(assembly, min(deadline - now, self._timing.stall_s))
            if record is Record.CHUNK:
                moved_at = now
                with self._changed:
                    self._changed.notify_all()  # who asks us may have it now
            elif record is Record.ABSENT:
                return Outcome.ABSENT
            elif record is Record.IDLE and now - moved_at > self._timing.stall_s:
                return Outcome.IDLE
        return Outcome.COMPLETE

    def close(self) -> None:
        """Drop the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None
