"""The store channel's markers and pointer, and the way from what a reader holds to what is newest. Pure.

    markers/VERSION     written after the payloads that it names; carries its own digest
    newest              the pointer: the version of the newest marker; only ever advanced
    payloads/VERSION.KIND.BASE

A marker without its payloads cannot exist before the cleaner comes, which removes markers first.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import xxhash

from headway.types import PolicyVersion
from headway.weights.channel import PayloadHeader, PayloadKind

MAX_MARKER_BYTES = 1 << 20


class StoredPayload(msgspec.Struct, frozen=True):
    """A payload in the store.

    Attributes:
        name: of its object; digest: xxh3-64 hex of its bytes as they lie there.
    """

    header: PayloadHeader
    name: str
    digest: str


class Marker(msgspec.Struct, frozen=True):
    """One published version: everything that it names was there, whole, when this was written."""

    run_id: str
    manifest_digest: str
    version: PolicyVersion
    state_digest: str
    payloads: list[StoredPayload]

    @property
    def whole(self) -> StoredPayload | None:
        """Its whole state, if it is an anchor."""
        return next((each for each in self.payloads if each.header.kind is PayloadKind.WHOLE), None)

    @property
    def num_bytes(self) -> int:
        """Of its payloads."""
        return sum(each.header.num_bytes for each in self.payloads)


def version_name(version: PolicyVersion) -> str:
    """Sorts as the versions do."""
    return f"{version.epoch:06d}.{version.step:012d}"


def seal(value: msgspec.Struct) -> bytes:
    """JSON with a digest before it, so that a torn write is known as one."""
    body = msgspec.json.encode(value)
    return xxhash.xxh3_64_hexdigest(body).encode() + b"\n" + body


def unseal_marker(data: bytes | None) -> Marker | None:
    """A marker as `seal` wrote it; None for none, a torn one, or something else."""
    digest, _, body = (data or b"").partition(b"\n")
    if xxhash.xxh3_64_hexdigest(body).encode() != digest:
        return None
    try:
        return msgspec.json.decode(body, type=Marker)
    except msgspec.MsgspecError:
        return None


def unseal_pointer(data: bytes | None) -> PolicyVersion | None:
    """The version of a pointer; None for none or a torn one."""
    digest, _, body = (data or b"").partition(b"\n")
    if xxhash.xxh3_64_hexdigest(body).encode() != digest:
        return None
    try:
        return msgspec.json.decode(body, type=PolicyVersion)
    except msgspec.MsgspecError:
        return None


def next_hop(markers: Iterable[Marker], held: PolicyVersion | None, base_digest: str) -> StoredPayload | None:
    """The first payload of the way that leads furthest, and of those ways the one with the fewest bytes.

    Ways: along deltas from what is held; or from a whole state, then along deltas.

    Args:
        held, base_digest: as ChannelReceiver.newest has them.

    Returns:
        None when nothing newer than `held` can be had (base_digest "": no whole state at all).
    """
    ordered = sorted(markers, key=lambda marker: marker.version)
    best: tuple[PolicyVersion, int, StoredPayload] | None = None
    if held is not None and base_digest:
        hops = _along_deltas(ordered, held, base_digest)
        if hops:
            best = (hops[-1].header.version, -sum(hop.header.num_bytes for hop in hops), hops[0])
    for marker in reversed(ordered):
        whole = marker.whole
        if whole is None or (held is not None and base_digest and marker.version <= held):
            continue
        hops = [whole, *_along_deltas(ordered, marker.version, marker.state_digest)]
        way = (hops[-1].header.version, -sum(hop.header.num_bytes for hop in hops), whole)
        if best is None or way[:2] > best[:2]:
            best = way
    return None if best is None else best[2]


def _along_deltas(ordered: list[Marker], version: PolicyVersion, digest: str) -> list[StoredPayload]:
    """The longest leap from each state: an empty delta leaves the digest as it is."""
    hops: list[StoredPayload] = []
    while True:
        leaps = [
            each
            for marker in ordered
            if marker.version > version
            for each in marker.payloads
            if each.header.kind is PayloadKind.DELTA and each.header.base_digest == digest
        ]
        if not leaps:
            return hops
        hops.append(leaps[-1])
        version, digest = leaps[-1].header.version, leaps[-1].header.state_digest


def removable(markers: Iterable[Marker], keep: int, leased: Iterable[PolicyVersion]) -> list[Marker]:
    """Markers that nobody needs any more: older than the `keep`-th newest whole state and than every lease."""
    ordered = sorted(markers, key=lambda marker: marker.version)
    wholes = [marker.version for marker in ordered if marker.whole is not None]
    if len(wholes) < keep:
        return []
    oldest = min([wholes[-keep], *leased])
    return [marker for marker in ordered if marker.version < oldest]
