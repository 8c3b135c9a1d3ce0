"""Chunks tile a payload of any size, and none is kept whose bytes are not the sender's."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import UnsupportedOption, WeightError
from headway.weights.chunks import Assembly, ChunkedPayload, ChunkPlan, Parts


@pytest.mark.parametrize(
    "num_bytes", [0, 1, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) + 1, 2_200_000_000, 5 << 40]
)
@pytest.mark.parametrize("chunk_bytes", [1 << 20, 999_983, 64 << 20])
def test_chunks_tile_payloads_beyond_two_to_the_32(num_bytes: int, chunk_bytes: int) -> None:
    plan = ChunkPlan(num_bytes, chunk_bytes)
    assert (plan.num_chunks - 1) * chunk_bytes < num_bytes <= plan.num_chunks * chunk_bytes or num_bytes == 0
    some = sorted({0, 1, 2047, 2048, plan.num_chunks // 2, plan.num_chunks - 2, plan.num_chunks - 1})
    for index in (each for each in some if 0 <= each < plan.num_chunks):
        start, end = plan.bounds(index)
        assert start == index * chunk_bytes
        assert end - start == chunk_bytes or (index == plan.num_chunks - 1 and end == num_bytes > start)
    for index in (-1, plan.num_chunks):
        with pytest.raises(IndexError):
            plan.bounds(index)


@given(st.integers(0, 5000), st.integers(1, 700))
def test_chunks_cover_every_byte_once(num_bytes: int, chunk_bytes: int) -> None:
    plan = ChunkPlan(num_bytes, chunk_bytes)
    covered = [at for index in range(plan.num_chunks) for at in range(*plan.bounds(index))]
    assert covered == list(range(num_bytes))


@pytest.mark.parametrize(("num_bytes", "chunk_bytes"), [(-1, 10), (10, 0)])
def test_sizes_that_cannot_be_are_refused(num_bytes: int, chunk_bytes: int) -> None:
    with pytest.raises(UnsupportedOption, match="chunks of"):
        ChunkPlan(num_bytes, chunk_bytes)


@given(st.lists(st.binary(max_size=40), max_size=8), st.data())
def test_parts_read_as_one_run_of_bytes(parts: list[bytes], data: st.DataObject) -> None:
    joined = b"".join(parts)
    if not joined:
        return
    start = data.draw(st.integers(0, len(joined) - 1))
    end = data.draw(st.integers(start + 1, len(joined)))
    assert bytes(Parts([memoryview(part) for part in parts]).slice(start, end)) == joined[start:end]


@given(st.binary(max_size=3000), st.integers(1, 500))
def test_an_assembly_ends_with_the_bytes_and_digests_of_the_payload(data: bytes, chunk_bytes: int) -> None:
    half = len(data) // 2
    payload = ChunkedPayload([memoryview(data)[:half], memoryview(data)[half:]], len(data), chunk_bytes)
    into = bytearray(len(data))
    assembly = Assembly(memoryview(into), ChunkPlan(len(data), chunk_bytes))
    for index in range(payload.num_ready):
        digest, body = payload.chunk(index)
        assert digest == xxhash.xxh3_64_intdigest(data[: (index + 1) * chunk_bytes])
        assert assembly.add(digest, body)
        assert assembly.chunk(index) == (digest, body)  # what a relay sends on
    assert assembly.complete
    assert bytes(into) == data


def test_a_damaged_chunk_is_not_kept_and_the_right_one_still_fits() -> None:
    data = bytes(range(250)) * 2
    payload = ChunkedPayload([memoryview(data)], 500, 100)
    into = bytearray(500)
    assembly = Assembly(memoryview(into), payload.plan)
    assert assembly.add(*payload.chunk(0))
    digest, body = payload.chunk(1)
    flipped = bytearray(body)
    flipped[50] ^= 1
    assert not assembly.add(digest, memoryview(flipped))
    assert not assembly.add(digest, body[:-1])
    assert not assembly.add(*payload.chunk(2)), "a chunk out of order has another prefix"
    assert bytes(into) == data[:100] + bytes(400)
    for index in (1, 2, 3, 4):
        assert assembly.add(*payload.chunk(index))
    assert bytes(into) == data


def test_a_destination_or_parts_of_another_size_are_refused() -> None:
    with pytest.raises(WeightError, match="10 bytes for a payload of 11"):
        Assembly(memoryview(bytearray(10)), ChunkPlan(11, 4))
    with pytest.raises(WeightError, match="names 11 bytes, its parts hold 10"):
        ChunkedPayload([memoryview(bytes(10))], 11, 4)
