"""The store channel: versions as objects in a directory or an object store, for hosts that share nothing else.

    write order   payloads, marker, pointer, clean      a crash between any two leaves the old version newest
    clean order   markers, then their payloads          a reader that comes too late is told, and asks for the next

The sender writes on a thread of its own: publish hands over and returns, and a version that is still waiting when
the next one comes is skipped (that one then brings a delta from what is in the store, or a whole state). Readers
go from anchor to anchor or along deltas, whichever is less to read, and never back to an older version, so that
neither a late writer nor a mount that shows the past can undo a push.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import xxhash

from headway.errors import DeadlineExceeded, UnsupportedOption, WeightError
from headway.types import PolicyVersion
from headway.weights.blobs import Blobs, DirectoryBlobs
from headway.weights.channel import Payload, Publication
from headway.weights.store_index import (
    MAX_MARKER_BYTES,
    Marker,
    StoredPayload,
    removable,
    seal,
    unseal_marker,
    unseal_pointer,
    version_name,
)

_log = logging.getLogger(__name__)
POINTER = "newest"
MIN_KEEP = 2
LEASE_S = 120.0
MAX_FAILED = 3
CLOSE_S = 30.0


class Lease(msgspec.Struct, frozen=True):
    """A reader's claim on a version and all later ones, until a Unix time."""

    version: PolicyVersion
    until: float


class StoreWriter:
    """Writes publications, one at a time.

    Args:
        run_id, manifest_digest: in every marker; keep: whole states that stay, at least 2.
        now: Unix time, for leases.

    Raises:
        UnsupportedOption: keep below 2: a reader could lose what it reads.
    """

    def __init__(
        self,
        blobs: Blobs,
        run_id: str,
        manifest_digest: str,
        *,
        keep: int = MIN_KEEP,
        now: Callable[[], float] = time.time,
    ) -> None:
        if keep < MIN_KEEP:
            raise UnsupportedOption(f"push.store_keep = {keep}; at least {MIN_KEEP} whole states must stay")
        self._blobs, self._run_id, self._manifest_digest = blobs, run_id, manifest_digest
        self._keep, self._now = keep, now
        if isinstance(blobs, DirectoryBlobs):
            blobs.clear_temporary()
        blobs.refresh()
        self._markers = load_markers(blobs, {})

    def write(self, publication: Publication, deadline: float) -> bool:
        """Make it the newest version in the store.

        Args:
            deadline: time.monotonic() at which writing is given up.

        Returns:
            False when its whole state was needed and is gone already: a newer publication follows.

        Raises:
            WeightError: the store already has this version or a newer one. OSError: of the medium.
            DeadlineExceeded: not written in time; the store is as it was before.
        """
        newest = max((marker.version for marker in self._markers.values()), default=None)
        if newest is not None and publication.version <= newest:
            raise WeightError(
                f"the weight store {self._blobs.url} has version {newest}; {publication.version} is not newer: "
                "is another learner of this run alive?"
            )
        forms = self._choose(publication)
        if forms is None:
            return False

        def check() -> None:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"writing weights {publication.version} to {self._blobs.url}")

        stored = [self._put(payload, check) for payload in forms]
        marker = Marker(
            self._run_id, self._manifest_digest, publication.version, publication.state_digest, stored
        )
        name = f"markers/{version_name(publication.version)}"
        self._blobs.write(name, [seal(marker)], check)
        self._markers[name] = marker
        self._advance(publication.version, check)
        self._blobs.commit()
        self._clean()
        return True

    def _choose(self, publication: Publication) -> list[Payload] | None:
        """A delta from what the store's newest marker leads to; a whole state for joiners and where there is none."""
        newest = max(self._markers.values(), key=lambda marker: marker.version, default=None)
        base = "" if newest is None else newest.state_digest
        delta = next((each for each in publication.deltas if each.header.base_digest == base), None)
        asks = self._blobs.names("asks")
        if delta is not None and not publication.anchor and not asks:
            return [delta]
        whole = publication.whole()
        if whole is None:
            return None if delta is None else [delta]
        for ask in asks:
            self._blobs.delete(ask)
        return [whole] if delta is None else [delta, whole]

    def _put(self, payload: Payload, check: Callable[[], None]) -> StoredPayload:
        header = payload.header
        name = f"payloads/{version_name(header.version)}.{header.kind}.{header.base_digest or 'whole'}"
        digest = xxhash.xxh3_64()

        def digested() -> Iterator[memoryview]:
            for part in payload.parts:
                digest.update(part)
                yield part

        self._blobs.write(name, digested(), check)
        return StoredPayload(header, name, digest.hexdigest())

    def _advance(self, version: PolicyVersion, check: Callable[[], None]) -> None:
        """Compare and advance: the pointer never goes back, whoever else writes."""
        with self._blobs.locked(POINTER):
            present = unseal_pointer(self._blobs.read(POINTER, MAX_MARKER_BYTES))
            if present is not None and present >= version:
                raise WeightError(
                    f"the weight store {self._blobs.url} points at {present} already: another learner of this run "
                    f"is alive, and {version} is not newer"
                )
            self._blobs.write(POINTER, [_seal_version(version)], check)

    def _clean(self) -> None:
        """Failing to remove is no failure of the push; it is tried again after the next one."""
        try:
            for marker in removable(self._markers.values(), self._keep, self._leased()):
                name = f"markers/{version_name(marker.version)}"
                self._blobs.delete(name)
                for payload in marker.payloads:
                    self._blobs.delete(payload.name)
                del self._markers[name]
            self._clear_orphans()
        except OSError as error:
            _log.warning("cannot clean the weight store %s: %s", self._blobs.url, error)

    def _clear_orphans(self) -> None:
        """Payloads of versions whose marker was never written: their writer died or gave up."""
        known = {payload.name for marker in self._markers.values() for payload in marker.payloads}
        for name in self._blobs.names("payloads"):
            if name not in known:
                self._blobs.delete(name)

    def _leased(self) -> list[PolicyVersion]:
        leased: list[PolicyVersion] = []
        for name in self._blobs.names("leases"):
            try:
                lease = msgspec.json.decode(self._blobs.read(name, 4096) or b"", type=Lease)
            except msgspec.MsgspecError:
                lease = None
            if lease is not None and lease.until > self._now():
                leased.append(lease.version)
            else:
                self._blobs.delete(name)
        return leased


class StoreSender:
    """A ChannelSender over a store.

    Args:
        blobs: of this run alone; the rest as in StoreWriter.
    """

    def __init__(self, blobs: Blobs, run_id: str, manifest_digest: str, *, keep: int = MIN_KEEP) -> None:
        self._blobs = blobs
        self._writer = StoreWriter(blobs, run_id, manifest_digest, keep=keep)
        self._changed = threading.Condition()
        self._waiting: tuple[Publication, float] | None = None
        self._busy = False
        self._closing = False
        self._num_failed = 0
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="headway-weights-store", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """What receivers are opened with."""
        return f"store:{self._blobs.url}"

    def publish(self, publication: Publication, deadline_s: float) -> None:
        """Hand over; an older publication that still waits is skipped (ChannelSender.publish).

        Raises:
            WeightError: the last MAX_FAILED versions could not be written, with the last one's cause; this one
                is tried all the same.
        """
        with self._changed:
            if self._closing or not self._thread.is_alive():
                raise WeightError(f"the weight store {self._blobs.url} is closed")
            self._waiting = (publication, time.monotonic() + deadline_s)
            self._changed.notify_all()
            failure = self._failure if self._num_failed >= MAX_FAILED else None
        if failure is not None:
            raise WeightError(
                f"{self._num_failed} versions in a row could not be written to the weight store "
                f"{self._blobs.url}: {failure}"
            ) from failure

    def flush(self, deadline_s: float) -> None:
        """Wait until what was handed over is written.

        Raises:
            WeightError: it could not be. DeadlineExceeded: it still waits after deadline_s.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: self._waiting is None and not self._busy, deadline_s)
            if not done:
                raise DeadlineExceeded(
                    f"weights are still being written to {self._blobs.url} after {deadline_s:g} s"
                )
            if self._failure is not None:
                raise WeightError(
                    f"weights could not be written to {self._blobs.url}: {self._failure}"
                ) from self._failure

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closing)
                if self._waiting is None:
                    return
                (publication, deadline), self._waiting = self._waiting, None
                self._busy = True
            failure: Exception | None = None
            try:
                self._writer.write(publication, deadline)
            except (
                Exception
            ) as error:  # of the medium, which fsspec lets through as it comes; told by publish
                _log.warning(
                    "version %s was not written to %s: %s", publication.version, self._blobs.url, error
                )
                failure = error
            with self._changed:
                self._busy = False
                self._failure = failure
                self._num_failed = 0 if failure is None else self._num_failed + 1
                self._changed.notify_all()

    def close(self) -> None:
        """Write what was handed over, for at most CLOSE_S, and end; what is stored stays."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            _log.error(
                "weights are still being written to %s after %.0f s; left behind", self._blobs.url, CLOSE_S
            )


def load_markers(blobs: Blobs, known: dict[str, Marker]) -> dict[str, Marker]:
    """Every marker that is there and whole, by name; those that are known are not read again."""
    markers: dict[str, Marker] = {}
    for name in blobs.names("markers"):
        marker = known.get(name) or unseal_marker(blobs.read(name, MAX_MARKER_BYTES))
        if marker is not None:
            markers[name] = marker
    return markers


def _seal_version(version: PolicyVersion) -> bytes:
    body = msgspec.json.encode(version)
    return xxhash.xxh3_64_hexdigest(body).encode() + b"\n" + body
