"""The manifest: what a model's published weights consist of, in one flat order that both sides share."""

from __future__ import annotations

import msgspec
import xxhash


class TensorSpec(msgspec.Struct, frozen=True):
    """One parameter in the flat buffer.

    Attributes:
        name: first of its names; aliases: further names of the same storage (tied parameters).
        shape: of the parameter; offset, size: elements in the flat buffer.
        decayed: whether weight decay applies (matrices; not biases and norms).
    """

    name: str
    aliases: list[str]
    shape: list[int]
    offset: int
    size: int
    decayed: bool


class Manifest(msgspec.Struct, frozen=True):
    """All parameters, in flat order; offsets are multiples of 16 elements, the gaps are zero.

    Attributes:
        dtype: of the published weights, "float32" or "bfloat16".
        num_elements: of the flat buffer, gaps included; num_decayed: leading elements that are decayed.
        buffers: names of the model's persistent buffers with their digests; both sides must have the same.
    """

    dtype: str
    tensors: list[TensorSpec]
    num_elements: int
    num_decayed: int
    buffers: dict[str, str]

    @property
    def num_bytes(self) -> int:
        """Bytes of one published version."""
        return self.num_elements * (2 if self.dtype == "bfloat16" else 4)

    @property
    def digest(self) -> str:
        """xxh3-64 hex over names, shapes, order, dtype and buffers: equal manifests can exchange weights."""
        return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(self))
