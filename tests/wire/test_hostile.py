"""Whatever bytes come, decode answers with WireError or a valid message, in bounded time and memory."""

from __future__ import annotations

import ast
import os
import pickle
import random
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headway
import headway_kernels
from headway.errors import WireError
from headway.types import Trajectory
from headway.wire import SCHEMA, decode, encode
from headway.wire.codec import PREFIX
from headway.wire.messages import DataMessage, Trajectories


def refusal(frames: list[bytes]) -> str | None:
    """The reason for refusing, or None when a message came out. Any other exception fails the test."""
    try:
        decode(frames)
    except WireError as fault:
        return fault.reason
    return None


def framed(head: bytes, arrays: int = 0) -> bytes:
    return PREFIX.pack(b"HDWY", SCHEMA, arrays) + head


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=60), max_size=6))
def test_random_frames(frames: list[bytes]) -> None:
    assert refusal(frames) in {"frames", "magic"}


@settings(max_examples=300)
@given(st.binary(max_size=80))
def test_random_heads(head: bytes) -> None:
    assert refusal([framed(head)]) in {"head", "nesting"}


def test_mutations_and_truncations(every_message: list[DataMessage]) -> None:
    rng = random.Random(0)
    outcomes: set[str | None] = set()
    for message in every_message:
        frames = [bytes(frame) for frame in encode(message)]
        for _ in range(400):
            hostile = list(frames)
            index = rng.randrange(len(hostile))
            data = bytearray(hostile[index])
            action = rng.randrange(4)
            if action == 0 and data:
                data[rng.randrange(len(data))] = rng.randrange(256)
            elif action == 1:
                del data[rng.randrange(len(data) + 1) :]
            elif action == 2:
                at = rng.randrange(len(data) + 1)
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            else:
                for _ in range(3):
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            hostile[index] = bytes(data)
            outcomes.add(refusal(hostile))
    assert {"head", "magic", "schema", "frames", "lengths", "bool"} <= outcomes


def test_frames_missing_added_or_swapped(every_message: list[DataMessage]) -> None:
    for message in every_message:
        frames = [bytes(frame) for frame in encode(message)]
        assert refusal([]) == "frames"
        assert refusal([*frames, b""]) == "frames"
        assert refusal([*frames, *[b"x"] * 1000]) == "frames"
        if len(frames) > 1:
            assert refusal(frames[:-1]) == "frames"
            assert refusal([frames[0], frames[2], frames[1], frames[3]]) == "bool"
            assert refusal([frames[0], frames[1], frames[2], frames[2]]) == "lengths"
        else:
            assert refusal([framed(frames[0][PREFIX.size :], 1), b""]) == "frames"


def test_trajectories_without_array_frames(every_message: list[DataMessage]) -> None:
    (message,) = (m for m in every_message if isinstance(m, Trajectories))
    head = bytes(encode(message)[0])[PREFIX.size :]
    assert refusal([framed(head)]) == "frames"


def test_another_schema_is_named() -> None:
    with pytest.raises(WireError, match=f"schema 7, this process {SCHEMA}") as caught:
        decode([PREFIX.pack(b"HDWY", 7, 0) + msgpack.packb({"kind": "Stop", "reason": ""})])
    assert caught.value.reason == "schema"


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.mkdir, (str(self.path),))

    def __init__(self, path: Path) -> None:
        self.path = path


def test_a_pickle_bomb_does_not_go_off(tmp_path: Path) -> None:
    target = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(target))
    assert refusal([bomb]) == "magic"
    assert refusal([framed(bomb)]) == "head"
    assert refusal([framed(msgpack.packb({"kind": "Stop", "reason": bomb}))]) == "head"
    assert not target.exists()
    pickle.loads(bomb)  # the bomb is live: what decode did not do, unpickling does
    assert target.exists()


def test_extension_types_are_refused() -> None:
    for code in (-1, 0, 42):
        bomb = msgpack.ExtType(code, b"\xff" * 16) if code >= 0 else msgpack.Timestamp(1, 2)
        assert refusal([framed(msgpack.packb(bomb))]) == "head"
        assert refusal([framed(msgpack.packb({"kind": "Stop", "reason": bomb}))]) == "head"
    huge = b"\x82\xa4kind\xa4Stop\xa6reason\xc9\xff\xff\xff\xff\x05abc"
    assert refusal([framed(huge)]) == "head"


def kind(name: str, field: str) -> bytes:
    return b"\x82" + msgpack.packb("kind") + msgpack.packb(name) + msgpack.packb(field)


@pytest.mark.parametrize(
    "head",
    [
        kind("Stop", "reason") + b"\xdb\xff\xff\xff\xff",
        kind("Stop", "reason") + b"\xc6\xff\xff\xff\xff",
        kind("Event", "status") + b"\xc6\xff\xff\xff\xff",
        kind("Cancel", "ticket_ids") + b"\xdd\xff\xff\xff\xff\x01",
        kind("Grant", "tickets") + b"\xdd\xff\xff\xff\xff\x80",
        kind("Trajectories", "trajectories") + b"\xdd\xff\xff\xff\xff\x80",
        kind("Stop", "unknown") + b"\xdd\xff\xff\xff\xff\x01",
        kind("Stop", "unknown") + b"\xdf\xff\xff\xff\xff\x01",
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
    ],
)
def test_declared_lengths_of_4_gib_allocate_nothing(head: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    assert refusal([framed(head)]) == "head"
    assert time.perf_counter() - started < 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


@pytest.mark.parametrize("depth", [1_000, 100_000, 1_000_000])
@pytest.mark.parametrize("level", [b"\x91", b"\x81\xa1a"])
@pytest.mark.parametrize(
    "place", [b"", kind("Stop", "unknown"), kind("Stop", "reason"), kind("Event", "record")]
)
def test_deep_nesting(depth: int, level: bytes, place: bytes) -> None:
    started = time.perf_counter()
    assert refusal([framed(place + level * depth + b"\xc0")]) in {"nesting", "head"}
    assert time.perf_counter() - started < 2.0


def test_lengths_that_overflow_or_cancel(make_trajectory: Callable[..., Trajectory]) -> None:
    message = Trajectories(
        incarnation="g",
        seq=1,
        trajectories=[make_trajectory(), make_trajectory(1, 1)],
        failures=[],
        generated=1,
    )
    frames = [bytes(frame) for frame in encode(message)]
    head = msgpack.unpackb(frames[0][PREFIX.size :])
    for first, second in ((-6, 26), (0, 20), (1 << 63, 6), ((1 << 64) - 6, 26), (20, 0)):
        for item, length in zip(head["trajectories"], (first, second), strict=True):
            item.update(token_ids=length, loss_mask=length, logprobs=length)
        assert refusal([framed(msgpack.packb(head), 3), *frames[1:]]) is not None


def test_what_a_head_may_claim_of_its_trajectory(make_trajectory: Callable[..., Trajectory]) -> None:
    message = Trajectories(incarnation="g", seq=1, trajectories=[make_trajectory()], failures=[], generated=1)
    frames = [bytes(frame) for frame in encode(message)]
    good = msgpack.unpackb(frames[0][PREFIX.size :])
    cases = {
        "lengths": {"logprobs": 13},
        "prompt": {"prompt_length": 14},
        "mask": {"prompt_length": 6, "spans": [[6, 14, [0, 3]]]},
        "spans": {"spans": [[5, 14, [0, 3]], [14, 14, [0, 3]]]},
        "versions": {"spans": [[5, 6, [0, 3]], [6, 14, [0, 2]]]},
        "temperature": {"temperature": -1.0},
        "member": {"member": -1},
        "head": {"finish_reason": "natural"},
    }
    for reason, changes in cases.items():
        head = {**good, "trajectories": [{**good["trajectories"][0], **changes}]}
        assert refusal([framed(msgpack.packb(head), 3), *frames[1:]]) == reason
    assert (
        refusal(
            [
                framed(
                    msgpack.packb(
                        {
                            **good,
                            "trajectories": [{**good["trajectories"][0], "spans": [[5, 14, [0, 1 << 40]]]}],
                        }
                    ),
                    3,
                ),
                *frames[1:],
            ]
        )
        == "versions"
    )
    assert refusal([frames[0], b"\xff" * 56, *frames[2:]]) == "token_ids"


MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
LOADERS, LOADS = {"torch", "yaml"}, {"load", "load_all", "unsafe_load", "full_load"}
ATTRIBUTES = {
    "recv_pyobj", "send_pyobj", "recv_serialized", "broadcast_object_list", "all_gather_object", "gather_object",
    "scatter_object_list", "send_object_list", "recv_object_list",
}  # fmt: skip


def dangers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where code could run what a peer or a file says."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Attribute):
            loads = node.attr in LOADS and isinstance(node.value, ast.Name) and node.value.id in LOADERS
            if node.attr in ATTRIBUTES or loads:
                yield node.lineno, node.attr
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield node.value.lineno, node.arg
        elif isinstance(node, ast.Name) and node.id in {"eval", "exec", "compile", "__import__"}:
            yield node.lineno, node.id


def test_nothing_in_the_engine_unpickles_or_evaluates() -> None:
    roots = [Path(package.__path__[0]) for package in (headway, headway_kernels)]
    hits = [
        f"{path}:{line}: {what}"
        for root in roots
        for path in sorted(root.rglob("*.py"))
        for line, what in dangers(ast.parse(path.read_text()))
    ]
    assert hits == []


def test_the_search_for_dangers_finds_them() -> None:
    code = "import pickle\nfrom marshal import loads\ntorch.load(f)\ns.recv_pyobj()\neval(x)\nmodel.eval()\n"
    code += "yaml.load(f)\nnp.load(f, allow_pickle=True)\njson.load(f)\n"
    code += "dist.all_gather_object(a, b)\n"
    assert [line for line, _ in sorted(dangers(ast.parse(code)))] == [1, 2, 3, 4, 5, 7, 8, 10]
