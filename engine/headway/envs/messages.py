"""What a reward pool and its workers say to each other: MessagePack behind a 4-byte length, never pickle."""

from __future__ import annotations

import struct

import msgspec

from headway.envs.loading import EnvSpec
from headway.envs.protocol import Completion

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30


class Setup(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Pool to worker, first and once: build this environment."""

    spec: EnvSpec


class Batch(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Pool to worker: score these completions of one prompt, in order."""

    index: int
    completions: list[Completion]


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Worker to pool: the environment stands."""


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Worker to pool: the environment cannot be built."""

    error: str


class Scored(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Worker to pool: the verdict on the next completion of the batch; the one after it has begun.

    Attributes:
        seconds: that it took.
    """

    reward: float | None
    error: str = ""
    seconds: float = 0.0


ToWorker = Setup | Batch
ToPool = Ready | Refused | Scored

_encoder = msgspec.msgpack.Encoder()


def frame(message: ToWorker | ToPool) -> bytes:
    """The message with its length in front, as it goes onto the socket."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts received bytes into message bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Appends what came off the socket."""
        self._buffer += data

    def take(self) -> bytes | None:
        """The next whole body, or None.

        Raises:
            ValueError: a length beyond MAX_FRAME_BYTES: the stream is corrupt.
        """
        if len(self._buffer) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._buffer)
        if length > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are expected")
        end = LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[LENGTH.size : end])
        del self._buffer[:end]
        return body
