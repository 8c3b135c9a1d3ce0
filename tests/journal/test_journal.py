"""What goes into a journal comes out of it, in order; damage and crashes are told apart."""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import JournalError, JournalFull
from headway.journal import Journal, Position, Record, RecordKind, read
from headway.journal.segment import SEGMENT_START, segment_path, segments

KINDS = [kind for kind in RecordKind if kind is not RecordKind.SEALED]


def fill(
    folder: Path, sizes: list[int], *, close: bool = True, **options: Any
) -> list[tuple[Position, Record]]:
    """A journal with one commit per record."""
    written: list[tuple[Position, Record]] = []
    journal = Journal.open(folder, **options)
    for index, size in enumerate(sizes):
        record = Record(KINDS[index % len(KINDS)], bytes([index % 256]) * size)
        written.append((journal.append(record.kind, record.payload), record))
        journal.commit()
    if close:
        journal.close()
    else:
        crash(journal)
    return written


def crash(journal: Journal) -> None:
    """Drop a journal as SIGKILL would: files closed, nothing written."""
    journal._broken = "killed"  # pyright: ignore[reportPrivateUsage]
    journal.close()


def test_records_come_back_in_order_with_their_positions_over_any_grouping_and_reopening(
    tmp_path: Path,
) -> None:
    counter = iter(range(10**6))

    @settings(max_examples=40, deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(KINDS),
                st.lists(st.binary(max_size=300), max_size=4),
                st.booleans(),
                st.booleans(),
            ),
            max_size=25,
        )
    )
    def check(steps: list[tuple[RecordKind, list[bytes], bool, bool]]) -> None:
        folder = tmp_path / str(next(counter))
        journal = Journal.open(folder, segment_bytes=700)
        expected: list[tuple[Position, Record]] = []
        for kind, parts, commit, reopen in steps:
            expected.append((journal.append(kind, *parts), Record(kind, b"".join(parts))))
            if commit:
                assert journal.commit() == journal.end == journal.committed
            if reopen:
                journal.close()
                journal = Journal.open(folder, segment_bytes=700)
                assert journal.torn is None
        journal.close()
        if not expected:
            return
        assert list(read(folder)) == expected
        assert [position for position, _ in expected] == sorted({position for position, _ in expected})
        start = expected[len(expected) // 2][0]
        assert list(read(folder, start)) == [item for item in expected if item[0] >= start]

    check()


def test_the_bytes_are_those_of_the_page(tmp_path: Path) -> None:
    (position,) = [at for at, _ in fill(tmp_path, [5], close=False)]
    data = segment_path(tmp_path, 1).read_bytes()
    magic, version, zero, number, checksum = struct.unpack_from("<4sHHQQ", data)
    assert (magic, version, zero, number) == (b"HDWJ", 1, 0, 1)
    assert checksum == xxhash.xxh3_64_intdigest(data[:16])
    magic, kind, length, committed, checksum = struct.unpack_from("<4sB3xIQQ", data, 24)
    assert (magic, kind, length, committed) == (b"HDWR", 1, 5, 24)
    assert data[52:] == b"\0" * 5
    assert checksum == xxhash.xxh3_64_intdigest(data[24:44] + struct.pack("<QQ", 1, 24) + data[52:])
    assert position == Position(1, 24)
    assert Position.parse(str(position)) == position


def test_one_commit_is_one_fsync_for_everything_appended(
    tmp_path: Path, faulty_disk: Callable[..., Any]
) -> None:
    disk = faulty_disk()
    journal = Journal.open(tmp_path, disk=disk)
    for _ in range(100):
        journal.append(RecordKind.TICKET_ENDED, b"x" * 1000)
    assert disk.num_operations == 0
    assert journal.pending_bytes == 100 * 1028
    journal.commit()
    assert disk.num_operations == 3  # create, write, fsync
    journal.commit()
    assert disk.num_operations == 3
    assert journal.pending_bytes == 0
    journal.close()


@pytest.mark.parametrize("seed", range(6))
def test_after_a_power_cut_at_any_operation_every_committed_record_is_there_and_the_rest_is_a_prefix(
    tmp_path: Path, faulty_disk: Callable[..., Any], power_cut: type[BaseException], seed: int
) -> None:
    for fail_at in range(24):
        folder = tmp_path / str(fail_at)
        disk = faulty_disk(fail_at)
        journal = Journal.open(folder, segment_bytes=3000, disk=disk)
        appended: list[tuple[Position, Record]] = []
        committed = 0
        with pytest.raises(power_cut):  # noqa: PT012 (which call it comes in is the point)
            for index in range(60):
                record = Record(RecordKind.TICKET_ENDED, bytes([index]) * (index * 37 % 900))
                appended.append((journal.append(record.kind, record.payload), record))
                if index % 3 == 2:
                    journal.commit()
                    committed = len(appended)
        crash(journal)
        disk.lose_power(seed)

        again = Journal.open(folder, segment_bytes=3000)
        position = again.append(RecordKind.OPENED, b"again")
        again.close()
        found = list(read(folder))
        assert found.pop() == (position, Record(RecordKind.OPENED, b"again"))
        assert found == appended[: len(found)]
        assert len(found) >= committed, f"cut at {fail_at}: {committed} committed, {len(found)} left"


def test_a_cut_at_every_byte_leaves_a_prefix_and_says_where_it_was_torn(tmp_path: Path) -> None:
    written = fill(tmp_path / "whole", [0, 3, 40], close=False)
    path = segment_path(tmp_path / "whole", 1)
    data = path.read_bytes()
    ends = [position.offset for position, _ in written[1:]] + [len(data)]
    for size in range(len(data)):
        path.write_bytes(data[:size])
        reader = read(tmp_path / "whole")
        assert list(reader) == [item for item, end in zip(written, ends, strict=True) if end <= size]
        whole = max([0 if size < SEGMENT_START else SEGMENT_START, *(end for end in ends if end <= size)])
        if size == whole and size:
            assert reader.torn is None
            assert reader.end == Position(1, size)
        else:
            assert reader.torn is not None
            assert reader.torn.position == Position(1, whole)
            assert reader.torn.num_bytes == size - whole


def test_every_flipped_bit_of_a_closed_journal_is_noticed_by_the_segments_name(tmp_path: Path) -> None:
    fill(tmp_path, [0, 3, 40])
    path = segment_path(tmp_path, 1)
    data = path.read_bytes()
    seal = len(data) - 28
    for at in range(len(data)):
        for bit in (0, 3, 7):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            reader = read(tmp_path)
            if at >= seal:  # the seal itself is torn; what it sealed is whole
                assert len(list(reader)) == 3
                assert reader.torn is not None
                continue
            with pytest.raises(JournalError, match=path.name):
                list(reader)


def test_damage_in_a_segment_that_is_not_the_last_is_never_taken_for_a_torn_tail(tmp_path: Path) -> None:
    fill(tmp_path, [10], close=False)
    fill(tmp_path, [10], close=False)
    path = segment_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(JournalError, match=r"0000000001\.journal is damaged at byte 24"):
        list(read(tmp_path))


def test_a_missing_segment_and_a_foreign_one_are_refused_by_name(tmp_path: Path) -> None:
    for _ in range(4):
        fill(tmp_path, [10])
    assert segments(tmp_path) == [1, 2, 3, 4]
    whole = segment_path(tmp_path, 3).read_bytes()
    segment_path(tmp_path, 3).write_bytes(segment_path(tmp_path, 4).read_bytes())
    with pytest.raises(JournalError, match="is segment 4"):
        list(read(tmp_path))
    segment_path(tmp_path, 3).write_bytes(whole)
    segment_path(tmp_path, 2).unlink()
    with pytest.raises(JournalError, match=r"0000000002\.journal is missing"):
        list(read(tmp_path))
    segment_path(tmp_path, 1).unlink()
    with pytest.raises(JournalError, match="segments 1 to 2 were removed by retention"):
        read(tmp_path, Position(1, SEGMENT_START))
    with pytest.raises(JournalError, match="lies beyond"):
        read(tmp_path, Position(5, SEGMENT_START))
    with pytest.raises(JournalError, match="holds no journal"):
        read(tmp_path / "nowhere")


@pytest.mark.parametrize("space", [0, 10, 60, 2000, 2100])
def test_a_full_disk_acknowledges_nothing_and_loses_nothing_once_there_is_space(
    tmp_path: Path, faulty_disk: Callable[..., Any], space: int
) -> None:
    disk = faulty_disk()
    journal = Journal.open(tmp_path, segment_bytes=1500, disk=disk)
    written: list[tuple[Position, Record]] = []

    def append(size: int) -> None:
        record = Record(RecordKind.TICKET_ENDED, bytes([len(written)]) * size)
        written.append((journal.append(record.kind, record.payload), record))

    append(100)
    journal.commit()
    disk.space = space
    append(1600)
    append(300)
    append(20)
    append(2000)
    for _ in range(3):
        with pytest.raises(JournalFull, match="no space"):
            journal.commit()
        append(7)  # others go on appending
        committed = [item for item in written if item[0] < journal.committed]
        assert list(read(tmp_path)) == committed
    disk.space = None
    assert journal.commit() == journal.end
    journal.close()
    assert list(read(tmp_path)) == written


def test_after_a_failed_fsync_nothing_is_tried_again(tmp_path: Path, faulty_disk: Callable[..., Any]) -> None:
    disk = faulty_disk(fail_at=2, error=errno.EIO)
    journal = Journal.open(tmp_path, disk=disk)
    journal.append(RecordKind.TICKET_ENDED, b"x")
    with pytest.raises(JournalError, match="fsync of segment 1 failed"):
        journal.commit()
    for call in (journal.commit, lambda: journal.append(RecordKind.TICKET_ENDED, b"y")):
        with pytest.raises(JournalError, match="fsync of segment 1 failed"):
            call()
    journal.close()
    assert disk.num_operations == 3


def test_retention_deletes_the_oldest_within_the_budget_and_never_what_is_needed(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, segment_bytes=1000, max_bytes=2500)
    positions: list[Position] = []
    for _ in range(8):
        positions.append(journal.append(RecordKind.TICKET_ENDED, b"x" * 1000))
        journal.commit()
    assert segments(tmp_path) == list(range(1, 9))
    assert journal.retain(positions[2]) == [1, 2]
    assert journal.retain(positions[2]) == []
    assert journal.retain(positions[7]) == [3, 4, 5, 6]
    assert [position for position, _ in read(tmp_path)] == positions[6:]
    journal.close()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with Journal.open(tmp_path), pytest.raises(JournalError, match="another process writes the journal"):
        Journal.open(tmp_path)
    with Journal.open(tmp_path):
        pass
    assert segments(tmp_path) == []
    assert tmp_path.stat().st_mode & 0o777 in (0o700, 0o755)


def test_a_reader_beside_the_writer_sees_what_is_committed(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        journal.append(RecordKind.TICKET_ENDED, b"one")
        journal.commit()
        journal.append(RecordKind.TICKET_ENDED, b"two")
        reader = read(tmp_path)
        assert [record.payload for _, record in reader] == [b"one"]
        assert reader.end == journal.committed
        journal.commit()
        assert [record.payload for _, record in read(tmp_path, reader.end)] == [b"two"]
