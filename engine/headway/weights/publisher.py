"""The learner's core of a push: cast, compare, digest, encode, and hand over to a channel.

    publish(flat, version)      flat must stand still until it returns

Two ways to hold the published state, which is also the old value that the next delta is taken against:

    one private buffer      cast and compared in one pass, in place (tcp, store, collective)
    the channel's buffers   cast straight into memory that readers map, compared with the newest (shm)

A Publisher is used by one thread at a time; Publication.whole may be called from any.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from headway.errors import DeadlineExceeded, WeightError
from headway.types import Manifest, PolicyVersion
from headway.weights.channel import ChannelSender, Payload, PayloadHeader, PayloadKind, Publication
from headway.weights.digest import StateDigest, byte_view
from headway.weights.payload import encode_delta, zstandard
from headway.weights.served import published_dtype
from headway_kernels.weight_delta import BLOCK_ELEMENTS, Delta, cast_and_diff, merge

_log = logging.getLogger(__name__)
MAX_LOST = 3
CHUNK_BLOCKS = 8  # 512 Ki elements: cast, compared and digested while they are in the second-level cache
DELTA_SHARE = 0.5  # a delta above this share of the whole state is not worth a second form


@runtime_checkable
class MappedSender(Protocol):
    """A sender whose receivers read the published state where the learner writes it."""

    def reserve(self, deadline_s: float) -> Tensor:
        """A buffer for the next state, of the published dtype; the next publish makes it the newest."""
        ...


@dataclass(frozen=True)
class Published:
    """What one publish did.

    Attributes:
        digest: of the state (headway.weights.digest).
        num_bytes: that a receiver of the version before needs: the delta's, or the whole state's.
        num_changed: elements whose bits differ from the version before; all of them the first time.
    """

    version: PolicyVersion
    digest: str
    num_bytes: int
    num_changed: int


class WeightPublisher:
    """Publishes states through a channel.

    Args:
        sender: the channel's end; manifest: of the policy.
        anchor: every so many publishes the whole state is sent too, for joiners.
        compression: of deltas, "none" or "zstd".
        merged: earlier versions from which a delta is offered as well; for channels without a memory of their own.
        deadline_s: for a channel that waits for its readers.

    Raises:
        UnsupportedOption: zstd is not installed.
    """

    def __init__(
        self,
        sender: ChannelSender,
        manifest: Manifest,
        *,
        anchor: int = 8,
        compression: str = "none",
        merged: int = 1,
        deadline_s: float = 60.0,
    ) -> None:
        if compression == "zstd":
            zstandard()
        self.manifest = manifest
        self._sender = sender
        self._anchor, self._compression, self._merged = anchor, compression, merged
        self._deadline_s = deadline_s
        self._dtype = published_dtype(manifest)
        self._lock = threading.Lock()
        self._state: Tensor | None = None
        self._digest = StateDigest(manifest.num_elements, self._dtype.itemsize)
        self._version: PolicyVersion | None = None
        self._count = 0
        self._num_lost = 0
        self._recent: list[
            tuple[str, Delta]
        ] = []  # (base digest, delta from it to the newest), newest base first

    @property
    def address(self) -> str:
        """What receivers open."""
        return self._sender.address

    def publish(self, flat: Tensor, version: PolicyVersion) -> Published:
        """Make `flat` the newest version.

        Args:
            flat: fp32 [num_elements], contiguous; cast to the published dtype, to the nearest even.
            version: must be newer than the last.

        Raises:
            WeightError, DeadlineExceeded: version is not newer; the channel's readers hold its memory; or the
                channel could not hand over MAX_LOST versions in a row. One that it could not is a warning: the
                next carries all that changed, and whoever missed this one is not granted work until then.
        """
        if self._version is not None and version <= self._version:
            raise WeightError(f"version {version} is not newer than the published {self._version}")
        base = self._digest.hex if self._version is not None else ""
        with self._lock:
            if isinstance(self._sender, MappedSender):
                delta, num_changed = self._write_mapped(self._sender.reserve(self._deadline_s), flat)
            else:
                delta, num_changed = self._write_private(flat)
            self._version = version
        publication = self._publication(delta, base)
        self._hand_over(publication)
        self._count += 1
        smallest = publication.deltas[0].header if publication.deltas else publication.whole_header
        return Published(version, publication.state_digest, smallest.num_bytes, num_changed)

    def _hand_over(self, publication: Publication) -> None:
        try:
            self._sender.publish(publication, self._deadline_s)
        except (WeightError, DeadlineExceeded) as error:
            self._num_lost += 1
            if self._num_lost >= MAX_LOST:
                raise
            _log.warning(
                "weights %s did not get through (%d in a row): %s", publication.version, self._num_lost, error
            )
        else:
            self._num_lost = 0

    def _write_private(self, flat: Tensor) -> tuple[Delta | None, int]:
        """Cast into the one buffer; the delta, None for the first version, and how many elements changed."""
        first = self._state is None
        if self._state is None:
            self._state = torch.zeros(self.manifest.num_elements, dtype=self._dtype)
        delta = cast_and_diff(flat, self._state)
        data = byte_view(self._state)
        size = self._digest.block_bytes
        touched = range(delta.num_blocks) if first else np.flatnonzero(delta.formats).tolist()
        for block in touched:
            self._digest.read(block, data[block * size : (block + 1) * size])
        return (None, self.manifest.num_elements) if first else (delta, delta.num_changed)

    def _write_mapped(self, target: Tensor, flat: Tensor) -> tuple[Delta | None, int]:
        """Cast into a buffer that receivers map; the delta from the newest, None where it would not be used.

        Chunk by chunk, so that what the newest buffer held, the cast, the comparison and the digest read and write
        the second-level cache.
        """
        old, self._state = self._state, target
        most = int(DELTA_SHARE * self.manifest.num_bytes)
        self._digest = StateDigest(self.manifest.num_elements, self._dtype.itemsize)
        data, size = byte_view(target), self._digest.block_bytes
        step = CHUNK_BLOCKS * BLOCK_ELEMENTS
        scratch = np.empty(step * self._dtype.itemsize, np.uint8)
        pieces: list[Delta] = []
        num_changed = num_bytes = 0
        for first, start in enumerate(range(0, len(flat), step)):
            part = target[start : start + step]
            if old is not None:
                part.copy_(old[start : start + step])
            piece = cast_and_diff(flat[start : start + step], part, payload=scratch)
            num_changed, num_bytes = num_changed + piece.num_changed, num_bytes + piece.payload.nbytes
            if old is not None and num_bytes <= most:
                pieces.append(dataclasses.replace(piece, payload=piece.payload.copy()))
            block = first * CHUNK_BLOCKS
            self._digest.read(block, data[block * size : (block + CHUNK_BLOCKS) * size])
        if old is None:
            return None, self.manifest.num_elements
        return (_joined(pieces, len(flat)) if num_bytes <= most else None), num_changed

    def _publication(self, delta: Delta | None, base: str) -> Publication:
        version, state = self._version, self._digest.hex
        assert version is not None
        most = DELTA_SHARE * self.manifest.num_bytes
        if delta is None or delta.num_bytes > most:
            self._recent = []
        else:
            older = [(earlier, merge(before, delta)) for earlier, before in self._recent[: self._merged]]
            self._recent = [(base, delta), *((each, one) for each, one in older if one.num_bytes <= most)]
        size = self.manifest.num_bytes
        return Publication(
            version=version,
            state_digest=state,
            deltas=tuple(
                encode_delta(each, version, earlier, state, self._compression)
                for earlier, each in self._recent
            ),
            whole_header=PayloadHeader(version, PayloadKind.WHOLE, "", state, size, state),
            whole=self._whole_of(version, state),
            anchor=self._count % self._anchor == 0,
        )

    def _whole_of(self, version: PolicyVersion, state: str) -> Callable[[], Payload | None]:
        def whole() -> Payload | None:
            with self._lock:
                if self._version != version or self._state is None:
                    return None
                copy = self._state.clone()
            header = PayloadHeader(version, PayloadKind.WHOLE, "", state, self.manifest.num_bytes, state)
            return Payload(header, (byte_view(copy),))

        return whole

    def close(self) -> None:
        """Close the channel."""
        self._state = None
        self._sender.close()


def _joined(pieces: list[Delta], num_elements: int) -> Delta:
    """Deltas of consecutive chunks of whole blocks as one."""
    sizes = np.concatenate([np.diff(piece.offsets) for piece in pieces])
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return Delta(
        num_elements,
        pieces[0].dtype,
        np.concatenate([piece.formats for piece in pieces]),
        offsets,
        np.concatenate([piece.payload for piece in pieces]),
        sum(piece.num_changed for piece in pieces),
    )
