"""A checkpoint is there whole or not at all, whatever stops its writing; damage is seen; the last one stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.checkpoint import CheckpointStore
from headway.errors import CheckpointError
from headway.types import PolicyVersion

Write = Callable[..., CheckpointStore]
Make = Callable[..., Any]


def operations(write: Write, faulty: Make, make_marker: Make, make_pieces: Make) -> int:
    """How many operations the third checkpoint takes, the deletion of the first included."""
    store = write(1, 2)
    disk = faulty(-1, "full")
    CheckpointStore(store.folder, 2, disk).write(make_marker(3), make_pieces(3))
    return disk.count


def newest(store: CheckpointStore) -> int:
    found = store.search().newest
    assert found is not None
    return found.marker.version.step


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", ["full", "power"])
def test_whatever_stops_the_writing_the_last_complete_checkpoint_is_found_and_the_next_one_succeeds(
    tmp_path: Path, write: Write, faulty: Make, make_marker: Make, make_pieces: Make, power_loss: type, kind: str,
    half: bool,
) -> None:  # fmt: skip
    total = operations(write, faulty, make_marker, make_pieces)
    assert total > 15
    outcomes = set()
    for fail_at in range(total):
        folder = tmp_path / f"{fail_at}"
        for step in (1, 2):
            CheckpointStore(folder, 2, faulty(-1, kind)).write(make_marker(step), make_pieces(step))
        disk = faulty(fail_at, kind, half)
        with pytest.raises((OSError, power_loss)):
            CheckpointStore(folder, 2, disk).write(make_marker(3), make_pieces(3))
        store = CheckpointStore(folder, 2, faulty(-1, kind))
        step = newest(store)
        outcomes.add(step)
        assert step in (2, 3)
        skipped = store.search().skipped
        assert all(name.startswith((".", "0.")) and why for name, why in skipped)
        # another attempt: what is left behind is in nobody's way
        store.tidy()
        store.write(make_marker(4), make_pieces(4))
        assert newest(store) == 4
        assert not list(folder.glob(".partial*"))
    assert outcomes == {2, 3}


def test_a_full_disk_leaves_no_litter(
    write: Write, faulty: Make, make_marker: Make, make_pieces: Make
) -> None:
    store = write(1)
    with pytest.raises(OSError, match="No space left"):
        CheckpointStore(store.folder, 2, faulty(4, "full", True)).write(make_marker(2), make_pieces(2))
    assert [path.name for path in store.folder.iterdir()] == ["0.1"]


def test_retention_keeps_the_newest_and_never_deletes_the_last_complete_one(write: Write) -> None:
    store = write(1, 2, 3, 4, keep=2)
    assert store.names() == ["0.4", "0.3"]
    # later folders that are not complete count for nothing: the complete ones stay
    for name in ("0.5", "0.6", "0.7"):
        (store.folder / name).mkdir()
    store.prune()
    search = store.search()
    assert search.newest is not None
    assert search.newest.name == "0.4"
    assert [name for name, _ in search.skipped] == ["0.7", "0.6", "0.5"]
    assert all("was not finished" in why for _, why in search.skipped)
    assert (store.folder / "0.3").exists()


@pytest.mark.parametrize("file", ["model.safetensors", "progress.msgpack", "checkpoint.json"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "grown", "empty"])
def test_damage_to_any_file_is_seen_and_the_checkpoint_before_is_taken(
    write: Write, file: str, damage: str
) -> None:
    store = write(1, 2)
    path = store.folder / "0.2" / file
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(content[:-3])
    elif damage == "flipped":
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    elif damage == "grown":
        path.write_bytes(bytes(content) + b"\0")
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    search = store.search()
    assert search.newest is not None
    assert search.newest.name == "0.1"
    ((name, why),) = search.skipped
    assert name == "0.2"
    assert "0.2" in why
    with pytest.raises(CheckpointError):
        store.open("0.2")


def test_every_flipped_bit_of_the_marker_is_seen(write: Write) -> None:
    store = write(1)
    path = store.folder / "0.1" / "checkpoint.json"
    content = path.read_bytes()
    whole = json.loads(content)
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1
        path.write_bytes(flipped)
        try:
            store.open("0.1")
        except CheckpointError:
            continue
        # what is left are blanks and names of keys that say nothing
        assert json.loads(flipped) == whole, flipped[max(0, position - 20) : position + 20]


def test_a_checkpoint_is_found_by_name_and_by_step_of_the_newest_epoch(
    write: Write, make_marker: Make, make_pieces: Make
) -> None:
    store = write(10, 20, keep=9)
    store.write(make_marker(20, epoch=1), make_pieces(20))
    assert (store.resolve("20"), store.resolve("0.20"), store.resolve("10")) == ("1.20", "0.20", "0.10")
    with pytest.raises(CheckpointError, match=r"no checkpoint 15 in .*; there are: 1.20, 0.20, 0.10"):
        store.resolve("15")


def test_a_future_that_is_given_up_is_set_aside_until_the_next_checkpoint(
    write: Write, make_marker: Make, make_pieces: Make
) -> None:
    store = write(10, 20, keep=9)
    assert store.set_aside(PolicyVersion(0, 10)) == ["0.20"]
    assert newest(store) == 10
    assert (store.folder / "abandoned-0.20").exists()
    store.write(make_marker(15, epoch=1), make_pieces(15))
    assert newest(store) == 15
    assert not (store.folder / "abandoned-0.20").exists()


def test_a_piece_that_is_done_without_may_be_missing(write: Write) -> None:
    store = write(1)
    (store.folder / "0.1" / "progress.msgpack").unlink()
    assert store.search().newest is None
    found = store.search(without=frozenset({"progress.msgpack"})).newest
    assert found is not None
