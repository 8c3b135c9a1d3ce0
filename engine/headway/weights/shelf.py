"""What a point-to-point learner has at hand: the newest version's payloads, and older ones still being fetched."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from headway.weights.channel import Payload, PayloadHeader, Publication
from headway.weights.chunks import ChunkedPayload
from headway.weights.tcp_wire import Want, payload_key

MAX_OFFERED = 16
"""Payloads of a version: the nearest bases, and the whole state."""


@dataclass
class _Entry:
    header: PayloadHeader
    make: Callable[[], Payload | None]
    source: ChunkedPayload | None = None
    wanted_at: float = 0.0


class Shelf:
    """Payloads by key, made when they are first wanted. Any thread may use it.

    Args:
        chunk_bytes: of every payload; idle_s: unwanted for so long, an older payload's memory is let go of.
    """

    def __init__(self, chunk_bytes: int, idle_s: float) -> None:
        self._chunk_bytes, self._idle_s = chunk_bytes, idle_s
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._newest: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, publication: Publication) -> list[PayloadHeader]:
        """Take a newer version's payloads in; their headers, deltas first, the whole state last."""
        entries = [
            _Entry(delta.header, lambda delta=delta: delta) for delta in publication.deltas[: MAX_OFFERED - 1]
        ]
        entries.append(_Entry(publication.whole_header, publication.whole))
        with self._lock:
            self._newest = frozenset(payload_key(entry.header) for entry in entries)
            self._clear(time.monotonic())
            self._entries.update({payload_key(entry.header): entry for entry in entries})
        return [entry.header for entry in entries]

    def find(self, want: Want) -> ChunkedPayload | None:
        """The payload that is wanted; None when it has been replaced, or is about to be."""
        with self._lock:
            entry = self._entries.get(want.payload)
            if entry is None:
                return None
            entry.wanted_at = time.monotonic()
            if entry.source is None:
                payload = entry.make()
                if payload is None:
                    return None
                entry.source = ChunkedPayload(payload.parts, entry.header.num_bytes, self._chunk_bytes)
            return entry.source

    def clear(self) -> None:
        """Let go of older payloads that nobody is fetching; transfers in progress are allowed to end."""
        with self._lock:
            self._clear(time.monotonic())

    def _clear(self, now: float) -> None:
        for key, entry in list(self._entries.items()):
            unwanted = entry.source is None or now - entry.wanted_at > self._idle_s
            if key not in self._newest and unwanted:
                del self._entries[key]
