"""From any state held, the hops that the index names end at the newest version; the cleaner leaves enough for that."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.types import PolicyVersion
from headway.weights import PayloadHeader, PayloadKind
from headway.weights.store_index import Marker, StoredPayload, next_hop, removable, seal, unseal_marker

WHOLE_BYTES, DELTA_BYTES = 1000, 10


def stored(step: int, state: str, base: str | None) -> StoredPayload:
    kind = PayloadKind.WHOLE if base is None else PayloadKind.DELTA
    size = WHOLE_BYTES if base is None else DELTA_BYTES
    header = PayloadHeader(PolicyVersion(0, step), kind, base or "", state, size, "x")
    return StoredPayload(header, f"payloads/{step}.{kind}", "y")


def marker(step: int, state: str, *payloads: StoredPayload) -> Marker:
    return Marker("run", "manifest", PolicyVersion(0, step), state, list(payloads))


def chain(length: int, anchors: set[int], unchanged: set[int] = frozenset()) -> list[Marker]:  # type: ignore[assignment]
    """Deltas from each version to the next, whole states at `anchors`; `unchanged` steps repeat the state before."""
    markers: list[Marker] = []
    state = ""
    for step in range(1, length + 1):
        base, state = state, state if step in unchanged and state else f"s{step}"
        payloads = [stored(step, state, base)] if base else []
        if step in anchors or not base:
            payloads.append(stored(step, state, None))
        markers.append(marker(step, state, *payloads))
    return markers


def walk(markers: list[Marker], held: PolicyVersion | None, digest: str) -> list[PayloadHeader]:
    hops: list[PayloadHeader] = []
    while (hop := next_hop(markers, held, digest)) is not None:
        header = hop.header
        assert held is None or not digest or header.version > held
        assert header.kind is PayloadKind.WHOLE or header.base_digest == digest
        hops.append(header)
        held, digest = header.version, header.state_digest
        assert len(hops) <= len(markers)
    return hops


@given(st.integers(0, 100_000))
def test_every_walk_ends_at_the_newest_version(seed: int) -> None:
    dice = random.Random(seed)
    length = dice.randrange(1, 15)
    markers = chain(
        length,
        {step for step in range(1, length + 1) if dice.random() < 0.3},
        {step for step in range(2, length + 1) if dice.random() < 0.2},
    )
    keep = 2
    gone = removable(markers, keep, [])
    left = [each for each in markers if each not in gone]
    dice.shuffle(left)
    newest = markers[-1]
    for start in markers:
        hops = walk(left, start.version, start.state_digest)
        assert (hops[-1].version if hops else start.version) == newest.version
        assert (hops[-1].state_digest if hops else start.state_digest) == newest.state_digest
    joined = walk(left, None, "")
    assert joined[0].kind is PayloadKind.WHOLE
    assert joined[-1].version == newest.version


def test_the_way_with_fewer_bytes_is_taken() -> None:
    markers = chain(12, {1, 10})
    one = PolicyVersion(0, 1)
    assert [hop.version.step for hop in walk(markers, one, "s1")] == list(range(2, 13))
    for each in markers[1:]:
        each.payloads[0] = stored(each.version.step, each.state_digest, f"s{each.version.step - 1}")
    heavy = [
        marker(
            each.version.step,
            each.state_digest,
            *(
                StoredPayload(
                    PayloadHeader(
                        one.header.version,
                        one.header.kind,
                        one.header.base_digest,
                        one.header.state_digest,
                        200,
                        "x",
                    ),
                    one.name,
                    "y",
                )
                if one.header.kind is PayloadKind.DELTA
                else one
                for one in each.payloads
            ),
        )
        for each in markers
    ]
    assert [hop.version.step for hop in walk(heavy, PolicyVersion(0, 1), "s1")] == [10, 11, 12]


def test_a_state_that_is_distrusted_is_fetched_whole_again() -> None:
    markers = chain(3, {1, 3})
    hop = next_hop(markers, PolicyVersion(0, 3), "")
    assert hop is not None
    assert (hop.header.kind, hop.header.version.step) == (PayloadKind.WHOLE, 3)
    assert next_hop(markers, PolicyVersion(0, 3), "s3") is None
    assert next_hop([], None, "") is None


def test_two_whole_states_and_everything_leased_stay() -> None:
    markers = chain(12, {1, 4, 7, 10})
    assert [each.version.step for each in removable(markers, 2, [])] == [1, 2, 3, 4, 5, 6]
    assert [each.version.step for each in removable(markers, 2, [PolicyVersion(0, 3)])] == [1, 2]
    assert removable(markers, 5, []) == []


def test_a_torn_or_foreign_marker_counts_as_none() -> None:
    whole = seal(chain(1, {1})[0])
    assert unseal_marker(whole) == chain(1, {1})[0]
    for cut in range(len(whole)):
        assert unseal_marker(whole[:cut]) is None
    flipped = bytearray(whole)
    flipped[40] ^= 1
    assert unseal_marker(bytes(flipped)) is None
    assert unseal_marker(None) is None


@pytest.mark.parametrize("data", [b"", b"\n", b"{}", b"x\n{}"])
def test_rubbish_is_no_marker(data: bytes) -> None:
    assert unseal_marker(data) is None
