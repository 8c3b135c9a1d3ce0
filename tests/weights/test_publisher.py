"""The learner's core: forms of a publication, merged deltas, anchors, whole states on demand, compression."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headway.errors import MalformedDelta, UnsupportedOption
from headway.types import Manifest, PolicyVersion
from headway.weights import PayloadKind, WeightPublisher, state_digest
from headway.weights.digest import digest_state, payload_digest
from headway.weights.payload import decode_delta, encode_delta
from headway_kernels.weight_delta import apply_delta, diff

ManifestOf = Callable[..., Manifest]
NUM_ELEMENTS = 200_000


def test_each_form_of_a_publication_leads_to_its_state(manifest_of: ManifestOf, chaos: Any) -> None:
    manifest = manifest_of(NUM_ELEMENTS, "bfloat16")
    channel = chaos(random.Random(0))
    publisher = WeightPublisher(channel, manifest, merged=2, anchor=3)
    flat = torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(0))
    states: dict[str, torch.Tensor] = {}
    for step in range(7):
        flat[step::400] += 1.0
        published = publisher.publish(flat, PolicyVersion(0, step))
        newest = channel.history[-1]
        states[published.digest] = flat.bfloat16()
        assert newest.state_digest == published.digest == state_digest(flat.bfloat16())
        assert len(newest.deltas) == min(step, 3)
        assert newest.anchor == (step % 3 == 0)
        for payload in newest.deltas:
            data = b"".join(payload.parts)
            assert len(data) == payload.header.num_bytes < 0.1 * NUM_ELEMENTS
            assert payload_digest([data]) == payload.header.payload_digest
            state = states[payload.header.base_digest].clone()
            apply_delta(decode_delta(memoryview(data), 1 << 20), state)
            assert torch.equal(state.view(torch.int16), flat.bfloat16().view(torch.int16))
        whole = newest.whole()
        assert whole is not None
        assert whole.header.kind is PayloadKind.WHOLE
        assert b"".join(whole.parts) == flat.bfloat16().view(torch.uint8).numpy().tobytes()
    assert channel.history[-2].whole() is None  # too late: the buffer holds the next version


def test_a_whole_state_given_away_does_not_change_with_the_next_publish(
    manifest_of: ManifestOf, chaos: Any
) -> None:
    channel = chaos(random.Random(0))
    publisher = WeightPublisher(channel, manifest_of())
    publisher.publish(torch.ones(4096), PolicyVersion(0, 0))
    whole = channel.history[-1].whole()
    publisher.publish(torch.zeros(4096), PolicyVersion(0, 1))
    assert bytes(whole.parts[0]) == torch.ones(4096).numpy().tobytes()


def test_a_dense_change_has_no_delta_and_ends_the_chain(manifest_of: ManifestOf, chaos: Any) -> None:
    channel = chaos(random.Random(0))
    publisher = WeightPublisher(channel, manifest_of(NUM_ELEMENTS), merged=2)
    flat = torch.zeros(NUM_ELEMENTS)
    counts = []
    for step, stride in enumerate((1, 1000, 1000, 1, 1000)):
        flat[::stride] += 1.0
        published = publisher.publish(flat, PolicyVersion(0, step))
        counts.append(len(channel.history[-1].deltas))
        assert published.num_changed == len(flat[::stride])
    assert counts == [0, 1, 2, 0, 1]


def test_a_compressed_delta_is_smaller_and_the_same(manifest_of: ManifestOf, chaos: Any) -> None:
    channels = [chaos(random.Random(0)) for _ in range(2)]
    flat = torch.zeros(NUM_ELEMENTS)
    for channel, compression in zip(channels, ("none", "zstd"), strict=True):
        publisher = WeightPublisher(channel, manifest_of(NUM_ELEMENTS), compression=compression)
        publisher.publish(flat, PolicyVersion(0, 0))
        publisher.publish(flat + (torch.arange(NUM_ELEMENTS) % 50 == 0), PolicyVersion(0, 1))
    plain, packed = (b"".join(channel.history[-1].deltas[0].parts) for channel in channels)
    assert len(packed) < len(plain) / 2
    a, b = (decode_delta(memoryview(data), 1 << 20) for data in (plain, packed))
    assert a.payload.tobytes() == b.payload.tobytes()
    for most, cut, why in (
        (100, None, "at most 100"),
        (1 << 20, -9, "does not decompress"),
        (1 << 20, 12, "only 12"),
    ):
        with pytest.raises(MalformedDelta, match=why):
            decode_delta(memoryview(packed)[:cut], most)


def test_compression_without_its_package_is_refused_by_name(
    manifest_of: ManifestOf, chaos: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UnsupportedOption, match=r"headway\[zstd\]"):
        WeightPublisher(chaos(random.Random(0)), manifest_of(), compression="zstd")


def test_a_state_digest_follows_its_blocks(manifest_of: ManifestOf) -> None:
    flat = torch.randn(3 * 65536 + 5)
    digest = digest_state(flat)
    flat[70_000] += 1.0
    other = digest.copy()
    other.read(1, memoryview(flat.numpy()).cast("B")[4 * 65536 : 8 * 65536])
    assert other.hex == state_digest(flat) != digest.hex
    assert len({digest_state(torch.zeros(n)).hex for n in (0, 1, 65536, 65537, 131072)}) == 5


def test_a_delta_payload_names_base_and_state() -> None:
    old, new = torch.zeros(100), torch.ones(100)
    payload = encode_delta(diff(new, old), PolicyVersion(1, 2), "aa", "bb", "none")
    header = payload.header
    assert (header.version, header.kind) == (PolicyVersion(1, 2), PayloadKind.DELTA)
    assert (header.base_digest, header.state_digest) == ("aa", "bb")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_tensor_of_more_than_two_gibibytes(name: str, generator: Callable[..., Any]) -> None:
    from headway.types import TensorSpec
    from headway.weights.shm import ShmReceiver, ShmSender

    size = (2200 << 20) // 4  # beyond 2^31 bytes; about 10 GiB in all
    manifest = Manifest("float32", [TensorSpec("a", [], [size], 0, size, True)], size, size, {})
    publisher = WeightPublisher(ShmSender(name, manifest, num_buffers=2), manifest, merged=0)
    there = generator(ShmReceiver(name, manifest), manifest)
    flat = torch.ones(size)
    for step in range(2):
        flat[step::50_000_017] = float(step + 2)
        flat[-1 - step] = float(step)
        published = publisher.publish(flat, PolicyVersion(0, step))
        assert there.refresh()
        assert there.acked[-1].digest == published.digest
        assert torch.equal(there.engine.flat, flat)
    assert published.num_bytes < 1 << 20
    there.stager.close()
    publisher.close()


@pytest.mark.slow
def test_a_hundred_thousand_tensors_of_sixteen_bytes(name: str, generator: Callable[..., Any]) -> None:
    from headway.model.flat import build_manifest, flatten
    from headway.weights.shm import ShmReceiver, ShmSender

    module = torch.nn.ParameterList([torch.nn.Parameter(torch.full((4,), float(n))) for n in range(100_000)])
    manifest = build_manifest(module, "float32")
    flat, _ = flatten(module, manifest, with_grad=False)
    publisher = WeightPublisher(ShmSender(name, manifest), manifest, merged=0)
    there = generator(ShmReceiver(name, manifest), manifest)
    for step in range(3):
        module[99_999 - step].data[0] += 1.0
        published = publisher.publish(flat, PolicyVersion(0, step))
        assert there.refresh()
        assert there.acked[-1].digest == published.digest
        assert torch.equal(there.engine.flat, flat)
    assert published.num_changed == 1
    there.stager.close()
    publisher.close()
