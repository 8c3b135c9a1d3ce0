"""A generator's end of the store channel: follows the pointer, and reads payloads under a lease.

Used by one thread, which waits in `wait` (between two looks at the pointer) and in `fetch` (for the medium) only.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable

import msgspec
import xxhash

from headway.errors import DeadlineExceeded, WeightError
from headway.types import PolicyVersion
from headway.weights.blobs import Blobs
from headway.weights.channel import PayloadHeader
from headway.weights.store import LEASE_S, POINTER, Lease, load_markers
from headway.weights.store_index import MAX_MARKER_BYTES, Marker, next_hop, unseal_pointer, version_name

_log = logging.getLogger(__name__)


class StoreReceiver:
    """A ChannelReceiver over a store.

    Args:
        blobs: as the sender's; run_id, manifest_digest: what its markers must name.
        poll_s: between two looks at the pointer.

    Raises:
        WeightError: the store holds weights of another run or model.
    """

    def __init__(
        self,
        blobs: Blobs,
        run_id: str,
        manifest_digest: str,
        *,
        poll_s: float = 0.5,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._blobs, self._run_id, self._manifest_digest = blobs, run_id, manifest_digest
        self._poll_s, self._now = poll_s, now
        self._name = uuid.uuid4().hex[:16]
        self._markers: dict[str, Marker] = {}
        self._pointer: PolicyVersion | None = None
        self._seen: PolicyVersion | None = None
        self._look()

    def _look(self) -> None:
        """Read the pointer, and the markers when it has moved."""
        self._blobs.refresh()
        pointer = unseal_pointer(self._blobs.read(POINTER, MAX_MARKER_BYTES))
        if pointer is not None and self._pointer is not None and pointer <= self._pointer:
            return  # a mount may show the past
        markers = load_markers(self._blobs, self._markers)
        if pointer is None:  # none yet, or torn by a crash: the newest marker names what is whole
            pointer = max((marker.version for marker in markers.values()), default=None)
        if pointer is None or (self._pointer is not None and pointer <= self._pointer):
            return
        for marker in markers.values():
            for what, theirs, ours in (
                ("run", marker.run_id, self._run_id),
                ("manifest", marker.manifest_digest, self._manifest_digest),
            ):
                if theirs != ours:
                    raise WeightError(
                        f"the weight store {self._blobs.url} holds {what} {theirs!r}; this receiver's is {ours!r}"
                    )
        if any(marker.version == pointer for marker in markers.values()):
            self._markers, self._pointer = markers, pointer

    def wait(self, timeout_s: float) -> None:
        """Look at the pointer until it moves (ChannelReceiver.wait)."""
        deadline = time.monotonic() + timeout_s
        while self._pointer == self._seen and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(self._poll_s, left))
            self._try(self._look)
        self._seen = self._pointer

    def newest(self, held: PolicyVersion | None, base_digest: str) -> PayloadHeader | None:
        """The next hop towards the newest version (ChannelReceiver.newest)."""
        self._try(self._look)
        hop = next_hop(self._published(), held, base_digest)
        return None if hop is None else hop.header

    def _published(self) -> list[Marker]:
        """Markers up to the pointer: one beyond it belongs to a push that is not finished."""
        return [each for each in self._markers.values() if self._pointer and each.version <= self._pointer]

    def fetch(self, header: PayloadHeader, into: memoryview, deadline_s: float) -> None:
        """Read a payload, under a lease (ChannelReceiver.fetch).

        Raises:
            WeightError: it is gone, torn, or the medium fails.
            DeadlineExceeded: not complete in time.
        """
        stored = next(
            (one for marker in self._published() for one in marker.payloads if one.header == header), None
        )
        if stored is None or header.num_bytes != into.nbytes:
            raise WeightError(
                f"{header.kind} of weights {header.version} is not in the store {self._blobs.url}"
            )
        deadline = time.monotonic() + deadline_s
        try:
            self._lease(header.version)
            digest, num_bytes = xxhash.xxh3_64(), 0
            leased_at = time.monotonic()
            for piece in self._blobs.pieces(stored.name, into.cast("B")):
                digest.update(piece)
                num_bytes += piece.nbytes
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"{num_bytes} of {header.num_bytes} bytes of weights {header.version} came from "
                        f"{self._blobs.url} in {deadline_s:.1f} s"
                    )
                if time.monotonic() - leased_at > LEASE_S / 4:
                    leased_at = time.monotonic()
                    self._lease(header.version)
        except OSError as error:
            if isinstance(error, DeadlineExceeded):
                raise
            raise WeightError(f"reading {stored.name} from {self._blobs.url}: {error}") from error
        finally:
            self._try(lambda: self._blobs.delete(f"leases/{self._name}"))
        if num_bytes != header.num_bytes or digest.hexdigest() != stored.digest:
            self._markers.pop(
                f"markers/{version_name(header.version)}", None
            )  # read again, if it is still there
            self._pointer = None if self._pointer == header.version else self._pointer
            raise WeightError(
                f"{stored.name} in {self._blobs.url} has {num_bytes} bytes of digest {digest.hexdigest()}, its "
                f"marker says {header.num_bytes} of {stored.digest}: it has been removed or damaged"
            )

    def _lease(self, version: PolicyVersion) -> None:
        lease = Lease(version, self._now() + LEASE_S)
        self._blobs.write(f"leases/{self._name}", [msgspec.json.encode(lease)], lambda: None)
        self._blobs.commit()

    def ask_whole(self, reason: str) -> None:
        """Leave a note for the writer; its next version comes as a whole state."""
        note = reason.encode("utf-8", "backslashreplace")[:4096]

        def leave() -> None:
            self._blobs.write(f"asks/{self._name}", [note], lambda: None)
            self._blobs.commit()

        self._try(leave)

    def _try(self, action: Callable[[], None]) -> None:
        """What can wait for the next time is not worth an error."""
        try:
            action()
        except OSError as error:
            _log.info("weight store %s: %s", self._blobs.url, error)

    def close(self) -> None:
        """Take the lease and the note back."""
        self._try(lambda: self._blobs.delete(f"leases/{self._name}"))
        self._try(lambda: self._blobs.delete(f"asks/{self._name}"))
