"""Messages as bytes and back: frame 0 is a prefix and a MessagePack head, the other frames are raw arrays.

    frame 0   magic "HDWY", uint16 schema, uint16 number of array frames (little endian), MessagePack map
    frame 1   token_ids of all trajectories, int32        \\
    frame 2   loss_mask, one byte each, 0 or 1             }  only with kind "Trajectories"
    frame 3   logprobs, float32                           /
    frames 4, 5                                           headway.wire.kept, where a trajectory has kept sets

In the head of a Trajectories message, the fields token_ids, loss_mask and logprobs of a trajectory hold the
number of its elements in the frame of that name; the elements lie in the order of the trajectories.
docs/wire.md has every field. Called by headway.stream; touches no socket and blocks on nothing.

Nesting is bounded without a scan of the head: the types hold no recursive and no untyped field, so msgspec
refuses a nested value where it meets it; only the value of an unknown key is walked, under Python's recursion
limit. Lengths that a head declares are believed only as far as its bytes reach.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from headway.errors import WireError
from headway.types import FinishReason, MemberFailure, Trajectory, VersionSpan
from headway.wire.arrays import Frame, as_bool, plain_bytes, view
from headway.wire.check import check_layout
from headway.wire.kept import NUM_FRAMES, KeptHead, kept_frames, slice_kept
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
    Message,
    Received,
    Refused,
    Stop,
    Trajectories,
    VersionNotice,
    WeightAck,
    Welcome,
)

MAGIC = b"HDWY"
PREFIX = struct.Struct("<4sHH")
_INT32, _BOOL, _FLOAT32 = np.dtype("<i4"), np.dtype("bool"), np.dtype("<f4")
_ARRAY_FRAMES = 3


class Limits(msgspec.Struct, frozen=True):
    """How much a peer may make us hold for one message.

    Attributes:
        max_head_bytes: of frame 0; decoding it takes at most about 10 times that in memory.
        max_frame_bytes: of each array frame.
        max_items: trajectories, failures, tickets or ticket ids in a message, and spans in a trajectory.
    """

    max_head_bytes: int = 16 << 20
    max_frame_bytes: int = 256 << 20
    max_items: int = 1 << 16

    @property
    def max_frames(self) -> int:
        """Frames of the longest valid message."""
        return 1 + _ARRAY_FRAMES + NUM_FRAMES


DEFAULT_LIMITS = Limits()


class TrajectoryHead(msgspec.Struct, frozen=True):
    """A Trajectory in a head: the same fields, with the element count in place of each array."""

    trajectory_id: str
    ticket_id: int
    member: int
    prompt_index: int
    prompt_hash: int
    prompt_length: int
    token_ids: int
    loss_mask: int
    logprobs: int
    spans: list[VersionSpan]
    temperature: float
    finish_reason: FinishReason
    reward: float | None
    num_cached: int
    started_s: float
    finished_s: float
    kept: KeptHead | None = None


class TrajectoriesHead(Message, frozen=True, tag="Trajectories"):
    """The head of a Trajectories message."""

    incarnation: str
    seq: int
    trajectories: list[TrajectoryHead]
    failures: list[MemberFailure]
    generated: int


_Head = (
    TrajectoriesHead
    | Hello
    | Welcome
    | Refused
    | Grant
    | Received
    | WeightAck
    | VersionNotice
    | Cancel
    | Stop
    | Bye
    | Heartbeat
    | HeartbeatAck
    | Event
    | Command
)


def _count(value: object) -> int:
    if isinstance(value, np.ndarray):
        return int(value.size)
    raise NotImplementedError(f"cannot send a {type(value).__name__}")


# Both are used by several threads at once: msgspec keeps the state of a call on its own stack.
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_count)
_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_Head)


def encode(message: DataMessage) -> list[bytes | memoryview]:
    """The frames of a message; they alias nothing of it, so it and its arrays may change afterwards.

    Raises:
        WireError: "lengths", "dtype", "shape", "mask", "kept" or a reason of `check_layout` when a trajectory is not
            one (the producer hears of its own mistake); "head" when a field cannot be MessagePack.
    """
    arrays = _array_frames(message.trajectories) if isinstance(message, Trajectories) else []
    try:
        try:
            head = _ENCODER.encode(message)
        except UnicodeEncodeError:
            head = _ENCODER.encode(_printable(message))
    except (ValueError, TypeError, OverflowError, NotImplementedError, msgspec.MsgspecError) as error:
        raise WireError("head", f"cannot encode {type(message).__name__}: {error}") from error
    return [PREFIX.pack(MAGIC, SCHEMA, len(arrays)) + head, *arrays]


def _printable(message: Any) -> Any:
    """The struct with unpaired surrogates escaped: an error text must not kill the process reporting it."""
    changes: dict[str, Any] = {}
    for field in message.__struct_fields__:
        value = getattr(message, field)
        if isinstance(value, str):
            changes[field] = value.encode("utf-8", "backslashreplace").decode()
        elif isinstance(value, list) and field == "failures":
            changes[field] = [_printable(failure) for failure in value]
    return msgspec.structs.replace(message, **changes)


def _array_frames(trajectories: list[Trajectory]) -> list[bytes]:
    ids: list[Any] = []
    masks: list[Any] = []
    logprobs: list[Any] = []
    for item in trajectories:
        length = len(item.token_ids)
        if not length == len(item.loss_mask) == len(item.logprobs):
            counts = (length, len(item.loss_mask), len(item.logprobs))
            raise WireError("lengths", f"{item.trajectory_id!r} has {counts} token_ids, loss_mask, logprobs")
        check_layout(item, length)
        ids.append(plain_bytes(item.token_ids, _INT32, "token_ids"))
        masks.append(plain_bytes(item.loss_mask, _BOOL, "loss_mask"))
        logprobs.append(plain_bytes(item.logprobs, _FLOAT32, "logprobs"))
    mask = b"".join(masks)
    _check_prompt_masks(trajectories, mask)
    return [b"".join(ids), mask, b"".join(logprobs), *kept_frames(trajectories)]


def _check_prompt_masks(items: Sequence[Trajectory | TrajectoryHead], mask: bytes) -> None:
    """Nothing of a prompt may carry loss. bytes.find: numpy's overhead per trajectory would dominate here."""
    at = 0
    for item in items:
        if mask.find(1, at, at + item.prompt_length) >= 0:
            raise WireError("mask", f"{item.trajectory_id[:80]!r} has loss on its prompt")
        at += item.token_ids if isinstance(item, TrajectoryHead) else len(item.token_ids)


def decode(frames: Sequence[Frame], *, limits: Limits = DEFAULT_LIMITS) -> DataMessage:
    """The message that these frames are; its arrays are read-only (headway.wire.arrays: what they alias).

    Raises:
        WireError: the only exception, whatever the bytes. Reasons: "frames" (none, too many, or not what the
            kind needs), "limit", "magic", "schema", "head" (not MessagePack of a known kind), "nesting",
            "lengths", "bool", "mask", "token_ids" (negative), "kept", or one of `check_layout`.
    """
    head, num_arrays = _open(frames, limits)
    try:
        message = _DECODER.decode(head)
    except RecursionError:
        raise WireError("nesting", f"a head of {len(head)} bytes is nested too deep") from None
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise WireError("head", f"not a message of schema {SCHEMA}: {str(error)[:200]}") from None
    if isinstance(message, TrajectoriesHead):
        return _decode_trajectories(message, frames[1:], limits)
    if num_arrays:
        raise WireError(
            "frames", f"{type(message).__name__} came with {num_arrays} array frames; expected none"
        )
    if isinstance(message, Grant):
        _check_items(len(message.tickets), "tickets", limits)
    elif isinstance(message, Hello):
        _check_items(len(message.tickets), "ticket ids", limits)
    elif isinstance(message, Cancel):
        _check_items(len(message.ticket_ids), "ticket ids", limits)
    return message


def _open(frames: Sequence[Frame], limits: Limits) -> tuple[memoryview, int]:
    """The MessagePack bytes of frame 0 and the number of array frames, sizes and prefix checked."""
    if not 1 <= len(frames) <= limits.max_frames:
        raise WireError("frames", f"got {len(frames)} frames; expected 1 to {limits.max_frames}")
    first = memoryview(frames[0])
    if first.nbytes > limits.max_head_bytes:
        raise WireError("limit", f"a head of {first.nbytes} bytes; at most {limits.max_head_bytes} are read")
    if first.nbytes < PREFIX.size:
        raise WireError("magic", f"frame 0 has {first.nbytes} bytes; expected at least {PREFIX.size}")
    magic, schema, num_arrays = PREFIX.unpack_from(first)
    if magic != MAGIC:
        raise WireError(
            "magic", f"frame 0 starts with {magic!r}; expected {MAGIC!r}: the peer is not headway"
        )
    if schema != SCHEMA:
        raise WireError(
            "schema", f"the peer speaks schema {schema}, this process {SCHEMA}: run one version of headway"
        )
    if num_arrays != len(frames) - 1:
        raise WireError("frames", f"the head announces {num_arrays} array frames; {len(frames) - 1} came")
    return first[PREFIX.size :], num_arrays


def _check_items(count: int, what: str, limits: Limits) -> None:
    if count > limits.max_items:
        raise WireError("limit", f"{count} {what} in one message; at most {limits.max_items} are read")


def _decode_trajectories(head: TrajectoriesHead, frames: Sequence[Frame], limits: Limits) -> Trajectories:
    items = head.trajectories
    if len(frames) not in (_ARRAY_FRAMES, _ARRAY_FRAMES + NUM_FRAMES):
        raise WireError(
            "frames",
            f"Trajectories came with {len(frames)} array frames; expected {_ARRAY_FRAMES}, or {NUM_FRAMES} more",
        )
    _check_items(len(items), "trajectories", limits)
    _check_items(len(head.failures), "failures", limits)
    for frame in frames:
        size = len(frame) if isinstance(frame, bytes) else frame.nbytes
        if size > limits.max_frame_bytes:
            raise WireError(
                "limit", f"an array frame of {size} bytes; at most {limits.max_frame_bytes} are read"
            )
    for item in items:
        if not 0 <= item.token_ids == item.loss_mask == item.logprobs:
            counts = (item.token_ids, item.loss_mask, item.logprobs)
            raise WireError(
                "lengths", f"{item.trajectory_id[:80]!r} has {counts} token_ids, loss_mask, logprobs"
            )
        _check_items(len(item.spans), "version spans", limits)
        check_layout(item, item.token_ids)
    trajectories = _slice(items, frames)
    return Trajectories(
        incarnation=head.incarnation,
        seq=head.seq,
        trajectories=trajectories,
        failures=head.failures,
        generated=head.generated,
    )


def _slice(items: list[TrajectoryHead], frames: Sequence[Frame]) -> list[Trajectory]:
    """One Trajectory per head, its arrays views of the frames."""
    ids = view(frames[0], _INT32)
    mask = as_bool(view(frames[1], np.dtype("u1")))
    logprobs = view(frames[2], _FLOAT32)
    total = sum(item.token_ids for item in items)
    if not total == ids.size == mask.size == logprobs.size:
        sizes = (ids.size, mask.size, logprobs.size)
        raise WireError("lengths", f"heads name {total} tokens; the frames hold {sizes}")
    _check_prompt_masks(items, bytes(frames[1]))
    if total and int(ids.min()) < 0:
        raise WireError("token_ids", f"token id {int(ids.min())}; expected >= 0")
    kept = slice_kept(items, frames[_ARRAY_FRAMES:])
    trajectories: list[Trajectory] = []
    at = 0
    for item, kept_sets in zip(items, kept, strict=True):
        end = at + item.token_ids
        trajectories.append(
            Trajectory(
                item.trajectory_id,
                item.ticket_id,
                item.member,
                item.prompt_index,
                item.prompt_hash,
                item.prompt_length,
                ids[at:end],
                mask[at:end],
                logprobs[at:end],
                item.spans,
                item.temperature,
                item.finish_reason,
                item.reward,
                item.num_cached,
                item.started_s,
                item.finished_s,
                kept_sets,
            )
        )
        at = end
    return trajectories
