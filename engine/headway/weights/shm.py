"""The `shm` channel: whole states and deltas through a few buffers of shared memory on one host.

Layout: a control block (headway.weights.control_block), then `num_buffers` times a whole published state and room
for one delta that leads to it. The learner casts straight into a buffer that is neither the newest nor pinned by a
live reader; a reader pins what it verifies, copies from, or serves from, so nothing is ever overwritten under it.

When every buffer is pinned the writer asks for them back and waits, within a deadline; readers let a staged push go
at once, and copy what they serve out of the buffer at their next step. The dead hold nothing.
"""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np
from torch import Tensor

from headway.errors import DeadlineExceeded, WeightError
from headway.types import Manifest, PolicyVersion
from headway.weights.channel import PayloadHeader, PayloadKind, Publication
from headway.weights.control_block import HEADER_BYTES, ControlBlock, Slot
from headway.weights.digest import byte_view, tensor_over
from headway.weights.segment import SharedSegment
from headway.weights.served import published_dtype

SCHEME = "shm:"
DELTA_SHARE = 8  # a delta above an eighth of the whole state is not published: the copy is cheaper
POLL_S = 0.0005
PIN_CHECK_S = 0.05


class MappedReceiver(Protocol):
    """A receiver whose payloads can be read where they lie."""

    def pin(self, header: PayloadHeader) -> memoryview | None:
        """The payload in place, unchanged until it is unpinned; None if it is gone already."""
        ...

    def unpin(self, header: PayloadHeader) -> None:
        """Done with it."""
        ...

    def wanted(self, header: PayloadHeader) -> bool:
        """Whether the learner needs the memory of this pinned payload back."""
        ...


class ShmSender:
    """The learner's end.

    Args:
        name: of the segment; manifest: of the policy; num_buffers: 3 serve one reader without ever waiting.

    Raises:
        WeightError: the segment cannot be made.
    """

    def __init__(self, name: str, manifest: Manifest, *, num_buffers: int = 3) -> None:
        self._name = name
        self._layout = _Layout(manifest, num_buffers)
        self._segment = SharedSegment(name, self._layout.num_bytes)
        self._control = ControlBlock(self._segment)
        self._buffers = [self._layout.state(self._segment, index) for index in range(num_buffers)]
        for index, buffer in enumerate(self._buffers):
            buffer.zero_()  # first touch of a mapping costs four times a copy: pay it at start
            np.frombuffer(self._layout.delta(self._segment, index), np.uint8)[:] = 0
        self._begun: int | None = None
        self._control.format(manifest.digest, num_buffers)

    @property
    def address(self) -> str:
        """See ChannelSender."""
        return SCHEME + self._name

    def reserve(self, deadline_s: float) -> Tensor:
        """A buffer to write the next state into, of the published dtype; `publish` makes it the newest.

        Waits for: a buffer that nobody reads. Unblocked by: a reader's next decode step, or its death.

        Raises:
            DeadlineExceeded: all of them are still read; names the processes.
        """
        end = time.monotonic() + deadline_s
        while self._begun is None:
            self._begun = self._begin_one()
            if self._begun is None:
                if time.monotonic() > end:
                    raise DeadlineExceeded(self._who_reads(deadline_s))
                time.sleep(POLL_S)
        return self._buffers[self._begun]

    def _begin_one(self) -> int | None:
        newest = self._control.newest
        others = [index for index in range(len(self._buffers)) if index != newest]
        for index in sorted(others, key=self._control.sequence):
            if self._control.begin(index):
                return index
        for index in others:
            self._control.want(index)
        return None

    def _who_reads(self, deadline_s: float) -> str:
        pids = sorted({pid for index in range(len(self._buffers)) for pid in self._control.readers_of(index)})
        return (
            f"no buffer of shared weights {self._name} became free in {deadline_s:g} s: read by the processes "
            f"{', '.join(map(str, pids))}; a generator that does not turn must be stopped"
        )

    def publish(self, publication: Publication, deadline_s: float) -> None:
        """Make the reserved buffer, which now holds the publication's whole state, the newest. Never waits."""
        index = self._begun
        assert index is not None, "publish without reserve"
        base, size, digest = "", 0, ""
        room = self._layout.delta(self._segment, index)
        if publication.deltas and publication.deltas[0].header.num_bytes <= len(room):
            payload = publication.deltas[0]
            for part in payload.parts:
                room[size : size + len(part)] = part
                size += len(part)
            base, digest = payload.header.base_digest, payload.header.payload_digest
        slot = Slot(0, publication.version, publication.state_digest, base, size, digest)
        self._control.finish(index, slot)
        self._control.publish(index)
        self._begun = None

    def close(self) -> None:
        """Remove the segment; readers keep what they have mapped."""
        self._buffers = []
        self._control.close()
        self._segment.close()


class ShmReceiver:
    """A generator's end.

    Args:
        name: of the segment; manifest: of this side's policy, which must equal the learner's.
        whole_only: name whole states only (for a reader that serves from the buffers).

    Raises:
        WeightError: no such segment, or it belongs to another manifest.
    """

    def __init__(self, name: str, manifest: Manifest, *, whole_only: bool = False) -> None:
        self._whole_only = whole_only
        self._segment = SharedSegment(name, None)
        self._control = ControlBlock(self._segment)
        self._layout = _Layout(manifest, self._control.check(manifest.digest))
        self._layout.check(self._segment)
        self._row = self._control.join()
        self._seen: tuple[int | None, int] = (None, 0)
        self._pins: dict[PayloadHeader, int] = {}

    def wait(self, timeout_s: float) -> None:
        """See ChannelReceiver."""
        end = time.monotonic() + timeout_s
        while self._mark() == self._seen and time.monotonic() < end:
            time.sleep(min(2 * POLL_S, timeout_s))

    def _mark(self) -> tuple[int | None, int]:
        newest = self._control.newest
        return newest, 0 if newest is None else self._control.sequence(newest)

    def newest(self, held: PolicyVersion | None, base_digest: str) -> PayloadHeader | None:
        """See ChannelReceiver: a chain of deltas from `base_digest` if it is all there, else the whole state."""
        self._seen = self._mark()
        newest = self._control.newest
        slot = None if newest is None else self._control.read(newest)
        if newest is None or slot is None or (base_digest and held is not None and slot.version <= held):
            return None
        if base_digest and not self._whole_only:
            hop = self._hop(slot, base_digest)
            if hop is not None:
                return hop
        size = self._layout.state_bytes
        return PayloadHeader(slot.version, PayloadKind.WHOLE, "", slot.state_digest, size, slot.state_digest)

    def _hop(self, newest: Slot, base_digest: str) -> PayloadHeader | None:
        """The first delta on the way from `base_digest` to the newest state."""
        slots = [self._control.read(index) for index in range(self._layout.num_buffers)]
        older = sorted((slot for slot in slots if slot is not None), key=lambda slot: slot.version)
        slot: Slot | None = newest
        while slot is not None:
            if not slot.delta_bytes:
                return None
            if slot.base_digest == base_digest:
                return PayloadHeader(
                    slot.version, PayloadKind.DELTA, base_digest, slot.state_digest, slot.delta_bytes,
                    slot.delta_digest,
                )  # fmt: skip
            before = [each for each in older if each.version < slot.version]
            slot = before[-1] if before and before[-1].state_digest == slot.base_digest else None
        return None

    def fetch(self, header: PayloadHeader, into: memoryview, deadline_s: float) -> None:
        """See ChannelReceiver."""
        found = self.pin(header)
        if found is None:
            raise WeightError(f"version {header.version} is no longer in {self._segment.path.name}")
        into[:] = found
        self.unpin(header)

    def pin(self, header: PayloadHeader) -> memoryview | None:
        """See MappedReceiver."""
        for index in range(self._layout.num_buffers):
            slot = self._control.read(index)
            if slot is None or slot.state_digest != header.state_digest or slot.version != header.version:
                continue
            if index in self._pins.values() or not self._control.pin(self._row, index, slot.sequence):
                continue
            self._pins[header] = index
            if header.kind is PayloadKind.WHOLE:
                return byte_view(self._layout.state(self._segment, index))
            return self._layout.delta(self._segment, index)[: header.num_bytes]
        return None

    def unpin(self, header: PayloadHeader) -> None:
        """See MappedReceiver."""
        index = self._pins.pop(header)
        self._control.unpin(self._row, index)

    def wanted(self, header: PayloadHeader) -> bool:
        """See MappedReceiver."""
        return bool(self._control.wanted(self._row) & (1 << self._pins[header]))

    def ask_whole(self, reason: str) -> None:
        """Nothing to ask for: the whole state is always there."""

    def close(self) -> None:
        """Let go of the segment. Tensors that still view it keep their pages, not their pins."""
        self._control.leave(self._row)
        self._control.close()
        self._segment.close()


class _Layout:
    """Where the buffers of a segment are."""

    def __init__(self, manifest: Manifest, num_buffers: int) -> None:
        self.num_buffers = num_buffers
        self.state_bytes = manifest.num_bytes
        self._dtype = published_dtype(manifest)
        self._num_elements = manifest.num_elements
        self._state_stride = _pages(manifest.num_bytes)
        self._delta_stride = _pages(manifest.num_bytes // DELTA_SHARE)
        self.num_bytes = HEADER_BYTES + num_buffers * (self._state_stride + self._delta_stride)

    def check(self, segment: SharedSegment) -> None:
        if segment.num_bytes != self.num_bytes:
            raise WeightError(
                f"shared weights {segment.path.name} hold {segment.num_bytes} bytes, not {self.num_bytes}"
            )

    def state(self, segment: SharedSegment, index: int) -> Tensor:
        offset = HEADER_BYTES + index * self._state_stride
        size = self._num_elements * self._dtype.itemsize
        return tensor_over(memoryview(segment.memory)[offset : offset + size], self._dtype)

    def delta(self, segment: SharedSegment, index: int) -> memoryview:
        offset = HEADER_BYTES + self.num_buffers * self._state_stride + index * self._delta_stride
        return np.frombuffer(segment.memory, np.uint8, self._delta_stride, offset).data


def _pages(num_bytes: int) -> int:
    return max(1, -(-num_bytes // HEADER_BYTES)) * HEADER_BYTES
