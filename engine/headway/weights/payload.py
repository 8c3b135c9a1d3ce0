"""Deltas as payloads and back: the bytes of headway_kernels.delta_format, optionally compressed.

    plain        the delta's own bytes (they begin with its magic)
    compressed   8 bytes magic, 8 bytes little-endian size of what follows when decompressed, one zstd frame

Called by the publisher (encode) and the stager (decode), which trusts nothing that it reads.
"""

from __future__ import annotations

import importlib
import struct
from typing import Any

from headway.errors import MalformedDelta, UnsupportedOption
from headway.types import PolicyVersion
from headway.weights.channel import Payload, PayloadHeader, PayloadKind
from headway.weights.digest import payload_digest
from headway_kernels.weight_delta import Delta, byte_parts, from_bytes

_ZSTD = b"HWZSTD01"
_ZSTD_HEAD = struct.Struct("<8sq")
ZSTD_LEVEL = 1  # one core compresses about 400 MB/s at this level; higher ones cost more than they save


def zstandard() -> Any:
    """The zstandard module.

    Raises:
        UnsupportedOption: it is not installed.
    """
    try:
        return importlib.import_module("zstandard")
    except ImportError as error:
        raise UnsupportedOption(
            "push.compression = 'zstd' needs the package zstandard: install headway[zstd], or set 'none'"
        ) from error


def encode_delta(
    delta: Delta, version: PolicyVersion, base_digest: str, state_digest: str, compression: str
) -> Payload:
    """A delta as a payload.

    Args:
        delta: from the state `base_digest` to the state `state_digest`, which is `version`.
        compression: "none" or "zstd".

    Returns:
        A payload over the delta's own memory when it is not compressed.

    Raises:
        UnsupportedOption: zstd is not installed.
    """
    parts = tuple(
        memoryview(part) if isinstance(part, bytes) else part.data.cast("B")
        for part in byte_parts(delta)
        if len(part)
    )
    if compression == "zstd":
        raw = b"".join(parts)
        frame: bytes = zstandard().ZstdCompressor(level=ZSTD_LEVEL, write_checksum=False).compress(raw)
        parts = (memoryview(_ZSTD_HEAD.pack(_ZSTD, len(raw))), memoryview(frame))
    size = sum(len(part) for part in parts)
    digest = payload_digest(parts)
    return Payload(PayloadHeader(version, PayloadKind.DELTA, base_digest, state_digest, size, digest), parts)


def decode_delta(data: memoryview, most_bytes: int) -> Delta:
    """Read what encode_delta wrote; the delta's arrays may be views of `data`.

    Args:
        data: a payload whose digest was checked.
        most_bytes: that a delta of this model can have; a compressed payload that claims more is refused unread.

    Raises:
        MalformedDelta: it is no valid delta.
        UnsupportedOption: it is compressed and zstd is not installed here.
    """
    if bytes(data[: len(_ZSTD)]) != _ZSTD:
        return from_bytes(data)
    if len(data) < _ZSTD_HEAD.size:
        raise MalformedDelta(f"weight delta: compressed, but only {len(data)} bytes")
    size = int(_ZSTD_HEAD.unpack(data[: _ZSTD_HEAD.size])[1])
    if not 0 <= size <= most_bytes:
        raise MalformedDelta(
            f"weight delta: says it decompresses to {size} bytes; this model's have at most {most_bytes}"
        )
    module = zstandard()
    try:
        raw: bytes = module.ZstdDecompressor().decompress(data[_ZSTD_HEAD.size :], max_output_size=size)
    except module.ZstdError as error:
        raise MalformedDelta(f"weight delta: does not decompress: {error}") from error
    if len(raw) != size:
        raise MalformedDelta(f"weight delta: decompressed to {len(raw)} bytes, its head says {size}")
    return from_bytes(raw)
