"""The `shm` channel: whole versions through two buffers of shared memory on one host.

Layout: 4,096 bytes of header, then two buffers of one published version each. The header holds a magic, the
manifest's digest, the index of the newest buffer, and per buffer: a sequence number (odd while it is being
written), epoch, step, and the digest of its bytes.

The writer always writes the buffer that is not the newest, so a reader of the newest is disturbed only when two
further versions are published during its copy; then the sequence number has changed and the reader copies the
newest again before it serves anything. A reader never blocks the writer, and a dead reader holds nothing.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from headway.errors import WeightError
from headway.types import Manifest, PolicyVersion
from headway.weights.segment import SharedSegment

HEADER_BYTES = 4096
_MAGIC = b"HWSHM001"
_HEAD = struct.Struct("<8s16s")  # magic, manifest digest: written once, a joiner may look at any moment
_NEWEST, _NEWEST_AT = struct.Struct("<q"), 24  # index of the newest buffer (-1: none yet)
_SLOT = struct.Struct("<qqq16s")  # sequence, epoch, step, digest
_SLOT_AT = (64, 128)
_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COPY_ATTEMPTS = 100


@dataclass(frozen=True)
class Published:
    """What one publish did: the version, the digest of its bytes, and how many elements changed."""

    version: PolicyVersion
    digest: str
    num_bytes: int
    num_changed: int


def weights_digest(published: Tensor) -> str:
    """xxh3-64 hex of a published buffer (contiguous, float32 or bfloat16)."""
    return xxhash.xxh3_64_hexdigest(published.view(torch.uint8).numpy().data)


class ShmPublisher:
    """The learner's side.

    Args:
        name: of the segment; manifest: of the policy.

    Raises:
        WeightError: the segment cannot be made.
    """

    def __init__(self, name: str, manifest: Manifest) -> None:
        self.manifest = manifest
        stride = -(-manifest.num_bytes // HEADER_BYTES) * HEADER_BYTES
        self._segment = SharedSegment(name, HEADER_BYTES + 2 * stride)
        self._buffers = _map_buffers(self._segment, manifest)
        for buffer in self._buffers:
            buffer.zero_()  # first touch of a mapping costs four times a copy: pay it at start
        self._sequences = [0, 0]
        self._newest = -1
        self._switch()
        _HEAD.pack_into(self._segment.memory, 0, _MAGIC, manifest.digest.encode())

    def publish(self, flat: Tensor, version: PolicyVersion) -> Published:
        """Make `flat` the newest version: cast into the idle buffer, count changes, digest, switch.

        Args:
            flat: fp32 [num_elements], already rounded to the published dtype.
            version: must be newer than the last.

        Raises:
            WeightError: version is not newer.
        """
        target = 1 - self._newest if self._newest >= 0 else 0
        memory = self._segment.memory
        if self._newest >= 0:
            _, epoch, step, _ = _SLOT.unpack_from(memory, _SLOT_AT[self._newest])
            if version <= PolicyVersion(epoch, step):
                raise WeightError(f"version {version} is not newer than the published {epoch}.{step}")
        self._sequences[target] += 1
        _SLOT.pack_into(memory, _SLOT_AT[target], self._sequences[target], 0, 0, b"")
        buffer = self._buffers[target]
        buffer.copy_(flat)
        num_changed = self.manifest.num_elements
        if self._newest >= 0:
            num_changed = _count_changed(buffer, self._buffers[self._newest])
        digest = weights_digest(buffer)
        self._sequences[target] += 1
        slot = (self._sequences[target], version.epoch, version.step, digest.encode())
        _SLOT.pack_into(memory, _SLOT_AT[target], *slot)
        self._newest = target
        self._switch()
        return Published(version, digest, self.manifest.num_bytes, num_changed)

    def _switch(self) -> None:
        _NEWEST.pack_into(self._segment.memory, _NEWEST_AT, self._newest)

    def close(self) -> None:
        """Remove the segment."""
        self._buffers = []
        self._segment.close()


class ShmReceiver:
    """A generator's side.

    Args:
        name: of the segment; manifest: of this side's policy, which must equal the learner's.

    Raises:
        WeightError: no such segment, or it belongs to another manifest.
    """

    def __init__(self, name: str, manifest: Manifest) -> None:
        self._segment = SharedSegment(name, None)
        magic, digest = _HEAD.unpack_from(self._segment.memory, 0)
        if magic != _MAGIC or digest.decode() != manifest.digest:
            raise WeightError(
                f"shared weights {name}: manifest {digest.decode()!r} is not this model's {manifest.digest!r}; "
                "learner and generator must load the same model folder with the same versions"
            )
        self.manifest = manifest
        self._buffers = _map_buffers(self._segment, manifest)

    def newest(self) -> PolicyVersion | None:
        """The version that a fetch would bring, None before the first publish."""
        index = _NEWEST.unpack_from(self._segment.memory, _NEWEST_AT)[0]
        if index < 0:
            return None
        sequence, epoch, step, _ = _SLOT.unpack_from(self._segment.memory, _SLOT_AT[index])
        return None if sequence % 2 else PolicyVersion(epoch, step)

    def fetch(self, flat: Tensor) -> tuple[PolicyVersion, str]:
        """Copy the newest whole version into `flat` (fp32 [num_elements]) and verify its digest.

        On return, `flat` holds exactly one version. If it raises, `flat` must not be served.

        Raises:
            WeightError: nothing published yet, or no whole copy in COPY_ATTEMPTS attempts.
        """
        memory = self._segment.memory
        for _ in range(COPY_ATTEMPTS):
            index = _NEWEST.unpack_from(memory, _NEWEST_AT)[0]
            if index < 0:
                raise WeightError("the learner has not published any weights yet")
            before = _SLOT.unpack_from(memory, _SLOT_AT[index])
            if before[0] % 2:
                continue
            flat.copy_(self._buffers[index])
            digest = weights_digest(flat.to(_TORCH_DTYPES[self.manifest.dtype]))
            if _SLOT.unpack_from(memory, _SLOT_AT[index]) == before and digest == before[3].decode():
                return PolicyVersion(before[1], before[2]), digest
        raise WeightError(
            f"no whole version could be copied in {COPY_ATTEMPTS} attempts: pushes outrun the copy"
        )

    def close(self) -> None:
        """Let go of the segment."""
        self._buffers = []
        self._segment.close()


def _map_buffers(segment: SharedSegment, manifest: Manifest) -> list[Tensor]:
    stride = -(-manifest.num_bytes // HEADER_BYTES) * HEADER_BYTES
    if segment.num_bytes != HEADER_BYTES + 2 * stride:
        raise WeightError(
            f"shared weights {segment.path.name} hold {segment.num_bytes} bytes, not two of {manifest.num_bytes}"
        )
    dtype = _TORCH_DTYPES[manifest.dtype]
    return [
        torch.frombuffer(
            segment.memory, dtype=dtype, count=manifest.num_elements, offset=HEADER_BYTES + index * stride
        )
        for index in range(2)
    ]


def _count_changed(new: Tensor, old: Tensor) -> int:
    """Elements whose bits differ (so that -0.0 and NaN payloads count)."""
    bits = torch.int32 if new.dtype == torch.float32 else torch.int16
    return int(torch.count_nonzero(new.view(bits) != old.view(bits)))
