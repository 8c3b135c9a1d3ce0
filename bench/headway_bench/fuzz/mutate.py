"""Hostile messages: valid ones of another run, mutated; deterministic for a seed."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Sequence

import numpy as np

from headway.types import (
    FinishReason,
    MemberFailure,
    PolicyVersion,
    Sampling,
    Ticket,
    TimeSplit,
    Trajectory,
    VersionSpan,
)
from headway.weights import tcp_wire
from headway.wire import encode
from headway.wire.codec import PREFIX
from headway.wire.messages import (
    SCHEMA,
    Bye,
    Cancel,
    Command,
    DataMessage,
    Event,
    Grant,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Received,
    Refused,
    Stop,
    Trajectories,
    VersionNotice,
    WeightAck,
    Welcome,
)

_VERSION = PolicyVersion(0, 0)
# MessagePack that announces far more than it brings, extension types, floats that are none, unpaired surrogates.
_BOMBS = (
    b"\xdb\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff\x80", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x05", b"\xc1", b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00", b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + b"\x00" * 7, b"\xa3\xed\xa0\x80", b"\x91" * 2000, b"\x81\xa1a" * 2000,
    pickle.dumps(print), b"\x1b]0;owned\x07", b"\x00" * 64,
)  # fmt: skip


def _trajectory(incarnation: str) -> Trajectory:
    ids = np.arange(14, dtype=np.int32)
    return Trajectory(
        f"{incarnation}.1.0", 1, 0, 0, 1, 5, ids, ids >= 5, -np.ones(14, np.float32),
        [VersionSpan(5, 14, _VERSION)], 1.0, FinishReason.STOP, None, 0, 0.0, 0.0,
    )  # fmt: skip


def messages(incarnation: str) -> list[DataMessage]:
    """One of every kind, from a stranger of this name, of a run that is not the target's."""
    split = TimeSplit(0.1, 0.2, 0.3, 0.4)
    failure = MemberFailure(1, 1, "invalid", "x" * 40, 3)
    ticket = Ticket(1, 1, [3, 4, 5], 2, Sampling(1.0, 8, [2]), 1, _VERSION, 60.0)
    return [
        Hello(
            run_id="another", schema=SCHEMA, generator=3, incarnation=incarnation, pid=1, host="here",
            max_running=4, serving=_VERSION, tickets=[1, 2],
        ),
        Trajectories(
            incarnation=incarnation, seq=1, trajectories=[_trajectory(incarnation)], failures=[failure], generated=9
        ),
        WeightAck(incarnation=incarnation, version=_VERSION, digest="digest", pause_s=0.1),
        Bye(incarnation=incarnation, unsent=3),
        Heartbeat(
            incarnation=incarnation, seq=4, stalled_s=0.0, serving=_VERSION, running=1, waiting=2, tickets=3,
            generated=4, unsent=5, split=split,
        ),
        Grant(seq=1, tickets=[ticket]),
        Welcome(manifest_digest="digest", weight_channel="channel", version=_VERSION, heartbeat_s=1.0),
        Refused(reason="no"),
        Received(seq=1),
        VersionNotice(seq=1, version=_VERSION, digest="digest"),
        Cancel(ticket_ids=[1, 2, 3]),
        Stop(reason="over"),
        HeartbeatAck(seq=1),
        Event(note="note"),
        Command(command_id=1, action="set", key="a.b", value="1"),
    ]  # fmt: skip


def stream_seeds(incarnation: str) -> list[list[bytes]]:
    """Frames of every kind of the stream and the control sockets."""
    return [[bytes(frame) for frame in encode(message)] for message in messages(incarnation)]


def weight_seeds() -> list[list[bytes]]:
    """Frames of what is said on the weight channel's control socket."""
    want = tcp_wire.Want("payload", _VERSION, 3)
    said = [
        tcp_wire.Join("another", "manifest", "tcp://127.0.0.1:1", "key"), want, tcp_wire.Leave(),
        tcp_wire.Outcome("payload", "error"), tcp_wire.Complain("tcp://127.0.0.1:1", "payload", True),
        tcp_wire.AskWhole("reason"), tcp_wire.Denied("reason"), tcp_wire.Absent("payload"),
    ]  # fmt: skip
    return [[bytes(tcp_wire.encode(message))] for message in said]


class Mutator:
    """An endless supply of broken messages.

    Args:
        seeds: frames of valid messages; `heads`: offset in frame 0 from which MessagePack starts.
    """

    def __init__(self, rng: random.Random, seeds: Sequence[list[bytes]], head: int = PREFIX.size) -> None:
        self._rng = rng
        self._seeds = seeds
        self._head = head
        self._ways: list[Callable[[list[bytes]], None]] = [
            self._flip, self._flip, self._set, self._cut, self._insert, self._bomb, self._splice, self._repeat,
            self._frames, self._frames, self._junk, self._nothing, self._zero_run,
        ]  # fmt: skip

    def next(self) -> list[bytes]:
        """A message of at least one frame, mutated once to three times; now and then not at all."""
        frames = list(self._rng.choice(self._seeds))
        for _ in range(self._rng.choice((1, 1, 1, 2, 3))):
            self._rng.choice(self._ways)(frames)
        return frames or [b""]

    def _at(self, frames: list[bytes]) -> int:
        return self._rng.randrange(len(frames)) if frames else 0

    def _edit(self, frames: list[bytes], edit: Callable[[bytearray], None]) -> None:
        if not frames:
            return
        index = self._at(frames)
        data = bytearray(frames[index])
        if data:
            edit(data)
        frames[index] = bytes(data)

    def _flip(self, frames: list[bytes]) -> None:
        def edit(data: bytearray) -> None:
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)

        self._edit(frames, edit)

    def _set(self, frames: list[bytes]) -> None:
        def edit(data: bytearray) -> None:
            data[self._rng.randrange(len(data))] = self._rng.choice((0, 1, 0x7F, 0x80, 0xC0, 0xFF))

        self._edit(frames, edit)

    def _cut(self, frames: list[bytes]) -> None:
        def edit(data: bytearray) -> None:
            del data[self._rng.randrange(len(data)) :]

        self._edit(frames, edit)

    def _insert(self, frames: list[bytes]) -> None:
        def edit(data: bytearray) -> None:
            at = self._rng.randrange(len(data))
            data[at:at] = self._rng.randbytes(self._rng.randrange(1, 32))

        self._edit(frames, edit)

    def _bomb(self, frames: list[bytes]) -> None:
        """In place of what follows a random byte of the head."""
        data = frames[0] if frames else b""
        keep = self._rng.randrange(min(self._head, len(data)), len(data) + 1)
        frames[:1] = [data[:keep] + self._rng.choice(_BOMBS)]

    def _splice(self, frames: list[bytes]) -> None:
        other = self._rng.choice(self._rng.choice(self._seeds))

        def edit(data: bytearray) -> None:
            at = self._rng.randrange(len(data))
            data[at:] = other[self._rng.randrange(len(other) + 1) :]

        self._edit(frames, edit)

    def _repeat(self, frames: list[bytes]) -> None:
        def edit(data: bytearray) -> None:
            start = self._rng.randrange(len(data))
            part = data[start : start + 64]
            data[start:start] = part * self._rng.randrange(1, 40)

        self._edit(frames, edit)

    def _frames(self, frames: list[bytes]) -> None:
        """Drop, swap, double or add frames."""
        way = self._rng.randrange(4)
        if way == 0 and frames:
            del frames[self._at(frames)]
        elif way == 1 and len(frames) > 1:
            a, b = self._at(frames), self._at(frames)
            frames[a], frames[b] = frames[b], frames[a]
        elif way == 2 and frames:
            frames.append(frames[self._at(frames)])
        else:
            frames.extend([b"x"] * self._rng.choice((1, 2, 3, 200)))

    def _junk(self, frames: list[bytes]) -> None:
        frames[:] = [
            self._rng.randbytes(self._rng.choice((0, 1, 7, 8, 200, 20_000)))
            for _ in range(self._rng.randrange(1, 6))
        ]

    def _nothing(self, frames: list[bytes]) -> None:
        pass

    def _zero_run(self, frames: list[bytes]) -> None:
        def edit(data: bytearray) -> None:
            start = self._rng.randrange(len(data))
            length = min(len(data) - start, self._rng.randrange(1, 16))
            data[start : start + length] = b"\0" * length

        self._edit(frames, edit)
