"""The tcp channel's messages: a magic, a MessagePack head, and for a chunk one frame with its bytes.

receiver -> learner          Join, Want, Complain, Outcome, AskWhole, Leave
learner -> receiver          Offer, Denied, Chunk, Absent
receiver -> relay            Want
relay -> receiver            Chunk, Absent, Held

Nothing here is untyped or recursive, so msgspec refuses nesting where it meets it. Called by the tcp channel's
sockets; touches none and blocks on nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headway.errors import WireError
from headway.types import PolicyVersion
from headway.weights.channel import PayloadHeader

MAGIC = b"HWT1"
MAX_HEAD_BYTES = 32 << 10
MAX_TEXT = 2000


def payload_key(header: PayloadHeader) -> str:
    """Names a payload in a run."""
    return f"{header.version}/{header.kind}/{header.base_digest}/{header.payload_digest}"


class TcpMessage(msgspec.Struct, frozen=True, tag_field="kind"):
    """Base of the messages; `kind` names the class on the wire."""


class Join(TcpMessage, frozen=True):
    """A receiver's first message on every connection to the learner, and its sign of life; Offer answers it.

    Attributes:
        run_id, manifest_digest: must equal the learner's, else Denied.
        endpoint, key: where and with which CURVE key (Z85) it serves what it holds; an empty endpoint never relays.
    """

    run_id: str
    manifest_digest: str
    endpoint: str
    key: str


class Denied(TcpMessage, frozen=True):
    """The learner will not serve this peer, and why."""

    reason: str


class Offer(TcpMessage, frozen=True):
    """What the learner holds of the newest version, and whom this receiver shall ask for it.

    Attributes:
        headers: deltas, then the whole state; empty before the first publish.
        parent, key: another receiver's endpoint and CURVE key; empty: ask the learner.
        allowed: CURVE keys of those who may ask this receiver.
    """

    headers: list[PayloadHeader]
    parent: str
    key: str
    allowed: list[str]


class Want(TcpMessage, frozen=True):
    """Send chunk `index` of the payload with this key, which leads to `version`."""

    payload: str
    version: PolicyVersion
    index: int


class Chunk(TcpMessage, frozen=True):
    """One chunk; its bytes are the next frame.

    Attributes:
        digest: xxh3-64 of the payload up to this chunk's end.
    """

    payload: str
    index: int
    digest: int


class Absent(TcpMessage, frozen=True):
    """The payload is not held here (any more)."""

    payload: str


class Held(TcpMessage, frozen=True):
    """A relay is alive but has not got the chunk yet; the Wants it got stay queued.

    Attributes:
        fetching: its generator is fetching, so the chunk or the payload's turn will come; else it is idle.
    """

    payload: str
    fetching: bool


class Complain(TcpMessage, frozen=True):
    """The relay at this endpoint does not deliver; the learner answers with an Offer that names another.

    Attributes:
        payload: what was wanted.
        silent: it does not answer at all, or answers rubbish: nobody should be sent there. Else it is well but
            does not have what this receiver wants.
    """

    parent: str
    payload: str
    silent: bool


class Outcome(TcpMessage, frozen=True):
    """How a payload ended at this receiver; `error` "" when it is staged whole."""

    payload: str
    error: str


class AskWhole(TcpMessage, frozen=True):
    """This receiver needs a whole state: it has joined, or what it got did not verify or fit."""

    reason: str


class Leave(TcpMessage, frozen=True):
    """This receiver goes away on purpose."""


Message = Join | Denied | Offer | Want | Chunk | Absent | Held | Complain | Outcome | AskWhole | Leave

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Frame 0 of a message."""
    return MAGIC + _ENCODER.encode(message)


def decode(frames: Sequence[bytes | memoryview]) -> tuple[Message, memoryview | None]:
    """The message that these frames are, and a Chunk's bytes.

    Raises:
        WireError: "frames" (none, too many, or not what the kind needs), "limit", "magic" or "head".
    """
    if not 1 <= len(frames) <= 2:
        raise WireError("frames", f"got {len(frames)} frames; expected 1, or 2 with a chunk")
    head = memoryview(frames[0])
    if head.nbytes > MAX_HEAD_BYTES:
        raise WireError("limit", f"a head of {head.nbytes} bytes; at most {MAX_HEAD_BYTES} are read")
    if bytes(head[: len(MAGIC)]) != MAGIC:
        raise WireError("magic", f"frame 0 starts with {bytes(head[:4])!r}; expected {MAGIC!r}")
    try:
        message = _DECODER.decode(head[len(MAGIC) :])
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise WireError("head", f"not a message of the tcp channel: {str(error)[:200]}") from None
    if isinstance(message, Chunk) != (len(frames) == 2):
        raise WireError("frames", f"{type(message).__name__} came with {len(frames) - 1} body frames")
    return message, memoryview(frames[1]) if len(frames) == 2 else None


def short(text: str) -> str:
    """An error text that fits a head."""
    return text.encode("utf-8", "backslashreplace").decode()[:MAX_TEXT]


def name_of(peer: bytes) -> str:
    """A socket identity as text, and back by `peer_of`."""
    return peer.decode("latin-1")


def peer_of(name: str) -> bytes:
    """The socket identity of a name."""
    return name.encode("latin-1")
