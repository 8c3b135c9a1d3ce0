"""Staging, applying and proving: the old version or the new, never a mix, whatever the channel does."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from headway.errors import WeightError
from headway.types import Manifest, PolicyVersion
from headway.weights import DoubledServed, PayloadKind, Stager, StagerThread, WeightPublisher, state_digest
from headway.weights.served import FlatServed
from headway_kernels.weight_delta import Delta

ManifestOf = Callable[..., Manifest]
MakeGenerator = Callable[..., Any]
FAULTS = ("cut", "bit", "length", "gone", "late", "other base", "garbage", "stale", "misnamed")  # of chaos.py
NUM_ELEMENTS = 70_000  # two blocks, the second short


def walk(flat: torch.Tensor, draw: random.Random) -> None:
    """One update: nothing, a few elements, one block, or everything."""
    kind = draw.randrange(4)
    noise = torch.Generator().manual_seed(draw.randrange(2**31))
    if kind == 1:
        chosen = torch.randint(0, len(flat), (draw.randrange(1, 700),), generator=noise)
        flat[chosen] = torch.randn(len(chosen), generator=noise)
    elif kind == 2:
        flat[65536:] = torch.randn(len(flat) - 65536, generator=noise)
    elif kind == 3:
        flat[:] = torch.randn(len(flat), generator=noise)


def bits(flat: torch.Tensor, dtype: str) -> np.ndarray:
    cast = flat.to(torch.bfloat16) if dtype == "bfloat16" else flat
    return cast.view(torch.int16 if dtype == "bfloat16" else torch.int32).numpy()


def run_sequence(
    chaos: Any, manifest: Manifest, generator: MakeGenerator, seed: int, num_pushes: int
) -> None:
    """Pushes through a faulty channel to generators that look when they like, join and rewind; ends in calm."""
    draw = random.Random(seed)
    channel = chaos(draw, share=0.4)
    publisher = WeightPublisher(
        channel, manifest, merged=draw.randrange(3), anchor=3, compression=draw.choice(["none", "zstd"])
    )
    flat = torch.randn(manifest.num_elements, generator=torch.Generator().manual_seed(seed))
    published: dict[PolicyVersion, tuple[str, np.ndarray]] = {}
    fleet = [generator(channel, manifest) for _ in range(2)]
    version, kept = PolicyVersion(0, 0), flat.clone()
    for _ in range(num_pushes):
        result = publisher.publish(flat, version)
        published[version] = (result.digest, bits(flat, manifest.dtype).copy())
        if draw.random() < 0.1:
            kept = flat.clone()
        if draw.random() < 0.1:
            fleet[draw.randrange(2)] = generator(channel, manifest)
        for each in fleet:
            for _ in range(draw.randrange(6)):
                each.stager.turn()
            if draw.random() < 0.7 and each.stager.commit() is not None:
                each.stager.turn()
            check(each, published, manifest)
        if draw.random() < 0.1:  # a resume: older weights under a newer epoch
            flat.copy_(kept)
            version = PolicyVersion(version.epoch + 1, max(0, version.step - 3))
        else:
            walk(flat, draw)
            version = PolicyVersion(version.epoch, version.step + 1)
    channel.share = 0.0
    joiner = generator(channel, manifest)  # gets the whole state, what the others must equal
    for each in [*fleet, joiner]:
        while each.refresh():
            pass
        check(each, published, manifest)
        assert each.engine.version == max(published)


def check(each: Any, published: dict[PolicyVersion, tuple[str, np.ndarray]], manifest: Manifest) -> None:
    """Exactly the bits of the version that it says is in force, and the digest proved."""
    version = each.engine.version
    for proof in each.stager.proofs():
        assert proof.digest == published[proof.version][0]
    if version is not None:
        assert np.array_equal(bits(each.engine.flat, manifest.dtype), published[version][1])


@pytest.fixture(params=["in place", "doubled"])
def either(request: pytest.FixtureRequest, generator: MakeGenerator) -> MakeGenerator:
    """A generator that pushes are written into, and one that serves from two buffers by turns."""
    return functools.partial(generator, doubled=request.param == "doubled")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_pushes_through_a_faulty_channel_ends_bit_equal_to_a_whole_push(
    manifest_of: ManifestOf, either: MakeGenerator, chaos: Any, seed: int, dtype: str
) -> None:
    run_sequence(chaos, manifest_of(NUM_ELEMENTS, dtype), either, seed, 12)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.timeout(1200)
def test_a_thousand_sequences_of_pushes_end_bit_equal_to_a_whole_push(
    manifest_of: ManifestOf, either: MakeGenerator, chaos: Any, dtype: str
) -> None:
    for seed in range(500):
        run_sequence(chaos, manifest_of(NUM_ELEMENTS, dtype), either, 1000 + seed, 12)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_payload_leaves_the_old_version_serving_and_the_next_push_succeeds(
    manifest_of: ManifestOf, either: MakeGenerator, chaos: Any, fault: str
) -> None:
    manifest = manifest_of(NUM_ELEMENTS, "bfloat16")
    channel = chaos(random.Random(1))
    publisher, there = WeightPublisher(channel, manifest), either(channel, manifest)
    flat = torch.randn(NUM_ELEMENTS)
    for step in range(3):
        flat[step::200] += 1
        publisher.publish(flat, PolicyVersion(0, step))
        assert there.refresh()
    old = there.engine.flat.clone()
    flat[7::200] += 1
    publisher.publish(flat, PolicyVersion(0, 3))
    newest = channel.newest

    def faulty(held: PolicyVersion | None, base: str) -> Any:
        channel.share, channel.draw = 1.0, FixedFault(fault)
        header = newest(held, base)
        channel.share = 0.0
        return header

    channel.newest = faulty  # type: ignore[method-assign]
    for _ in range(10):
        there.stager.turn()
        assert there.stager.staged() is None
        assert torch.equal(there.engine.flat, old)
        assert there.engine.version == PolicyVersion(0, 2)
    assert channel.asked
    channel.newest = newest  # type: ignore[method-assign]
    assert there.refresh()
    assert there.engine.version == PolicyVersion(0, 3)
    assert torch.equal(there.engine.flat, flat.bfloat16().float())


class FixedFault(random.Random):
    """Draws one fault, and always the oldest of what it may choose."""

    def __init__(self, fault: str) -> None:
        super().__init__(0)
        self._fault = fault

    def choice(self, seq: Any) -> Any:
        return self._fault if tuple(seq) == FAULTS else seq[0]


def test_a_delta_is_cut_at_every_byte_and_never_applied(
    manifest_of: ManifestOf, generator: MakeGenerator, chaos: Any
) -> None:
    manifest = manifest_of(256, "bfloat16")
    channel = chaos(random.Random(1))
    publisher, there = WeightPublisher(channel, manifest), generator(channel, manifest)
    flat = torch.randn(256).bfloat16().float()
    publisher.publish(flat, PolicyVersion(0, 0))
    there.refresh()
    old = there.engine.flat.clone()
    flat[5] += 1.0
    publisher.publish(flat, PolicyVersion(0, 1))
    header = channel.history[-1].deltas[0].header
    data = b"".join(channel.history[-1].deltas[0].parts)
    fetch, newest = channel.fetch, channel.newest
    channel.newest = lambda held, base: header  # type: ignore[method-assign]
    for at in range(len(data)):

        def cut(_: Any, into: memoryview, deadline_s: float, at: int = at) -> None:
            into[:at] = data[:at]
            into[at:] = bytes(len(data) - at)
            if at % 2:
                raise WeightError(f"the peer died after {at} bytes")

        channel.fetch = cut  # type: ignore[method-assign]
        there.stager.turn()
        there.stager.num_failures = 0
        there.stager._distrusted = False
        staged = there.stager.staged()
        assert staged is None or bytes(len(data) - at) == data[at:]
        assert torch.equal(there.engine.flat, old)
        there.stager._staged = None
    channel.fetch, channel.newest = fetch, newest  # type: ignore[method-assign]
    assert there.refresh()
    assert torch.equal(there.engine.flat, flat.bfloat16().float())


def test_a_delta_on_another_base_is_refused_and_the_whole_state_asked_for(
    manifest_of: ManifestOf, generator: MakeGenerator, chaos: Any
) -> None:
    manifest = manifest_of(NUM_ELEMENTS)
    channel = chaos(random.Random(1))
    publisher, there = WeightPublisher(channel, manifest), generator(channel, manifest)
    flat = torch.zeros(NUM_ELEMENTS)
    publisher.publish(flat, PolicyVersion(0, 0))
    there.refresh()
    for step in (1, 2):
        flat[step] = 1.0
        publisher.publish(flat, PolicyVersion(0, step))
    wrong = channel.history[2].deltas[0].header  # from 1, which was never here
    newest = channel.newest
    channel.newest = lambda held, base: wrong if base else newest(held, base)  # type: ignore[method-assign]
    there.stager.turn()
    assert there.stager.staged() is None
    assert "is from the state" in channel.asked[0]
    assert there.refresh()  # by the whole state
    assert there.engine.flat[:4].tolist() == [0.0, 1.0, 1.0, 0.0]


def test_what_is_served_does_not_change_until_the_commit_of_a_doubled_engine_and_then_at_once(
    manifest_of: ManifestOf, generator: MakeGenerator, chaos: Any
) -> None:
    """Each push lies in the other buffer before the commit, deltas that join it too, and the commit only swaps."""
    manifest = manifest_of(NUM_ELEMENTS, "bfloat16")
    channel = chaos(random.Random(1))
    publisher, there = WeightPublisher(channel, manifest), generator(channel, manifest, doubled=True)
    there.engine.apply = None  # type: ignore[assignment]  # nothing is ever written into what is served
    flat = torch.zeros(NUM_ELEMENTS)
    publisher.publish(flat, PolicyVersion(0, 0))
    assert there.refresh()
    for step in range(1, 9):
        served = there.engine.flat
        before = served.clone()
        for at in range(1 + step % 3):
            flat[step + 31 * at :: 300] += 1
            publisher.publish(flat, PolicyVersion(step, at))
            there.turn()
            assert torch.equal(served, before)
            if step == 5:  # the learner wants its memory back: what was written beside is worth nothing
                there.stager._staged = None
                there.turn()
        assert there.stager.commit() == PolicyVersion(step, step % 3)
        assert there.engine.flat is not served
        assert torch.equal(there.engine.flat, flat.bfloat16().float())
        there.turn()
    assert len(there.stager.proofs()) == 8


def test_two_pushes_staged_are_one_apply(
    manifest_of: ManifestOf, generator: MakeGenerator, chaos: Any
) -> None:
    manifest = manifest_of(NUM_ELEMENTS)
    channel = chaos(random.Random(1))
    publisher, there = WeightPublisher(channel, manifest), generator(channel, manifest)
    flat = torch.zeros(NUM_ELEMENTS)
    publisher.publish(flat, PolicyVersion(0, 0))
    there.refresh()
    for step in (1, 2, 3):
        flat[step] = 1.0
        publisher.publish(flat, PolicyVersion(0, step))
        there.turn()  # staged while the generator decodes
        assert there.stager.staged() == PolicyVersion(0, step)
    assert there.refresh()
    assert there.engine.pauses == 2
    assert there.engine.flat[:5].tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]
    assert [proof.version.step for proof in there.acked] == [0, 3]


class Brittle(FlatServed):
    """Weights whose write fails half-way, so many times."""

    def __init__(self, engine: Any, manifest: Manifest, failures: int) -> None:
        super().__init__(engine, manifest)
        self.engine, self.failures = engine, failures

    def write(self, version: PolicyVersion, deltas: Sequence[Delta]) -> None:
        if self.failures:
            self.failures -= 1
            self.engine.flat[: len(self.engine.flat) // 2] = float("nan")
            raise MemoryError("half-way")
        super().write(version, deltas)


def test_an_apply_that_fails_half_way_is_made_again_and_ends_the_process_the_second_time(
    manifest_of: ManifestOf, generator: MakeGenerator, chaos: Any
) -> None:
    manifest = manifest_of(NUM_ELEMENTS)
    channel = chaos(random.Random(1))
    publisher, there = WeightPublisher(channel, manifest), generator(channel, manifest)
    flat = torch.randn(NUM_ELEMENTS)
    publisher.publish(flat, PolicyVersion(0, 0))
    brittle = Brittle(there.engine, manifest, 1)
    there.stager._served = brittle
    assert there.refresh()
    assert torch.equal(there.engine.flat, flat)
    flat += 1
    publisher.publish(flat, PolicyVersion(0, 1))
    brittle.failures = 2
    there.turn()
    with pytest.raises(WeightError, match=r"version 0\.1 could not be applied, twice: half-way"):
        there.stager.commit()


def test_weights_that_are_not_what_was_published_are_never_acked(
    manifest_of: ManifestOf, generator: MakeGenerator, chaos: Any
) -> None:
    manifest = manifest_of(NUM_ELEMENTS)
    channel = chaos(random.Random(1))
    publisher, there = WeightPublisher(channel, manifest), generator(channel, manifest)
    flat = torch.randn(NUM_ELEMENTS)
    publisher.publish(flat, PolicyVersion(0, 0))
    there.refresh()
    there.turn()
    flat[9] += 1
    publisher.publish(flat, PolicyVersion(0, 1))
    there.turn()
    there.stager.commit()
    assert there.stager.unproved
    there.engine.flat[10] += 1  # memory that somebody else wrote
    with pytest.raises(WeightError, match="what is served is no version"):
        there.stager.turn()
    assert there.stager.proofs() == []


def test_bf16_weights_that_gained_precision_are_never_acked(
    manifest_of: ManifestOf, generator: MakeGenerator, chaos: Any
) -> None:
    manifest = manifest_of(NUM_ELEMENTS, "bfloat16")
    channel = chaos(random.Random(1))
    publisher, there = WeightPublisher(channel, manifest), generator(channel, manifest)
    publisher.publish(torch.ones(NUM_ELEMENTS), PolicyVersion(0, 0))
    there.turn()
    there.stager.commit()
    there.engine.flat[66000] = 1.0 + 2**-12
    with pytest.raises(WeightError, match=r"served weights.* not torch\.bfloat16"):
        there.stager.turn()


def test_pushes_that_never_arrive_end_the_process_with_their_cause(
    manifest_of: ManifestOf, generator: MakeGenerator, chaos: Any
) -> None:
    manifest = manifest_of(NUM_ELEMENTS)
    channel = chaos(random.Random(1))
    publisher, there = WeightPublisher(channel, manifest), generator(channel, manifest)
    publisher.publish(torch.zeros(NUM_ELEMENTS), PolicyVersion(0, 0))

    def dead(*_: Any) -> None:
        raise WeightError("the learner's host is unreachable")

    channel.fetch = dead  # type: ignore[method-assign]
    with pytest.raises(WeightError, match=r"60 pushes in a row.*unreachable"):
        there.turn()


# The thread -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [FlatServed, DoubledServed])
def test_a_thread_stages_beside_the_engine_and_wakes_it(
    manifest_of: ManifestOf, generator: MakeGenerator, chaos: Any, shape: type[FlatServed]
) -> None:
    import threading

    manifest = manifest_of(NUM_ELEMENTS)
    channel = chaos(random.Random(1))
    woken = threading.Event()
    news = threading.Event()
    channel.wait = lambda timeout_s: (news.wait(timeout_s), news.clear(), None)[2]  # type: ignore[method-assign]
    publisher, engine = WeightPublisher(channel, manifest), generator(channel, manifest).engine
    thread = StagerThread(
        lambda: Stager(channel, shape(engine, manifest), manifest, wake=woken.set), deadline_s=30
    )
    flat = torch.zeros(NUM_ELEMENTS)
    for step in range(20):
        flat[step] = 1.0
        published = publisher.publish(flat, PolicyVersion(0, step))
        news.set()
        while thread.staged() is None:
            assert woken.wait(30)
            woken.clear()
        assert thread.commit() == published.version
        while thread.unproved:
            assert woken.wait(30)
            woken.clear()
        assert [proof.digest for proof in thread.proofs()] == [published.digest]
        assert published.digest == state_digest(engine.flat)
    thread.close()


def test_what_ends_the_thread_is_raised_where_the_engine_asks(manifest_of: ManifestOf) -> None:
    def broken() -> Stager:
        raise WeightError("no such segment")

    with pytest.raises(WeightError, match="no such segment"):
        StagerThread(broken, deadline_s=30)


def test_a_whole_state_replaces_what_is_staged(
    manifest_of: ManifestOf, generator: MakeGenerator, chaos: Any
) -> None:
    manifest = manifest_of(NUM_ELEMENTS)
    channel = chaos(random.Random(1))
    publisher, there = WeightPublisher(channel, manifest), generator(channel, manifest)
    for step in range(3):
        publisher.publish(torch.full((NUM_ELEMENTS,), float(step)), PolicyVersion(0, step))
        there.turn()
    assert channel.history[-1].deltas == ()
    assert channel.history[-1].whole_header.kind is PayloadKind.WHOLE
    assert there.refresh()
    assert there.engine.pauses == 1
    assert (there.engine.flat == 2).all()


def test_a_commit_of_one_version_takes_no_other(
    manifest_of: ManifestOf, generator: MakeGenerator, chaos: Any
) -> None:
    manifest = manifest_of(NUM_ELEMENTS)
    channel = chaos(random.Random(1))
    publisher, there = WeightPublisher(channel, manifest), generator(channel, manifest)
    publisher.publish(torch.zeros(NUM_ELEMENTS), PolicyVersion(0, 0))
    there.turn()
    publisher.publish(torch.ones(NUM_ELEMENTS), PolicyVersion(0, 1))
    there.turn()
    assert there.stager.commit(PolicyVersion(0, 0)) is None
    assert there.engine.version is None
    assert there.stager.commit(PolicyVersion(0, 1)) == PolicyVersion(0, 1)


def test_the_stager_is_at_hand_while_a_commit_writes(
    manifest_of: ManifestOf, generator: MakeGenerator, chaos: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof is urgent: waiting for the channel, which may be long silent, would put it off."""
    manifest = manifest_of(NUM_ELEMENTS)
    channel = chaos(random.Random(1))
    publisher, there = WeightPublisher(channel, manifest), generator(channel, manifest)
    publisher.publish(torch.zeros(NUM_ELEMENTS), PolicyVersion(0, 0))
    there.turn()
    waits: list[str] = []
    monkeypatch.setattr(channel, "wait", lambda timeout_s: waits.append("channel"))
    write = there.stager._served.write

    def waiting(*arguments: Any) -> None:
        there.stager.wait(0.0)
        write(*arguments)
        waits.append("written")

    monkeypatch.setattr(there.stager._served, "write", waiting)
    there.stager.commit()
    assert waits == ["written"]
