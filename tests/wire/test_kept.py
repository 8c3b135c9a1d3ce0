"""Kept sets cross the wire to the bit, and what is none is refused, by the codec or at ingest."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import WireError
from headway.types import KeptSets, PolicyVersion, Sampling, Ticket, Trajectory
from headway.wire import decode, encode
from headway.wire.check import validate_trajectory
from headway.wire.messages import Trajectories

from .conftest import PROMPT, build_trajectory

Sets = list[list[int]]


def with_kept(sets: Sets | None) -> Trajectory:
    """A trajectory of 9 sampled tokens, 7 to 15."""
    made = build_trajectory(9)
    kept = None if sets is None else KeptSets.of([np.array(ids, np.int32) for ids in sets])
    return msgspec.structs.replace(made, kept=kept)


def message(*trajectories: Trajectory) -> Trajectories:
    return Trajectories(incarnation="g0", seq=1, trajectories=list(trajectories), failures=[], generated=9)


def around(token: int) -> st.SearchStrategy[list[int]]:
    """A set with the token in it, in any order."""
    others = st.lists(st.integers(0, 1 << 30), max_size=6, unique=True)
    return others.flatmap(lambda ids: st.permutations(sorted({*ids, token})))


SETS = st.none() | st.tuples(*(around(token) for token in range(7, 16))).map(list)


@settings(max_examples=60, deadline=None)
@given(st.lists(SETS, min_size=1, max_size=4))
def test_they_survive_to_the_bit_beside_trajectories_that_have_none(several: list[Sets | None]) -> None:
    received = decode([bytes(frame) for frame in encode(message(*map(with_kept, several)))])
    assert isinstance(received, Trajectories)
    for trajectory, sets in zip(received.trajectories, several, strict=True):
        if sets is None:
            assert trajectory.kept is None
            continue
        assert trajectory.kept is not None
        bounds = np.cumsum(trajectory.kept.counts)[:-1]
        assert [part.tolist() for part in np.split(trajectory.kept.ids, bounds)] == sets
        assert not trajectory.kept.ids.flags.writeable


def test_a_message_without_any_has_the_frames_that_it_always_had() -> None:
    assert len(encode(message(with_kept(None)))) == 4
    assert len(encode(message(with_kept(None), with_kept([[t] for t in range(7, 16)])))) == 6


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutations_end_as_a_wire_error_or_as_kept_sets_that_fit(data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in encode(message(with_kept([[t, 90 + t] for t in range(7, 16)])))]
    frame = data.draw(st.sampled_from([0, 4, 4, 5]))
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(frames[frame]) - 1))
        frames[frame][at] = data.draw(st.integers(0, 255))
    else:
        del frames[frame][data.draw(st.integers(0, len(frames[frame]))) :]
    try:
        received = decode([bytes(each) for each in frames])
    except WireError:
        return
    assert isinstance(received, Trajectories)
    for trajectory in received.trajectories:
        if trajectory.kept is not None:
            assert len(trajectory.kept.counts) == trajectory.num_tokens - trajectory.prompt_length
            assert trajectory.kept.counts.sum(dtype=np.int64) == len(trajectory.kept.ids)


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (KeptSets(np.ones(8, np.int32), np.arange(8, dtype=np.int32)), "kept"),
        (KeptSets(np.ones(9, np.int32), np.arange(8, dtype=np.int32)), "kept"),
        (KeptSets(np.ones(9, np.int64), np.arange(9, dtype=np.int32)), "dtype"),  # type: ignore[arg-type]
        (KeptSets(np.ones(9, np.int32), np.zeros((3, 3), np.int32)), "lengths|shape|kept"),
    ],
)
def test_a_producer_hears_of_its_own_mistake(kept: KeptSets, reason: str) -> None:
    with pytest.raises(WireError) as caught:
        encode(message(msgspec.structs.replace(build_trajectory(9), kept=kept)))
    assert caught.value.reason in reason.split("|")


def test_frames_and_heads_must_agree() -> None:
    having, none = (
        [bytes(frame) for frame in encode(message(with_kept(sets)))]
        for sets in ([[t] for t in range(7, 16)], None)
    )
    for frames in ([*none[:1], *having[1:]], having[:5], [*having[:1], *none[1:]]):
        with pytest.raises(WireError) as caught:
            decode(frames)
        assert caught.value.reason == "frames"


GOOD: Sets = [[token, 40 + token] for token in range(7, 16)]


def changed(index: int, ids: list[int]) -> Sets:
    return [*GOOD[:index], ids, *GOOD[index + 1 :]]


@pytest.mark.parametrize(
    ("sets", "asked", "reason"),
    [
        (GOOD, True, None),
        (None, False, None),
        (None, True, "kept_missing"),
        (GOOD, False, "kept_unasked"),
        (changed(2, [50, 51]), True, "kept"),  # the sampled token is not among its own
        (changed(2, [9, 50, 50]), True, "kept"),
        (changed(2, [9, 9]), True, "kept"),
        (changed(8, [15, -1]), True, "kept"),
        (changed(0, []), True, "kept"),
    ],
)
def test_ingest_wants_what_the_ticket_asked_for(sets: Sets | None, asked: bool, reason: str | None) -> None:
    sampling = Sampling(0.7, 9, [2], top_p=0.8, keep_sets=asked)
    ticket = Ticket(11, 2, PROMPT, 4, sampling, 5, PolicyVersion(0, 3), 60.0)
    assert validate_trajectory(with_kept(sets), ticket) == reason
