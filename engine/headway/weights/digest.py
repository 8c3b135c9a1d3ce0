"""Digests: of a published state, by blocks, and of a payload.

A state's digest is xxh3-64 over the xxh3-64 of each block of 65,536 elements (little-endian, in order), as 16 hex
digits. So after a delta only the blocks that it touched are read again, and a state can be checked while it is
copied, block by block. Neither xxh3 nor anything else here is a defence against a forger: that is CURVE's part.

Called by the publisher, the stager and the channels.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from headway_kernels.weight_delta import BLOCK_ELEMENTS, count_blocks


class StateDigest:
    """The block digests of one published state.

    Args:
        num_elements: of the flat buffer; item_bytes: of one element.

    Attributes:
        blocks: uint64 [num_blocks].
    """

    def __init__(self, num_elements: int, item_bytes: int) -> None:
        self.block_bytes = BLOCK_ELEMENTS * item_bytes
        self.num_bytes = num_elements * item_bytes
        self.blocks: NDArray[np.uint64] = np.zeros(count_blocks(num_elements), np.uint64)

    def read(self, first: int, data: memoryview) -> None:
        """Take the digests of consecutive blocks.

        Args:
            first: block that `data` starts with.
            data: bytes, whole blocks (the state's last one may be shorter).
        """
        for index, at in enumerate(range(0, len(data), self.block_bytes), first):
            self.blocks[index] = xxhash.xxh3_64_intdigest(data[at : at + self.block_bytes])

    def copy(self) -> StateDigest:
        """Independent of this one."""
        other = StateDigest(0, 1)
        other.block_bytes, other.num_bytes, other.blocks = (
            self.block_bytes,
            self.num_bytes,
            self.blocks.copy(),
        )
        return other

    @property
    def hex(self) -> str:
        """The state's digest."""
        return xxhash.xxh3_64_hexdigest(self.blocks.tobytes())


def byte_view(flat: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, sharing its memory."""
    return flat.detach().view(-1).view(torch.uint8).numpy().data


def tensor_over(data: memoryview, dtype: torch.dtype) -> Tensor:
    """A flat tensor over writable bytes, which it keeps alive (torch.frombuffer's would not: a mapping could go)."""
    words = np.frombuffer(data, np.int32 if dtype.itemsize == 4 else np.int16)
    return torch.from_numpy(words).view(dtype)


def digest_state(flat: Tensor) -> StateDigest:
    """Of a published buffer, contiguous, float32, float16 or bfloat16."""
    digest = StateDigest(flat.numel(), flat.element_size())
    digest.read(0, byte_view(flat))
    return digest


def state_digest(flat: Tensor) -> str:
    """16 hex digits of a published buffer."""
    return digest_state(flat).hex


def payload_digest(parts: Iterable[memoryview | bytes]) -> str:
    """xxh3-64, 16 hex digits, of the bytes of a delta's payload."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
