"""The shm channel in one process: bits, order, counts, refusals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from headway.errors import WeightError
from headway.types import Manifest, PolicyVersion
from headway.weights import ShmPublisher, ShmReceiver, shm, weights_digest
from headway.weights.segment import SharedSegment, segment_name, shared_directory

ManifestOf = Callable[..., Manifest]
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


def test_fp32_arrives_bit_for_bit(name: str, manifest_of: ManifestOf) -> None:
    manifest = manifest_of(4096)
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    bits[: len(BITS)] = BITS
    flat = torch.from_numpy(bits.view(np.float32).copy())
    publisher, receiver = ShmPublisher(name, manifest), ShmReceiver(name, manifest)
    published = publisher.publish(flat, PolicyVersion(0, 1))
    out = torch.zeros(4096)
    assert receiver.fetch(out) == (PolicyVersion(0, 1), published.digest)
    assert out.numpy().view(np.uint32).tolist() == bits.tolist()
    assert published.digest == weights_digest(flat)
    assert published.num_bytes == 4 * 4096
    receiver.close()
    publisher.close()


def test_bf16_arrives_bit_for_bit(name: str, manifest_of: ManifestOf) -> None:
    manifest = manifest_of(65536, "bfloat16")
    bits = np.arange(65536, dtype=np.uint16)  # every bf16 number there is
    values = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)
    flat = values.float()
    publisher, receiver = ShmPublisher(name, manifest), ShmReceiver(name, manifest)
    published = publisher.publish(flat, PolicyVersion(0, 1))
    out = torch.zeros(65536)
    version, digest = receiver.fetch(out)
    assert (version, digest) == (PolicyVersion(0, 1), published.digest)
    assert published.num_bytes == 2 * 65536
    number = ~torch.isnan(flat)
    assert torch.equal(out.view(torch.int32)[number], flat.view(torch.int32)[number])
    assert torch.isnan(out[~number]).all()  # a cast to bf16 keeps that it is no number, not its payload
    receiver.close()
    publisher.close()


def test_fp32_values_are_rounded_once_to_nearest_even(name: str, manifest_of: ManifestOf) -> None:
    manifest = manifest_of(4096, "bfloat16")
    flat = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    publisher, receiver = ShmPublisher(name, manifest), ShmReceiver(name, manifest)
    publisher.publish(flat, PolicyVersion(0, 1))
    out = torch.zeros(4096)
    receiver.fetch(out)
    assert torch.equal(out, flat.to(torch.bfloat16).float())
    receiver.close()
    publisher.close()


def test_versions_only_go_forward_and_the_newest_is_served(name: str, manifest_of: ManifestOf) -> None:
    manifest = manifest_of()
    publisher, receiver = ShmPublisher(name, manifest), ShmReceiver(name, manifest)
    out = torch.zeros(4096)
    assert receiver.newest() is None
    with pytest.raises(WeightError, match="not published any"):
        receiver.fetch(out)
    order = [
        PolicyVersion(0, 0),
        PolicyVersion(0, 3),
        PolicyVersion(0, 4),
        PolicyVersion(1, 0),
        PolicyVersion(1, 1),
    ]
    for number, version in enumerate(order):
        publisher.publish(torch.full((4096,), float(number)), version)
        assert receiver.newest() == version
        assert receiver.fetch(out)[0] == version
        assert (out == number).all()
        for older in order[: number + 1]:
            with pytest.raises(WeightError, match=f"{older} is not newer"):
                publisher.publish(torch.full((4096,), -1.0), older)
        assert receiver.fetch(out)[0] == version  # a refused publish leaves what was there
        assert (out == number).all()
    late = ShmReceiver(name, manifest)  # a joiner gets the newest
    assert late.newest() == order[-1]
    for each in (late, receiver, publisher):
        each.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_changed_elements_are_counted_by_their_bits(name: str, manifest_of: ManifestOf, dtype: str) -> None:
    publisher = ShmPublisher(name, manifest_of(4096, dtype))
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


def test_a_receiver_of_another_model_is_refused(name: str, manifest_of: ManifestOf) -> None:
    publisher = ShmPublisher(name, manifest_of())
    for other in (manifest_of(name="c"), manifest_of(dtype="bfloat16"), manifest_of(8192)):
        with pytest.raises(WeightError, match="is not this model's"):
            ShmReceiver(name, other)
    publisher.close()


def test_a_publish_does_not_rewrite_what_a_joiner_checks(name: str, manifest_of: ManifestOf) -> None:
    publisher = ShmPublisher(name, manifest_of())
    memory = publisher._segment.memory
    marked = b"m" * 24  # magic and manifest digest: a write, even of the same bytes, would undo the marks
    memory[:24] = marked
    publisher.publish(torch.zeros(4096), PolicyVersion(0, 0))
    publisher.publish(torch.ones(4096), PolicyVersion(0, 1))
    assert memory[:24] == marked
    publisher.close()


class Disturbance:
    """Publishes further versions while a receiver is between its copy and its check."""

    def __init__(self, publisher: ShmPublisher, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.publisher, self.times, self.step = publisher, times, 1
        self._digest = weights_digest
        monkeypatch.setattr(shm, "weights_digest", self)

    def __call__(self, published: torch.Tensor) -> str:
        digest = self._digest(published)
        if self.times > 0 and published.data_ptr() not in [b.data_ptr() for b in self.publisher._buffers]:
            self.times -= 1
            for _ in range(2):
                self.step += 1
                self.publisher.publish(torch.full((4096,), float(self.step)), PolicyVersion(0, self.step))
        return digest


def test_a_copy_that_two_publishes_overtook_is_made_again(
    name: str, manifest_of: ManifestOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, receiver = ShmPublisher(name, manifest_of()), ShmReceiver(name, manifest_of())
    publisher.publish(torch.ones(4096), PolicyVersion(0, 1))
    disturbance = Disturbance(publisher, 3, monkeypatch)
    out = torch.zeros(4096)
    assert receiver.fetch(out)[0] == PolicyVersion(0, 7)
    assert (out == 7).all()
    disturbance.times = shm.COPY_ATTEMPTS
    with pytest.raises(WeightError, match="pushes outrun the copy"):
        receiver.fetch(out)
    receiver.close()
    publisher.close()


def test_a_segment_is_private_owned_once_and_gone_after_close(name: str, manifest_of: ManifestOf) -> None:
    publisher = ShmPublisher(name, manifest_of())
    path = shared_directory() / name
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(WeightError, match="exists already"):
        ShmPublisher(name, manifest_of())
    receiver = ShmReceiver(name, manifest_of())
    receiver.close()
    assert path.exists()
    publisher.close()
    assert not path.exists()
    with pytest.raises(WeightError, match="its learner has ended"):
        ShmReceiver(name, manifest_of())


def test_a_receiver_goes_on_serving_after_its_learner_has_gone(name: str, manifest_of: ManifestOf) -> None:
    publisher, receiver = ShmPublisher(name, manifest_of()), ShmReceiver(name, manifest_of())
    publisher.publish(torch.full((4096,), 7.0), PolicyVersion(0, 1))
    publisher.close()
    out = torch.zeros(4096)
    assert receiver.fetch(out)[0] == PolicyVersion(0, 1)
    assert (out == 7).all()
    receiver.close()


def test_memory_that_is_not_there_is_an_error_now_not_a_bus_error_later(name: str) -> None:
    with pytest.raises(WeightError, match="MiB needed"):
        SharedSegment(name, 1 << 60)
    assert not (shared_directory() / name).exists()


def test_the_name_holds_run_and_owner() -> None:
    assert segment_name("abc123", 4711) == "headway-abc123-4711"
