"""What is staged, and the checks that a payload passes before it is: of its header, its digest, its contents.

Called by the stager; nothing here touches what is served.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from headway.errors import WeightError
from headway.types import Manifest, PolicyVersion
from headway.weights.channel import PayloadHeader, PayloadKind
from headway.weights.digest import StateDigest, payload_digest, tensor_over
from headway.weights.payload import decode_delta
from headway.weights.served import published_dtype
from headway_kernels.weight_delta import BLOCK_ELEMENTS, Delta, count_blocks, whole

READ_BLOCKS = 8  # read back and digested while they are in the second-level cache


@dataclass(frozen=True)
class Proof:
    """What is in force: its version, and the digest of its published bytes as read back from the engine."""

    version: PolicyVersion
    digest: str


@dataclass
class Staged:
    """A push that is ready to be applied.

    Attributes:
        version, state_digest: after it.
        state: a whole published state, applied first; None when there are only deltas.
        digests: of `state`, as verified. deltas: applied in order after it.
        pins: headers of payloads that lie in the channel's memory.
        num_prepared: deltas, the whole state counted as one, that are written beside what is served (Served.prepare).
    """

    version: PolicyVersion
    state_digest: str
    state: Tensor | None = None
    digests: StateDigest | None = None
    deltas: list[Delta] = field(default_factory=list[Delta])
    pins: list[PayloadHeader] = field(default_factory=list[PayloadHeader])
    num_prepared: int = 0

    def changes(self) -> list[Delta]:
        """All of it as deltas, in order."""
        return [*([] if self.state is None else [whole(self.state)]), *self.deltas]

    @property
    def num_unprepared(self) -> int:
        """Of `changes`, those that are not prepared yet."""
        return (self.state is not None) + len(self.deltas) - self.num_prepared

    def stretches(self, num_elements: int) -> list[tuple[int, int, int]]:
        """Runs of blocks that it changes, at most READ_BLOCKS long: first block, first element, one after the last."""
        touched = np.full(count_blocks(num_elements), self.state is not None)
        for delta in self.deltas:
            touched |= delta.formats != 0
        edges = np.flatnonzero(np.diff(np.concatenate([[False], touched, [False]]).astype(np.int8))).tolist()
        found: list[tuple[int, int, int]] = []
        for first, last in zip(edges[0::2], edges[1::2], strict=True):
            for start in range(first, last, READ_BLOCKS):
                end = min(num_elements, min(last, start + READ_BLOCKS) * BLOCK_ELEMENTS)
                found.append((start, start * BLOCK_ELEMENTS, end))
        return found


class PayloadCheck:
    """Checks payloads for one model.

    Args:
        manifest: of the weights that are served.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._dtype = published_dtype(manifest)

    def check_header(
        self, header: PayloadHeader, held: PolicyVersion | None, digest: str, *, deltas: bool
    ) -> None:
        """Refuse, before anything is fetched, what does not lead from the state that is held to a newer one.

        Args:
            held, digest: version and digest of the state so far; None and "" without one.
            deltas: whether a delta can be applied.

        Raises:
            WeightError: says what does not fit.
        """
        name = f"{header.kind} of version {header.version}"
        if header.kind is PayloadKind.WHOLE:
            expected = self._manifest.num_bytes
            if header.num_bytes != expected:
                raise WeightError(f"{name}: {header.num_bytes} bytes, this model has {expected}")
            if header.payload_digest != header.state_digest:
                raise WeightError(f"{name}: two digests, {header.payload_digest} and {header.state_digest}")
        elif not deltas:
            raise WeightError(f"{name}: only a whole state will do here")
        elif held is None or header.base_digest != digest:
            raise WeightError(f"{name} is from the state {header.base_digest}; held is {digest or 'nothing'}")
        elif not 0 < header.num_bytes <= self.most_delta_bytes:
            raise WeightError(f"{name}: {header.num_bytes} bytes are no delta of this model")
        if held is not None and header.version <= held:
            raise WeightError(f"{name}: {held} is held already")

    @property
    def most_delta_bytes(self) -> int:
        """Of a delta of this model: every block dense, with its format and offset."""
        return self._manifest.num_bytes + 16 * count_blocks(self._manifest.num_elements) + 4096

    def whole(self, header: PayloadHeader, data: memoryview) -> Staged:
        """A whole state over `data`, verified.

        Raises:
            WeightError: its digest is another.
        """
        digests = StateDigest(self._manifest.num_elements, self._dtype.itemsize)
        digests.read(0, data)
        if digests.hex != header.state_digest:
            raise WeightError(
                f"whole state of version {header.version} arrived with digest {digests.hex}, published was "
                f"{header.state_digest}"
            )
        state = tensor_over(data, self._dtype)
        return Staged(header.version, header.state_digest, state, digests)

    def delta(self, header: PayloadHeader, data: memoryview) -> Staged:
        """A delta over `data`, verified.

        Raises:
            WeightError: its digest is another, or it is of another model. MalformedDelta: it is none.
        """
        digest = payload_digest([data])
        if digest != header.payload_digest:
            raise WeightError(
                f"delta of version {header.version} arrived with digest {digest}, sent was {header.payload_digest}"
            )
        delta = decode_delta(data, self.most_delta_bytes)
        if delta.num_elements != self._manifest.num_elements or delta.dtype != self._dtype:
            raise WeightError(
                f"delta of version {header.version} is of {delta.num_elements} {delta.dtype}, this model of "
                f"{self._manifest.num_elements} {self._dtype}"
            )
        return Staged(header.version, header.state_digest, deltas=[delta])
