"""Named objects of the store channel: in a directory, or in whatever fsspec reaches.

What the store needs of them is little: an object, once its write has returned, is there whole for every reader,
and one whose write did not return may be torn or missing. (Its markers carry their own digest, so a torn one
counts as missing.) Listing may lag behind; nothing rests on it being exact.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from headway.errors import BackendUnavailable, DeadlineExceeded, HeadwayError, WeightError

PIECE_BYTES = 8 << 20
LOCK_S = 10.0
Check = Callable[[], None]


class Blobs(Protocol):
    """Objects by name ("folder/name"). Every method may raise OSError."""

    @property
    def url(self) -> str:
        """Where they are, for people and for opening them elsewhere."""
        ...

    def write(self, name: str, parts: Iterable[memoryview | bytes], check: Check) -> None:
        """Make or replace an object; `check` is called between pieces and may raise to give up."""
        ...

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """A small object, at most max_bytes of it; None when there is none."""
        ...

    def pieces(self, name: str, into: memoryview) -> Iterator[memoryview]:
        """Fill `into` with an object, piece by piece; each is yielded when it is there. Ends early where the
        object does, and yields nothing when there is none."""
        ...

    def names(self, folder: str) -> list[str]:
        """Objects of a folder, sorted, as "folder/name"."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object, if it is there."""
        ...

    def locked(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Held by one writer at a time where the medium can say so; object stores cannot."""
        ...

    def refresh(self) -> None:
        """Before reading: see what others have written (mounts that show a snapshot)."""
        ...

    def commit(self) -> None:
        """After writing: let others see it (mounts that keep changes until told)."""
        ...


def _nothing() -> None:
    """Most mediums need no refresh and no commit."""


class DirectoryBlobs:
    """Files below a folder: temporary name, fsync, rename, fsync of the folder.

    Args:
        root: made when missing, mode 0700; refresh, commit: called before reads and after writes, for mounts that
            want it (a Modal Volume's reload and commit).

    Raises:
        WeightError: the folder cannot be made.
    """

    def __init__(self, root: Path, *, refresh: Check = _nothing, commit: Check = _nothing) -> None:
        self._root = root.absolute()
        self._refresh, self._commit = refresh, commit
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise WeightError(f"cannot make the weight store {self._root}: {error}") from error

    @property
    def url(self) -> str:
        """The folder."""
        return str(self._root)

    def write(self, name: str, parts: Iterable[memoryview | bytes], check: Check) -> None:
        """See Blobs."""
        target = self._root / name
        target.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        try:
            with temporary.open("xb", buffering=0) as file:
                for piece in _pieces(parts):
                    check()
                    _write_all(file.fileno(), piece)
                os.fsync(file.fileno())
            temporary.replace(target)
            _sync_folder(target.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """See Blobs."""
        try:
            with (self._root / name).open("rb") as file:
                return file.read(max_bytes)
        except FileNotFoundError:
            return None

    def pieces(self, name: str, into: memoryview) -> Iterator[memoryview]:
        """See Blobs."""
        try:
            file = (self._root / name).open("rb", buffering=0)
        except FileNotFoundError:
            return
        with file:
            at = 0
            while at < into.nbytes:
                count = file.readinto(into[at : at + PIECE_BYTES])
                if not count:
                    return
                yield into[at : at + count]
                at += count

    def names(self, folder: str) -> list[str]:
        """See Blobs."""
        with contextlib.suppress(FileNotFoundError):
            found = [name for name in os.listdir(self._root / folder) if not name.startswith(".")]
            return sorted(f"{folder}/{name}" for name in found)
        return []

    def delete(self, name: str) -> None:
        """See Blobs."""
        (self._root / name).unlink(missing_ok=True)

    def clear_temporary(self) -> None:
        """Remove what writers that are dead have left half-written; only the one writer may call it."""
        for path in self._root.glob("*/.*.tmp"):
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self, name: str) -> Generator[None]:
        """See Blobs: a lock on a file, which ends with its process; DeadlineExceeded after LOCK_S."""
        deadline = time.monotonic() + LOCK_S
        with (self._root / f".{name}.lock").open("a+b") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise DeadlineExceeded(
                            f"waited {LOCK_S:.0f} s for {file.name}, which another process holds"
                        ) from None
                    time.sleep(0.01)
            yield

    def refresh(self) -> None:
        """See Blobs."""
        self._refresh()

    def commit(self) -> None:
        """See Blobs."""
        self._commit()


class FsspecBlobs:
    """Objects behind a URL that fsspec knows (s3://, gs://, memory:// ...), each put in one piece of work.

    Raises:
        BackendUnavailable: fsspec, or what it needs for this URL, is not installed.
    """

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise BackendUnavailable(
                f"a weight store at {url} needs fsspec: pip install 'headway[store]', or give a directory"
            ) from error
        try:
            # Never a cached listing: a pointer must be read as it is now.
            found: tuple[Any, str] = fsspec.core.url_to_fs(
                url, use_listings_cache=False, skip_instance_cache=True
            )
        except (ImportError, ValueError) as error:
            raise BackendUnavailable(f"a weight store at {url}: {error}") from error
        self._fs, self._root = found
        self._url = url

    @property
    def url(self) -> str:
        """As it was given."""
        return self._url

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def write(self, name: str, parts: Iterable[memoryview | bytes], check: Check) -> None:
        """See Blobs."""
        path = self._path(name)
        with _medium(self._url):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            # What is written when this fails may become a torn object: no marker will ever name it.
            with self._fs.open(path, "wb") as file:
                for piece in _pieces(parts):
                    check()
                    file.write(piece)

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """See Blobs."""
        try:
            with _medium(self._url), self._fs.open(self._path(name), "rb") as file:
                return bytes(file.read(max_bytes))
        except FileNotFoundError:
            return None

    def pieces(self, name: str, into: memoryview) -> Iterator[memoryview]:
        """See Blobs."""
        at = 0
        gone = contextlib.suppress(FileNotFoundError)
        with gone, _medium(self._url), self._fs.open(self._path(name), "rb") as file:
            while at < into.nbytes:
                data = file.read(min(PIECE_BYTES, into.nbytes - at))
                if not data:
                    return
                into[at : at + len(data)] = data
                yield into[at : at + len(data)]
                at += len(data)

    def names(self, folder: str) -> list[str]:
        """See Blobs."""
        try:
            with _medium(self._url):
                found: list[str] = self._fs.ls(self._path(folder), detail=False, refresh=True)
        except FileNotFoundError:
            return []
        return sorted(f"{folder}/{path.rstrip('/').rpartition('/')[2]}" for path in found)

    def delete(self, name: str) -> None:
        """See Blobs."""
        with contextlib.suppress(FileNotFoundError), _medium(self._url):
            self._fs.rm_file(self._path(name))

    def locked(self, name: str) -> contextlib.AbstractContextManager[None]:
        """See Blobs: object stores have no locks; the store's readers never go back, whatever a late writer does."""
        del name
        return contextlib.nullcontext()

    def refresh(self) -> None:
        """See Blobs."""
        self._fs.invalidate_cache()

    def commit(self) -> None:
        """See Blobs."""


def open_blobs(url: str) -> DirectoryBlobs | FsspecBlobs:
    """A directory's, or with a scheme (other than file://) what fsspec finds there.

    Raises:
        WeightError, BackendUnavailable: as the two do.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme == "file":
        return DirectoryBlobs(Path(rest if separator else url))
    return FsspecBlobs(url)


@contextlib.contextmanager
def _medium(url: str) -> Generator[None]:
    """What a back-end's own library raises, as an OSError."""
    try:
        yield
    except (OSError, HeadwayError):
        raise
    except Exception as error:
        raise OSError(f"{url}: {type(error).__name__}: {error}") from error


def _pieces(parts: Iterable[memoryview | bytes]) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part).cast("B")
        for start in range(0, view.nbytes, PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


def _write_all(descriptor: int, piece: memoryview) -> None:
    while piece.nbytes:
        piece = piece[os.write(descriptor, piece) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
