"""The folder of a run's checkpoints: written whole or not at all, verified before use, the newest few kept.

    checkpoints/0.50/          one checkpoint, named by its version (epoch.step)
        model.safetensors ...  pieces, each fsynced
        checkpoint.json        the marker, written last: every piece's size and digest, and its own
    checkpoints/.partial-0.75  being written: without a marker until the end, renamed when whole

A crash at any point leaves what was complete before; what it leaves behind is never taken for a checkpoint.
No torch here: the supervisor looks for checkpoints too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from headway.checkpoint.disk import CheckpointDisk
from headway.errors import CheckpointError
from headway.types import PolicyVersion

FORMAT = 1
MARKER = "checkpoint.json"
_PARTIAL = ".partial-"
_ASIDE = "abandoned-"
_READ_BYTES = 4 << 20

Pieces = Mapping[str, Callable[[], Iterable[memoryview]]]


class FileEntry(msgspec.Struct, frozen=True):
    """One piece: its size and the xxh3-64 hex of its bytes."""

    num_bytes: int
    digest: str


class Marker(msgspec.Struct, frozen=True):
    """What makes a folder a checkpoint.

    Attributes:
        run_id: of the run; version: of the weights.
        lineage: one version per earlier epoch that the weights descend from: the step where it was left.
        journal: position up to which the journal is contained, "" without one.
        created_s: Unix time.
        files: by name; digest: xxh3-64 hex of this structure's JSON with an empty digest.
    """

    format: int
    run_id: str
    version: PolicyVersion
    lineage: list[PolicyVersion]
    journal: str
    created_s: float
    files: dict[str, FileEntry]
    digest: str = ""

    def sealed(self) -> Marker:
        """With its digest."""
        return msgspec.structs.replace(self, digest=self._expected())

    def _expected(self) -> str:
        return xxhash.xxh3_64_hexdigest(msgspec.json.encode(msgspec.structs.replace(self, digest="")))

    @property
    def whole(self) -> bool:
        """Whether the digest is that of the rest."""
        return self.digest == self._expected()


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, its digests verified."""

    path: Path
    marker: Marker

    @property
    def name(self) -> str:
        """epoch.step"""
        return self.path.name


@dataclass(frozen=True)
class Search:
    """What a search found.

    Attributes:
        newest: the newest complete checkpoint, None if there is none.
        skipped: newer ones that are not complete, each with the reason.
    """

    newest: Checkpoint | None
    skipped: list[tuple[str, str]]


class CheckpointStore:
    """Writes, finds and deletes checkpoints. One writer at a time (the run's lock sees to that).

    Args:
        folder: of all checkpoints of a run.
        keep: complete ones that stay; at least 1.
    """

    def __init__(self, folder: Path, keep: int = 2, disk: CheckpointDisk | None = None) -> None:
        self.folder = folder
        self._keep = max(1, keep)
        self._disk = disk or CheckpointDisk()

    def write(self, marker: Marker, pieces: Pieces) -> Checkpoint:
        """Write a checkpoint and make it durable; then delete what is beyond `keep`. One that is there, whole, stays.

        Args:
            marker: without `files` and digest.
            pieces: by file name; each is asked once for its bytes.

        Raises:
            OSError: it could not be written; earlier checkpoints are as they were.
        """
        name = str(marker.version)
        partial, final = self.folder / f"{_PARTIAL}{name}", self.folder / name
        self._disk.make_folder(self.folder)
        with contextlib.suppress(CheckpointError):
            return self.open(name)
        for left in (partial, final):  # of a crash, or of a checkpoint that turned out damaged
            if left.exists():
                self._discard(left)
        try:
            self._disk.make_folder(partial)
            files = {file: self._write_file(partial / file, make()) for file, make in pieces.items()}
            marker = msgspec.structs.replace(marker, format=FORMAT, files=files).sealed()
            text = msgspec.json.format(msgspec.json.encode(marker), indent=1) + b"\n"
            self._write_file(partial / f"{MARKER}.new", [memoryview(text)])
            self._disk.rename(partial / f"{MARKER}.new", partial / MARKER)
            self._disk.rename(partial, final)
        except OSError:
            with contextlib.suppress(OSError):
                self._disk.remove_folder(partial)
            raise
        self.prune()
        return Checkpoint(final, marker)

    def _write_file(self, path: Path, chunks: Iterable[memoryview]) -> FileEntry:
        digest, size = xxhash.xxh3_64(), 0
        fd = self._disk.create(path)
        try:
            for chunk in chunks:
                self._disk.write(fd, [chunk], size)
                digest.update(chunk)
                size += chunk.nbytes
            self._disk.sync(fd)
        finally:
            self._disk.close(fd)
        return FileEntry(size, digest.hexdigest())

    def names(self) -> list[str]:
        """Every folder named like a checkpoint, the newest version first, complete or not."""
        return [str(version) for version in sorted(self._versions(), reverse=True)]

    def _versions(self) -> list[PolicyVersion]:
        found: list[PolicyVersion] = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            epoch, dot, step = path.name.partition(".")
            if dot and epoch.isdecimal() and step.isdecimal():
                found.append(PolicyVersion(int(epoch), int(step)))
        return found

    def resolve(self, name: str) -> str:
        """The name of a checkpoint given by name, or by its step (of the newest epoch that has it).

        Raises:
            CheckpointError: no such checkpoint; lists those there are.
        """
        names = self.names()
        for known in names:
            if name in (known, known.partition(".")[2]):
                return known
        raise CheckpointError(
            f"no checkpoint {name} in {self.folder}; there are: {', '.join(names) or 'none'}"
        )

    def search(self, verify: bool = True, without: frozenset[str] = frozenset()) -> Search:
        """The newest complete checkpoint, and why newer folders are not one.

        Args:
            verify: read every byte and compare the digests; else only what the marker and the sizes say.
            without: as in `open`.
        """
        skipped: list[tuple[str, str]] = []
        for name in self.names():
            try:
                return Search(self.open(name, verify, without), skipped)
            except CheckpointError as error:
                skipped.append((name, str(error)))
        if self.folder.is_dir():
            for path in sorted(self.folder.glob(f"{_PARTIAL}*")):
                skipped.append((path.name, "its writing was interrupted"))
        return Search(None, skipped)

    def open(self, name: str, verify: bool = True, without: frozenset[str] = frozenset()) -> Checkpoint:
        """One checkpoint.

        Args:
            name: epoch.step.
            without: files that may be missing or damaged.

        Raises:
            CheckpointError: there is none, or it is incomplete or damaged; says where.
        """
        path = self.folder / name
        try:
            marker = msgspec.json.decode((path / MARKER).read_bytes(), type=Marker)
        except FileNotFoundError:
            there = ", ".join(self.names()) or "none"
            if path.is_dir():
                raise CheckpointError(f"{path}: its marker is missing: it was not finished") from None
            raise CheckpointError(f"{path}: no such checkpoint; there are: {there}") from None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: its marker cannot be read: {error}") from None
        if marker.format != FORMAT:
            raise CheckpointError(f"{path} has format {marker.format}; this headway reads {FORMAT}")
        if not marker.whole or str(marker.version) != name:
            raise CheckpointError(f"{path}: its marker is damaged")
        for file, entry in marker.files.items():
            if file not in without:
                _check_file(path / file, entry, verify)
        return Checkpoint(path, marker)

    def prune(self) -> None:
        """Delete all but the newest `keep` complete checkpoints; the last complete one always stays."""
        complete: list[str] = []
        for name in self.names():
            with contextlib.suppress(CheckpointError):
                complete.append(self.open(name, verify=False).name)
        for name in complete[self._keep :]:
            self._discard(self.folder / name)
        for path in self.folder.glob(f"{_ASIDE}*") if complete else ():
            self._disk.remove_folder(path)

    def set_aside(self, newer_than: PolicyVersion) -> list[str]:
        """Rename checkpoints of a future that is given up, so that no search finds them. Returns their names."""
        aside: list[str] = []
        for version in sorted(self._versions()):
            if version > newer_than:
                target = self.folder / f"{_ASIDE}{version}"
                if target.exists():
                    self._disk.remove_folder(target)
                self._disk.rename(self.folder / str(version), target)
                aside.append(str(version))
        return aside

    def tidy(self) -> None:
        """Delete what crashes have left half-written. Only for whoever holds the run."""
        for path in self.folder.glob(f"{_PARTIAL}*") if self.folder.is_dir() else ():
            self._disk.remove_folder(path)

    def oldest(self) -> Checkpoint | None:
        """The oldest complete one (by its marker): the journal is needed from its position on."""
        for name in reversed(self.names()):
            with contextlib.suppress(CheckpointError):
                return self.open(name, verify=False)
        return None

    def _discard(self, path: Path) -> None:
        """The marker goes first, so that a crash on the way leaves nothing that looks complete."""
        marker = path / MARKER
        if marker.exists():
            self._disk.remove(marker)
            self._disk.sync_folder(path)
        self._disk.remove_folder(path)


def _check_file(path: Path, entry: FileEntry, verify: bool) -> None:
    try:
        size = path.stat().st_size
    except OSError:
        raise CheckpointError(f"{path} is missing") from None
    if size != entry.num_bytes:
        raise CheckpointError(f"{path} has {size} bytes; {entry.num_bytes} were written")
    if not verify:
        return
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != entry.digest:
        raise CheckpointError(
            f"{path} is damaged: its digest is {digest.hexdigest()}, {entry.digest} was written"
        )
