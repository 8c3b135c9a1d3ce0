"""The shm channel in one process: bits, order, counts, pins, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headway.errors import DeadlineExceeded, WeightError
from headway.types import Manifest, PolicyVersion
from headway.weights import PayloadKind, WeightPublisher, segment_name, state_digest
from headway.weights.segment import SharedSegment, shared_directory
from headway.weights.shm import ShmReceiver, ShmSender

ManifestOf = Callable[..., Manifest]
MakeGenerator = Callable[..., Any]
# NaNs with payloads, both signs; both zeros and infinities; the smallest and largest numbers.
BITS = [
    0x7FC00000,
    0x7FA12345,
    0xFFC0BEEF,
    0xFF800001,
    0x80000000,
    0,
    0x7F800000,
    0xFF800000,
    1,
    0x807FFFFF,
    0x7F7FFFFF,
]


def learner(name: str, manifest: Manifest, **options: Any) -> WeightPublisher:
    return WeightPublisher(ShmSender(name, manifest, **options), manifest, merged=0, deadline_s=0.05)


@pytest.mark.parametrize("swap", [False, True])
def test_fp32_arrives_bit_for_bit(
    name: str, manifest_of: ManifestOf, generator: MakeGenerator, swap: bool
) -> None:
    manifest = manifest_of(4096)
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    bits[: len(BITS)] = BITS
    flat = torch.from_numpy(bits.view(np.float32).copy())
    publisher = learner(name, manifest)
    there = generator(ShmReceiver(name, manifest, whole_only=swap), manifest, swap=swap)
    published = publisher.publish(flat, PolicyVersion(0, 1))
    assert there.refresh()
    assert there.engine.flat.numpy().view(np.uint32).tolist() == bits.tolist()
    assert [(proof.version, proof.digest) for proof in there.acked] == [
        (PolicyVersion(0, 1), published.digest)
    ]
    assert published.digest == state_digest(flat)
    assert published.num_bytes == 4 * 4096
    there.stager.close()
    publisher.close()


def test_bf16_arrives_bit_for_bit_nan_payloads_included(
    name: str, manifest_of: ManifestOf, generator: MakeGenerator
) -> None:
    manifest = manifest_of(65536, "bfloat16")
    bits = np.arange(65536, dtype=np.uint16)  # every bf16 number there is
    nan = (bits & 0x7FFF) > 0x7F80
    flat = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).float()
    publisher, there = learner(name, manifest), generator(ShmReceiver(name, manifest), manifest)
    published = publisher.publish(flat, PolicyVersion(0, 1))
    assert there.refresh()
    served = there.engine.flat.numpy().view(np.uint32)
    assert (served & 0xFFFF == 0).all()
    # a cast makes a signalling NaN quiet (one bit) and keeps sign and payload
    assert (served >> 16).tolist() == np.where(nan, bits | 0x40, bits).tolist()
    assert there.acked[0].digest == published.digest
    assert published.num_bytes == 2 * 65536
    there.stager.close()
    publisher.close()


def test_fp32_values_are_rounded_once_to_nearest_even(
    name: str, manifest_of: ManifestOf, generator: MakeGenerator
) -> None:
    manifest = manifest_of(4096, "bfloat16")
    flat = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    publisher, there = learner(name, manifest), generator(ShmReceiver(name, manifest), manifest)
    publisher.publish(flat, PolicyVersion(0, 1))
    assert there.refresh()
    assert torch.equal(there.engine.flat, flat.to(torch.bfloat16).float())
    there.stager.close()
    publisher.close()


def test_versions_only_go_forward_and_the_newest_is_served(
    name: str, manifest_of: ManifestOf, generator: MakeGenerator
) -> None:
    manifest = manifest_of()
    publisher, there = learner(name, manifest), generator(ShmReceiver(name, manifest), manifest)
    assert not there.refresh()
    order = [PolicyVersion(*pair) for pair in ((0, 0), (0, 3), (0, 4), (1, 0), (1, 1))]
    for number, version in enumerate(order):
        publisher.publish(torch.full((4096,), float(number)), version)
        assert there.refresh()
        assert there.engine.version == version
        assert (there.engine.flat == number).all()
        for older in order[: number + 1]:
            with pytest.raises(WeightError, match=f"{older} is not newer"):
                publisher.publish(torch.full((4096,), -1.0), older)
        assert not there.refresh()  # a refused publish leaves what was there
    late = generator(ShmReceiver(name, manifest), manifest)  # a joiner gets the newest
    assert late.refresh()
    assert late.engine.version == order[-1]
    for each in (late.stager, there.stager, publisher):
        each.close()


def test_a_version_that_changes_nothing_is_put_in_force_all_the_same(
    name: str, manifest_of: ManifestOf, generator: MakeGenerator
) -> None:
    manifest = manifest_of()
    publisher, there = learner(name, manifest), generator(ShmReceiver(name, manifest), manifest)
    flat = torch.ones(4096)
    for step in range(4):
        publisher.publish(flat, PolicyVersion(0, step))
        assert there.refresh()
    assert [proof.version.step for proof in there.acked] == [0, 1, 2, 3]
    assert len({proof.digest for proof in there.acked}) == 1
    there.stager.close()
    publisher.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_changed_elements_are_counted_by_their_bits(name: str, manifest_of: ManifestOf, dtype: str) -> None:
    publisher = learner(name, manifest_of(4096, dtype))
    flat = torch.ones(4096)
    flat[0] = 0.0
    assert publisher.publish(flat, PolicyVersion(0, 0)).num_changed == 4096
    assert publisher.publish(flat, PolicyVersion(0, 1)).num_changed == 0
    flat[0] = -0.0
    flat[100:107] = 2.0
    assert publisher.publish(flat, PolicyVersion(0, 2)).num_changed == 8
    flat[200:300] *= 1 + 2**-10  # less than a bf16 step, more than an fp32 one
    assert publisher.publish(flat, PolicyVersion(0, 3)).num_changed == (100 if dtype == "float32" else 0)
    publisher.close()


def test_a_sparse_change_travels_as_a_delta_and_two_missed_ones_as_a_chain(
    name: str, manifest_of: ManifestOf, generator: MakeGenerator
) -> None:
    manifest = manifest_of(200_000, "bfloat16")
    publisher, receiver = learner(name, manifest), ShmReceiver(name, manifest)
    there = generator(receiver, manifest)
    flat = torch.randn(200_000).bfloat16().float()
    first = publisher.publish(flat, PolicyVersion(0, 0))
    there.refresh()
    for step in (1, 2):
        flat[step::150] += 1.0
        published = publisher.publish(flat, PolicyVersion(0, step))
    header = receiver.newest(PolicyVersion(0, 0), first.digest)
    assert header is not None
    assert header.kind is PayloadKind.DELTA
    assert header.version == PolicyVersion(0, 1)
    assert there.refresh()
    assert [proof.version.step for proof in there.acked] == [0, 2]  # the first is merged, never applied alone
    assert there.engine.pauses == 2
    assert torch.equal(there.engine.flat, flat.bfloat16().float())
    assert published.num_bytes < 0.05 * 200_000
    flat[3::150] += 1.0
    publisher.publish(flat, PolicyVersion(0, 3))
    flat[:] += 1.0  # dense: no delta, so the chain is broken and the whole state goes
    publisher.publish(flat, PolicyVersion(0, 4))
    held = there.acked[-1]
    assert receiver.newest(held.version, held.digest).kind is PayloadKind.WHOLE  # type: ignore[union-attr]
    assert there.refresh()
    assert torch.equal(there.engine.flat, flat.bfloat16().float())
    there.stager.close()
    publisher.close()


def test_a_receiver_of_another_model_is_refused(name: str, manifest_of: ManifestOf) -> None:
    publisher = learner(name, manifest_of())
    for other in (manifest_of(name="c"), manifest_of(dtype="bfloat16"), manifest_of(8192)):
        with pytest.raises(WeightError, match="is not this model's"):
            ShmReceiver(name, other)
    publisher.close()


# Pins -----------------------------------------------------------------------------------------------------------


def test_what_is_served_from_shared_memory_is_never_overwritten(
    name: str, manifest_of: ManifestOf, generator: MakeGenerator
) -> None:
    manifest = manifest_of()
    publisher = learner(name, manifest)
    there = generator(ShmReceiver(name, manifest, whole_only=True), manifest, swap=True)
    publisher.publish(torch.full((4096,), 1.0), PolicyVersion(0, 1))
    there.refresh()
    served = there.engine.flat
    for step in range(2, 20):  # the reader decodes and does not look
        publisher.publish(torch.full((4096,), float(step)), PolicyVersion(0, step))
        assert (served == 1).all()
    assert there.refresh()
    assert (there.engine.flat == 19).all()
    publisher.publish(torch.full((4096,), 20.0), PolicyVersion(0, 20))
    publisher.publish(torch.full((4096,), 21.0), PolicyVersion(0, 21))
    assert (served != 1).any()  # given back after the swap
    there.stager.close()
    publisher.close()


def test_a_writer_without_a_free_buffer_asks_waits_and_names_who_reads(
    name: str, manifest_of: ManifestOf, generator: MakeGenerator
) -> None:
    manifest = manifest_of()
    publisher = learner(name, manifest, num_buffers=3)
    readers = [generator(ShmReceiver(name, manifest, whole_only=True), manifest, swap=True) for _ in range(2)]
    for step, reader in enumerate(readers, 1):
        publisher.publish(torch.full((4096,), float(step)), PolicyVersion(0, step))
        reader.refresh()
    publisher.publish(torch.full((4096,), 3.0), PolicyVersion(0, 3))
    with pytest.raises(DeadlineExceeded, match=r"read by the processes \d+"):
        publisher.publish(torch.full((4096,), 4.0), PolicyVersion(0, 4))
    assert (readers[0].engine.flat == 1).all()
    # the next step of a reader that cannot swap yet (drain) copies what it serves out of the way
    assert readers[0].stager.relieve()
    readers[0].stager.turn()
    assert (readers[0].engine.flat == 1).all()
    publisher.publish(torch.full((4096,), 4.0), PolicyVersion(0, 4))
    assert (readers[0].engine.flat == 1).all()
    assert (readers[1].engine.flat == 2).all()
    for reader in readers:
        assert reader.refresh()
        assert (reader.engine.flat == 4).all()
        reader.stager.close()
    publisher.close()


def test_a_staged_push_is_let_go_when_the_writer_needs_its_memory(
    name: str, manifest_of: ManifestOf, generator: MakeGenerator
) -> None:
    manifest = manifest_of()
    publisher = learner(name, manifest)
    there = generator(ShmReceiver(name, manifest, whole_only=True), manifest, swap=True)
    publisher.publish(torch.full((4096,), 1.0), PolicyVersion(0, 1))
    there.refresh()
    publisher.publish(torch.full((4096,), 2.0), PolicyVersion(0, 2))
    there.turn()
    assert there.stager.staged() == PolicyVersion(0, 2)
    publisher.publish(torch.full((4096,), 3.0), PolicyVersion(0, 3))
    with pytest.raises(DeadlineExceeded):
        publisher.publish(torch.full((4096,), 4.0), PolicyVersion(0, 4))
    there.turn()  # lets 2 go, stages 3
    assert there.stager.staged() == PolicyVersion(0, 3)
    publisher.publish(torch.full((4096,), 4.0), PolicyVersion(0, 4))
    assert there.refresh()
    assert (there.engine.flat == 4).all()
    assert [proof.version.step for proof in there.acked] == [1, 4]
    there.stager.close()
    publisher.close()


# The segment ----------------------------------------------------------------------------------------------------


def test_a_segment_is_private_owned_once_and_gone_after_close(name: str, manifest_of: ManifestOf) -> None:
    publisher = learner(name, manifest_of())
    path = shared_directory() / name
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(WeightError, match="exists already"):
        ShmSender(name, manifest_of())
    receiver = ShmReceiver(name, manifest_of())
    receiver.close()
    assert path.exists()
    publisher.close()
    assert not path.exists()
    with pytest.raises(WeightError, match="its learner has ended"):
        ShmReceiver(name, manifest_of())


def test_a_receiver_goes_on_serving_after_its_learner_has_gone(
    name: str, manifest_of: ManifestOf, generator: MakeGenerator
) -> None:
    manifest = manifest_of()
    publisher = learner(name, manifest)
    there = generator(ShmReceiver(name, manifest, whole_only=True), manifest, swap=True)
    publisher.publish(torch.full((4096,), 7.0), PolicyVersion(0, 1))
    publisher.close()
    assert there.refresh()
    assert (there.engine.flat == 7).all()
    there.stager.close()
    assert (there.engine.flat == 7).all()


def test_more_readers_than_rows_are_refused(name: str, manifest_of: ManifestOf) -> None:
    manifest = manifest_of()
    sender = ShmSender(name, manifest)
    readers = [ShmReceiver(name, manifest) for _ in range(64)]
    with pytest.raises(WeightError, match="64 generators"):
        ShmReceiver(name, manifest)
    readers.pop().close()
    readers.append(ShmReceiver(name, manifest))
    for reader in readers:
        reader.close()
    sender.close()


def test_memory_that_is_not_there_is_an_error_now_not_a_bus_error_later(name: str) -> None:
    with pytest.raises(WeightError, match="MiB needed"):
        SharedSegment(name, 1 << 60)
    assert not (shared_directory() / name).exists()


def test_the_name_holds_run_and_owner() -> None:
    assert segment_name("abc123", 4711) == "headway-abc123-4711"
