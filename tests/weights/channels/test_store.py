"""The store channel: a crash at any write leaves a whole version to read, and nothing that is read is removed."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.errors import BackendUnavailable, DeadlineExceeded, UnsupportedOption, WeightError
from headway.types import PolicyVersion
from headway.weights import Payload, PayloadHeader, Publication
from headway.weights import blobs as blobs_module
from headway.weights.blobs import Blobs, DirectoryBlobs, open_blobs
from headway.weights.store import POINTER, StoreSender, StoreWriter
from headway.weights.store_receiver import StoreReceiver

Publish = Callable[..., Publication]
Start = Callable[..., Any]
Keep = Callable[[Any], Any]
SIZE = 5000
FAR = 1e18


def again(one: Publication, version: PolicyVersion) -> Publication:
    """The same whole state as another version."""
    header = msgspec.structs.replace(one.whole_header, version=version)
    whole = one.whole()
    assert whole is not None
    return Publication(version, one.state_digest, (), header, lambda: Payload(header, whole.parts), False)


class Crash(BaseException):
    """The process ends here."""


class Faulty:
    """Blobs that fail at the n-th change: before it, after it, or half-way through a write without a rename."""

    def __init__(self, inner: Blobs, at: int, how: str, fault: BaseException) -> None:
        self.inner, self.at, self.how, self.fault = inner, at, how, fault
        self.num_changes = 0
        self.url = inner.url

    def _change(self, change: Callable[[], None], torn: Callable[[], None] | None = None) -> None:
        self.num_changes += 1
        if self.num_changes == self.at:
            if self.how == "after":
                change()
            elif self.how == "torn" and torn is not None:
                torn()
            raise self.fault
        change()

    def write(self, name: str, parts: Iterable[memoryview | bytes], check: Callable[[], None]) -> None:
        data = b"".join(bytes(part) for part in parts)
        self._change(
            lambda: self.inner.write(name, [data], check),
            lambda: self.inner.write(name, [data[: len(data) // 2]], check),
        )

    def delete(self, name: str) -> None:
        self._change(lambda: self.inner.delete(name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


Holds = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def holds(payload_bytes: Callable[[PayloadHeader], bytes]) -> Holds:
    """Read along to the newest version, every payload against its known bytes: its step, and the hops' kinds."""

    def read(blobs: Blobs, held: PolicyVersion | None = None, digest: str = "") -> tuple[int, list[str]]:
        receiver = StoreReceiver(blobs, "run", "manifest")
        kinds: list[str] = []
        while (header := receiver.newest(held, digest)) is not None:
            into = bytearray(header.num_bytes)
            receiver.fetch(header, memoryview(into), 10)
            assert bytes(into) == payload_bytes(header)
            held, digest = header.version, header.state_digest
            kinds.append(str(header.kind))
        receiver.close()
        return (0 if held is None else held.step), kinds

    return read


@pytest.fixture(params=["directory", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Blobs]:
    if request.param == "directory":
        return lambda: DirectoryBlobs(tmp_path / "store")
    pytest.importorskip("fsspec")
    return lambda: open_blobs(f"memory://{tmp_path.name}-{os.getpid()}/store")


@pytest.mark.parametrize("how", ["before", "torn", "after"])
def test_a_crash_at_every_write_leaves_the_old_or_the_new_version_and_the_next_push_works(
    how: str,
    place: Callable[[], Blobs],
    publication: Publish,
    holds: Holds,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Versions 1 (whole), 2 (delta), 3 (delta and whole), 4, 5 (whole, and a clean-up); the crash is in 4 or 5."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # hundreds of them; the next test is about their place
    for crashing, before in ((4, 3), (5, 4)):
        at = 0
        while True:
            at += 1
            blobs = place()
            for name in [*blobs.names("payloads"), *blobs.names("markers"), POINTER]:
                blobs.delete(name)
            writer = StoreWriter(blobs, "run", "manifest")
            for step in range(1, crashing):
                writer.write(publication(step, SIZE, base=step - 1 or None, anchor=step == 3), FAR)
            faulty = Faulty(place(), at, how, Crash())
            doomed = StoreWriter(faulty, "run", "manifest")
            try:
                doomed.write(publication(crashing, SIZE, base=before, anchor=crashing == 5), FAR)
            except Crash:
                survived = False
            else:
                survived = True
            step, kinds = holds(place())
            assert step in (before, crashing)
            assert kinds[0] == "whole"
            assert holds(place(), PolicyVersion(0, 3), "s3")[0] == step
            # the learner comes back in a new epoch, with a whole state
            back = StoreWriter(place(), "run", "manifest")
            resumed = again(publication(before, SIZE), PolicyVersion(1, before))
            assert back.write(resumed, FAR)
            receiver = StoreReceiver(place(), "run", "manifest")
            newest = receiver.newest(PolicyVersion(0, step), f"s{step}")
            assert newest is not None
            assert newest.version == PolicyVersion(1, before)
            into = bytearray(SIZE)
            receiver.fetch(newest, memoryview(into), 10)
            receiver.close()
            names = {payload.name for each in back._markers.values() for payload in each.payloads}
            assert set(place().names("payloads")) == names, "nothing that no marker names stays behind"
            if survived:
                break
        assert at > 3


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_crash_between_the_steps_of_a_file_leaves_no_part_of_it(
    call: str, tmp_path: Path, publication: Publish, monkeypatch: pytest.MonkeyPatch, holds: Holds
) -> None:
    for at in range(1, 12):
        place = tmp_path / f"{call}{at}"
        StoreWriter(DirectoryBlobs(place), "run", "manifest").write(publication(1, SIZE), FAR)
        count = 0

        def crash(*arguments: Any, real: Callable[..., Any], at: int = at) -> Any:
            nonlocal count
            count += 1
            if count == at:
                raise Crash
            return real(*arguments)

        with monkeypatch.context() as patch:
            if call == "write":
                patch.setattr(os, "write", lambda *a, real=os.write: crash(*a, real=real))
            elif call == "fsync":
                patch.setattr(os, "fsync", lambda *a, real=os.fsync: crash(*a, real=real))
            else:
                patch.setattr(Path, "replace", lambda *a, real=Path.replace: crash(*a, real=real))
            # what a killed process cannot do either
            patch.setattr(Path, "unlink", lambda *a, **k: None)
            survived = True
            try:
                StoreWriter(DirectoryBlobs(place), "run", "manifest").write(publication(2, SIZE, base=1), FAR)
            except Crash:
                survived = False
        assert holds(DirectoryBlobs(place))[0] in (1, 2)
        StoreWriter(DirectoryBlobs(place), "run", "manifest").write(publication(3, SIZE, base=2), FAR)
        assert holds(DirectoryBlobs(place))[0] == 3
        assert list(place.glob("*/.*.tmp")) == []
        if survived:
            break
    assert survived


def test_readers_follow_along_deltas_and_joiners_start_at_an_anchor(
    place: Callable[[], Blobs], publication: Publish, closing: Keep, holds: Holds
) -> None:
    sender = closing(StoreSender(place(), "run", "manifest"))
    for step in range(1, 10):
        sender.publish(publication(step, SIZE, base=step - 1 or None, anchor=step % 4 == 1), 10)
        sender.flush(10)
    assert holds(place(), PolicyVersion(0, 6), "s6") == (9, ["delta"] * 3)
    assert holds(place()) == (9, ["whole"])
    assert len(place().names("markers")) == 5, "5 to 9: two whole states, and all since the older"


def test_a_version_that_waits_when_the_next_one_comes_is_skipped(
    place: Callable[[], Blobs],
    publication: Publish,
    closing: Keep,
    monkeypatch: pytest.MonkeyPatch,
    holds: Holds,
) -> None:
    """Version 2 waits behind 1; 3 replaces it, and its delta from 2 does not fit: a whole state is written."""
    import threading

    entered, go = threading.Event(), threading.Event()
    write = StoreWriter.write

    def slow(writer: StoreWriter, one: Publication, deadline: float) -> bool:
        entered.set()
        assert go.wait(20)
        return write(writer, one, deadline)

    monkeypatch.setattr(StoreWriter, "write", slow)
    sender = closing(StoreSender(place(), "run", "manifest"))
    sender.publish(publication(1, SIZE), 10)
    assert entered.wait(10)
    sender.publish(publication(2, SIZE, base=1), 10)
    sender.publish(publication(3, SIZE, base=2), 10)
    go.set()
    sender.flush(10)
    assert holds(place()) == (3, ["whole"])
    assert len(place().names("markers")) == 2


def test_a_full_disk_is_said_and_the_next_push_works(
    place: Callable[[], Blobs], publication: Publish, closing: Keep, holds: Holds
) -> None:
    faulty = Faulty(place(), 1 << 60, "torn", OSError(errno.ENOSPC, "No space left on device"))
    sender = closing(StoreSender(faulty, "run", "manifest"))
    sender.publish(publication(1, SIZE), 10)
    sender.flush(10)
    for step in (2, 3, 4):
        faulty.at = faulty.num_changes + 1
        sender.publish(publication(step, SIZE, base=step - 1), 10)
        with pytest.raises(WeightError, match=r"could not be written to .*No space left on device"):
            sender.flush(10)
        assert holds(place()) == (1, ["whole"])
    faulty.at = 1 << 60
    with pytest.raises(WeightError, match=r"3 versions in a row could not be written .*No space left"):
        sender.publish(publication(5, SIZE, base=4), 10)
    sender.flush(10)
    assert holds(place()) == (5, ["whole"])


def test_a_medium_that_is_too_slow_is_given_up_at_the_deadline(
    place: Callable[[], Blobs], publication: Publish, closing: Keep, holds: Holds
) -> None:
    sender = closing(StoreSender(place(), "run", "manifest"))
    sender.publish(publication(1, SIZE), -1.0)
    with pytest.raises(WeightError, match=r"writing weights 0\.1 to"):
        sender.flush(10)
    sender.publish(publication(2, SIZE, base=1), 10)
    sender.flush(10)
    assert holds(place()) == (2, ["whole"])


def test_a_reader_that_asks_gets_a_whole_state_next(
    place: Callable[[], Blobs], publication: Publish, closing: Keep
) -> None:
    writer = StoreWriter(place(), "run", "manifest")
    writer.write(publication(1, SIZE), FAR)
    receiver = closing(StoreReceiver(place(), "run", "manifest"))
    receiver.ask_whole("it did not fit")
    writer.write(publication(2, SIZE, base=1), FAR)
    writer.write(publication(3, SIZE, base=2), FAR)
    kinds = [sorted(str(one.header.kind) for one in each.payloads) for each in writer._markers.values()]
    assert kinds == [["whole"], ["delta", "whole"], ["delta"]]


def test_a_damaged_payload_is_never_handed_over(tmp_path: Path, publication: Publish, closing: Keep) -> None:
    blobs = DirectoryBlobs(tmp_path)
    writer = StoreWriter(blobs, "run", "manifest")
    writer.write(publication(1, SIZE), FAR)
    receiver = closing(StoreReceiver(blobs, "run", "manifest"))
    header = receiver.newest(None, "")
    [name] = blobs.names("payloads")
    data = bytearray((tmp_path / name).read_bytes())
    data[99] ^= 1
    (tmp_path / name).write_bytes(data)
    with pytest.raises(WeightError, match="it has been removed or damaged"):
        receiver.fetch(header, memoryview(bytearray(SIZE)), 10)
    (tmp_path / name).write_bytes(data[:-1])
    header = receiver.newest(None, "")
    with pytest.raises(WeightError, match=f"has {SIZE - 1} bytes"):
        receiver.fetch(header, memoryview(bytearray(SIZE)), 10)


def test_what_a_reader_has_a_lease_on_is_not_removed_until_it_expires(
    place: Callable[[], Blobs], publication: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    writer = StoreWriter(place(), "run", "manifest", now=lambda: now[0])
    writer.write(publication(1, SIZE), FAR)
    receiver = StoreReceiver(place(), "run", "manifest", now=lambda: now[0])
    header = receiver.newest(None, "")
    assert header is not None
    pieces = receiver._blobs.pieces

    def published_meanwhile(name: str, into: memoryview) -> Iterator[memoryview]:
        for step in range(2, 8):
            writer.write(publication(step, SIZE), FAR)
        yield from pieces(name, into)

    monkeypatch.setattr(receiver._blobs, "pieces", published_meanwhile)
    into = bytearray(SIZE)
    receiver.fetch(header, memoryview(into), 10)
    assert len(place().names("markers")) == 7
    assert place().names("leases") == []
    receiver._lease(PolicyVersion(0, 2))  # a reader that died with one
    writer.write(publication(8, SIZE), FAR)
    assert len(place().names("markers")) == 7
    now[0] += 1000
    writer.write(publication(9, SIZE), FAR)
    assert len(place().names("markers")) == 2
    assert place().names("leases") == []


def test_a_reader_that_comes_too_late_is_told_and_gets_the_next(
    place: Callable[[], Blobs], publication: Publish, closing: Keep
) -> None:
    writer = StoreWriter(place(), "run", "manifest")
    writer.write(publication(1, SIZE), FAR)
    receiver = closing(StoreReceiver(place(), "run", "manifest"))
    old = receiver.newest(None, "")
    for step in (2, 3, 4):
        writer.write(publication(step, SIZE), FAR)
    with pytest.raises(WeightError, match="removed or damaged"):
        receiver.fetch(old, memoryview(bytearray(SIZE)), 10)
    newest = receiver.newest(None, "")
    assert newest.version.step == 4
    receiver.fetch(newest, memoryview(bytearray(SIZE)), 10)


def test_the_pointer_only_advances_whoever_writes(
    place: Callable[[], Blobs], publication: Publish, holds: Holds
) -> None:
    first, second = (StoreWriter(place(), "run", "manifest") for _ in range(2))
    second.write(publication(5, SIZE), FAR)
    with pytest.raises(WeightError, match=r"points at 0\.5 already: another learner"):
        first.write(publication(4, SIZE), FAR)
    with pytest.raises(WeightError, match=r"has version 0\.5; 0\.5 is not newer"):
        StoreWriter(place(), "run", "manifest").write(publication(5, SIZE), FAR)
    assert holds(place())[0] == 5


def test_a_mount_that_shows_the_past_does_not_take_a_reader_back(
    place: Callable[[], Blobs], publication: Publish, closing: Keep
) -> None:
    writer = StoreWriter(place(), "run", "manifest")
    writer.write(publication(1, SIZE), FAR)
    past = place().read(POINTER, 1000)
    assert past is not None
    writer.write(publication(2, SIZE, base=1), FAR)
    receiver = closing(StoreReceiver(place(), "run", "manifest"))
    assert receiver.newest(PolicyVersion(0, 1), "s1").version.step == 2
    place().write(POINTER, [past], lambda: None)
    assert receiver.newest(PolicyVersion(0, 1), "s1").version.step == 2
    assert receiver.newest(PolicyVersion(0, 2), "s2") is None


def test_a_mount_is_refreshed_before_reads_and_committed_after_writes(
    tmp_path: Path, publication: Publish
) -> None:
    calls: list[str] = []
    blobs = DirectoryBlobs(
        tmp_path, refresh=lambda: calls.append("refresh"), commit=lambda: calls.append("commit")
    )
    writer = StoreWriter(blobs, "run", "manifest")
    calls.clear()
    writer.write(publication(1, SIZE), FAR)
    assert calls == ["commit"]
    calls.clear()
    receiver = StoreReceiver(blobs, "run", "manifest")
    receiver.newest(None, "")
    assert calls == ["refresh", "refresh"]


@pytest.mark.parametrize(
    ("run", "manifest", "what"), [("other", "manifest", "run"), ("run", "other", "manifest")]
)
def test_another_run_or_model_is_refused_with_both_names(
    run: str, manifest: str, what: str, place: Callable[[], Blobs], publication: Publish
) -> None:
    StoreWriter(place(), "run", "manifest").write(publication(1, SIZE), FAR)
    with pytest.raises(WeightError, match=f"holds {what} '{what}'; this receiver's is 'other'"):
        StoreReceiver(place(), run, manifest)


def test_wait_returns_when_a_version_comes(
    place: Callable[[], Blobs], publication: Publish, closing: Keep
) -> None:
    receiver = closing(StoreReceiver(place(), "run", "manifest", poll_s=0.01))
    started = time.monotonic()
    receiver.wait(0.1)
    assert 0.1 <= time.monotonic() - started < 5
    StoreWriter(place(), "run", "manifest").write(publication(1, SIZE), FAR)
    started = time.monotonic()
    receiver.wait(60)
    assert time.monotonic() - started < 30
    assert receiver.newest(None, "").version.step == 1


def test_what_cannot_be_a_store_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOption, match="store_keep = 1; at least 2"):
        StoreWriter(DirectoryBlobs(tmp_path), "run", "manifest", keep=1)
    with pytest.raises(BackendUnavailable, match="nosuchscheme"):
        open_blobs("nosuchscheme://bucket/x")
    (tmp_path / "file").touch()
    with pytest.raises(WeightError, match="cannot make the weight store"):
        open_blobs(str(tmp_path / "file" / "x"))


def test_a_lock_that_somebody_keeps_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs_module, "LOCK_S", 0.1)
    one, two = DirectoryBlobs(tmp_path), DirectoryBlobs(tmp_path)
    with (
        one.locked(POINTER),
        pytest.raises(DeadlineExceeded, match="another process holds"),
        two.locked(POINTER),
    ):
        pass
    with two.locked(POINTER):
        pass
