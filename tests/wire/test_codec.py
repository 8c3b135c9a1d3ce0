"""Every message survives the wire unchanged, and an independent MessagePack decoder reads its head."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import WireError
from headway.types import FinishReason, MemberFailure, PolicyVersion, Trajectory, VersionSpan
from headway.wire import SCHEMA, Limits, decode, encode
from headway.wire.codec import PREFIX, TrajectoryHead
from headway.wire.messages import DataMessage, Event, Refused, Stop, Trajectories

ARRAYS = ("token_ids", "loss_mask", "logprobs")


def same(a: object, b: object) -> bool:
    """Equality that looks at the bits of arrays and floats."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return isinstance(b, float) and (a == b or (math.isnan(a) and math.isnan(b)))
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and all(same(getattr(a, f), getattr(b, f)) for f in a.__struct_fields__)
    return a == b


counts = st.integers(0, (1 << 63) - 1)
steps = st.integers(0, (1 << 31) - 1)
names = st.text(max_size=12)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    prompt = draw(st.integers(1, 6))
    sampled = draw(st.integers(1, 12))
    length = prompt + sampled
    ids = draw(st.lists(st.integers(0, (1 << 31) - 1), min_size=length, max_size=length))
    mask = [False] * prompt + draw(st.lists(st.booleans(), min_size=sampled, max_size=sampled))
    bits = draw(st.lists(st.integers(0, (1 << 32) - 1), min_size=length, max_size=length))
    cuts = sorted(draw(st.sets(st.integers(prompt + 1, length - 1), max_size=3))) if sampled > 1 else []
    edges = [prompt, *cuts, length]
    versions = sorted(
        draw(
            st.lists(st.builds(PolicyVersion, steps, steps), min_size=len(edges) - 1, max_size=len(edges) - 1)
        )
    )
    return Trajectory(
        trajectory_id=draw(names),
        ticket_id=draw(counts),
        member=draw(steps),
        prompt_index=draw(counts),
        prompt_hash=draw(st.integers(0, (1 << 64) - 1)),
        prompt_length=prompt,
        token_ids=np.array(ids, dtype=np.int32),
        loss_mask=np.array(mask),
        logprobs=np.array(bits, dtype=np.uint32).view(np.float32),
        spans=[VersionSpan(a, b, v) for a, b, v in zip(edges, edges[1:], versions, strict=False)],
        temperature=draw(st.floats(1e-3, 1e3)),
        finish_reason=draw(st.sampled_from(FinishReason)),
        reward=draw(st.none() | st.floats()),
        num_cached=draw(steps),
        started_s=draw(st.floats()),
        finished_s=draw(st.floats()),
    )


@settings(max_examples=60)
@given(
    st.builds(
        Trajectories,
        incarnation=names,
        seq=counts,
        trajectories=st.lists(trajectories(), max_size=5),
        failures=st.lists(st.builds(MemberFailure, counts, steps, names, names, counts), max_size=3),
        generated=counts,
    )
)
def test_trajectories_survive_to_the_bit(message: Trajectories) -> None:
    assert same(decode(encode(message)), message)


# msgspec's own types say what each field may hold, so no kind can be forgotten here.
PLAIN = [kind for kind in DataMessage.__args__ if kind is not Trajectories]


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.__name__)
def test_every_other_kind_survives(kind: type[DataMessage]) -> None:
    integers = st.integers(-(1 << 63), (1 << 64) - 1)

    def of(annotation: object) -> st.SearchStrategy[object]:
        if annotation is int:
            return integers
        if annotation is float:
            return st.floats()
        return st.from_type(annotation)  # type: ignore[arg-type]

    def build(struct: type) -> st.SearchStrategy[object]:
        fields = {}
        for field in msgspec.structs.fields(struct):
            inner = getattr(field.type, "__args__", (field.type,))
            options = [
                build(t) if isinstance(t, type) and issubclass(t, msgspec.Struct) else of(t) for t in inner
            ]
            whole = getattr(field.type, "__origin__", None)
            if whole is list:
                fields[field.name] = st.lists(options[0], max_size=2)
            elif whole is dict:
                fields[field.name] = st.dictionaries(st.text(max_size=3), options[1], max_size=2)
            else:
                fields[field.name] = st.one_of(options)
        return st.builds(struct, **fields)

    @settings(max_examples=15)
    @given(build(kind))
    def check(message: DataMessage) -> None:
        frames = encode(message)
        assert len(frames) == 1
        assert same(decode(frames), message)

    check()


def test_nan_payloads_infinities_and_negative_zero_are_visible(
    make_trajectory: Callable[..., Trajectory],
) -> None:
    bits = np.array(
        [0, 0, 0, 0, 0, 0x7FC00123, 0xFF800000, 0x7F800000, 0x80000000, 1, 2, 3, 4, 5], dtype=np.uint32
    )
    sent = make_trajectory(logprobs=bits.view(np.float32))
    message = Trajectories(incarnation="g", seq=1, trajectories=[sent], failures=[], generated=1)
    received = decode(encode(message))
    assert isinstance(received, Trajectories)
    assert received.trajectories[0].logprobs.view(np.uint32).tolist() == bits.tolist()


def test_versions_of_each_token_survive(make_trajectory: Callable[..., Trajectory]) -> None:
    spans = [
        VersionSpan(5, 8, PolicyVersion(0, 3)),
        VersionSpan(8, 12, PolicyVersion(0, 4)),
        VersionSpan(12, 15, PolicyVersion(0, 7)),
    ]
    message = Trajectories(
        incarnation="g", seq=1, trajectories=[make_trajectory(10, spans=spans)], failures=[], generated=1
    )
    received = decode(encode(message))
    assert isinstance(received, Trajectories)
    trajectory = received.trajectories[0]
    assert trajectory.lag(8) == 5
    assert trajectory.token_lags(8).tolist() == [5, 5, 5, 4, 4, 4, 4, 1, 1, 1]


def test_heads_are_plain_messagepack_with_documented_names(every_message: list[DataMessage]) -> None:
    for message in every_message:
        frames = encode(message)
        magic, schema, num_arrays = PREFIX.unpack_from(frames[0])
        head = msgpack.unpackb(bytes(frames[0])[PREFIX.size :], strict_map_key=True)
        assert (magic, schema, num_arrays) == (b"HDWY", SCHEMA, len(frames) - 1)
        assert list(head) == ["kind", *message.__struct_fields__]
        assert head["kind"] == type(message).__name__


def test_an_independent_reader_can_rebuild_a_trajectory(
    every_message: list[DataMessage], make_trajectory: Callable[..., Trajectory]
) -> None:
    (message,) = (m for m in every_message if isinstance(m, Trajectories))
    frames = [bytes(frame) for frame in encode(message)]
    head = msgpack.unpackb(frames[0][8:])
    first = head["trajectories"][0]
    assert first["prompt_length"] == 5
    assert first["spans"] == [[5, 14, [0, 3]]]
    assert first["finish_reason"] == "stop"
    assert [first[name] for name in ARRAYS] == [14, 14, 14]
    assert [head["trajectories"][1][name] for name in ARRAYS] == [6, 6, 6]
    expected = make_trajectory()
    assert [
        int.from_bytes(frames[1][i : i + 4], "little") for i in range(0, 56, 4)
    ] == expected.token_ids.tolist()
    assert list(frames[2][:14]) == [0] * 5 + [1] * 9
    assert np.frombuffer(frames[3][:56], "<f4").tolist() == expected.logprobs.tolist()


def test_the_wire_form_has_the_fields_of_a_trajectory() -> None:
    assert TrajectoryHead.__struct_fields__ == Trajectory.__struct_fields__


def test_arrays_of_a_received_message_are_private(every_message: list[DataMessage]) -> None:
    (message,) = (m for m in every_message if isinstance(m, Trajectories))
    buffers = [bytearray(frame) for frame in encode(message)]
    received = decode([memoryview(buffer) for buffer in buffers])
    for buffer in buffers:
        buffer[:] = b"\xff" * len(buffer)
    assert same(received, message)
    assert isinstance(received, Trajectories)
    assert not any(getattr(received.trajectories[0], name).flags.writeable for name in ARRAYS)


def test_encoded_frames_do_not_follow_the_arrays(make_trajectory: Callable[..., Trajectory]) -> None:
    trajectory = make_trajectory()
    before = trajectory.token_ids.tolist()
    frames = encode(Trajectories(incarnation="g", seq=1, trajectories=[trajectory], failures=[], generated=1))
    trajectory.token_ids[:] = 0
    received = decode(frames)
    assert isinstance(received, Trajectories)
    assert received.trajectories[0].token_ids.tolist() == before


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs": np.zeros(13, dtype=np.float32)}, "lengths"),
        ({"loss_mask": np.zeros(15, dtype=bool)}, "lengths"),
        ({"logprobs": np.zeros(14, dtype=np.float64)}, "dtype"),
        ({"token_ids": np.zeros(14, dtype=np.int64)}, "dtype"),
        ({"loss_mask": np.ones(14, dtype=bool)}, "mask"),
        ({"prompt_length": 0}, "prompt"),
        ({"prompt_length": 14}, "prompt"),
        ({"spans": []}, "spans"),
        ({"spans": [VersionSpan(5, 13, PolicyVersion(0, 0))]}, "spans"),
        (
            {"spans": [VersionSpan(5, 9, PolicyVersion(0, 0)), VersionSpan(10, 14, PolicyVersion(0, 0))]},
            "spans",
        ),
        (
            {"spans": [VersionSpan(5, 9, PolicyVersion(0, 2)), VersionSpan(9, 14, PolicyVersion(0, 1))]},
            "versions",
        ),
        (
            {"spans": [VersionSpan(5, 9, PolicyVersion(1, 0)), VersionSpan(9, 14, PolicyVersion(0, 9))]},
            "versions",
        ),
        ({"spans": [VersionSpan(5, 14, PolicyVersion(0, -1))]}, "versions"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"member": -1}, "member"),
    ],
)
def test_a_producer_hears_of_its_own_mistake(
    make_trajectory: Callable[..., Trajectory], changes: dict[str, object], reason: str
) -> None:
    message = Trajectories(
        incarnation="g", seq=1, trajectories=[make_trajectory(**changes)], failures=[], generated=1
    )
    with pytest.raises(WireError) as caught:
        encode(message)
    assert caught.value.reason == reason


def test_any_layout_of_the_producers_arrays_is_taken(make_trajectory: Callable[..., Trajectory]) -> None:
    plain = make_trajectory()
    odd = make_trajectory(
        token_ids=plain.token_ids.astype(">i4"),
        loss_mask=plain.loss_mask[::-1].copy()[::-1],
        logprobs=np.repeat(plain.logprobs, 2)[::2],
    )
    frames = [
        encode(Trajectories(incarnation="g", seq=1, trajectories=[t], failures=[], generated=1))
        for t in (plain, odd)
    ]
    assert [bytes(f) for f in frames[0]] == [bytes(f) for f in frames[1]]


def test_error_texts_with_unpaired_surrogates_are_escaped() -> None:
    failure = MemberFailure(1, 0, "reward_failed", "bad \udcff", 0)
    received = decode(
        encode(Trajectories(incarnation="g", seq=1, trajectories=[], failures=[failure], generated=1))
    )
    assert isinstance(received, Trajectories)
    assert received.failures[0].detail == "bad \\udcff"
    assert decode(encode(Event(note="\ud800"))) == Event(note="\\ud800")


def test_a_field_too_big_for_messagepack_is_a_wire_error() -> None:
    with pytest.raises(WireError, match="head"):
        encode(Refused(reason=1 << 70))  # type: ignore[arg-type]


def test_limits_are_enforced(every_message: list[DataMessage]) -> None:
    (message,) = (m for m in every_message if isinstance(m, Trajectories))
    frames = encode(message)
    for limits in (Limits(max_head_bytes=100), Limits(max_frame_bytes=50), Limits(max_items=1)):
        with pytest.raises(WireError) as caught:
            decode(frames, limits=limits)
        assert caught.value.reason == "limit"


def test_threads_share_the_codec(every_message: list[DataMessage]) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                for message in every_message:
                    assert same(decode(encode(message)), message)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_unknown_fields_are_ignored_within_a_schema() -> None:
    head = msgpack.packb({"kind": "Stop", "reason": "x", "later": [1, {"a": 2}]})
    assert decode([PREFIX.pack(b"HDWY", SCHEMA, 0) + head]) == Stop(reason="x")
