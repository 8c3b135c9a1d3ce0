"""The collective channel's two mechanisms: a rendezvous of small texts, and a group that broadcasts bytes.

The rendezvous is a TCPStore at the learner. The group is a process group of torch.distributed, made for a set of
members and dropped at the first failure: a broken group is never used again, so no attempt inherits a hung peer.
Its operations end by themselves after `stall_s`, so nothing writes into a destination that was given back.
"""

from __future__ import annotations

import contextlib
import socket as sockets
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
import xxhash

from headway.errors import BackendUnavailable, DeadlineExceeded, StreamError, UnsupportedOption, WeightError
from headway.weights.channel import PayloadHeader
from headway.weights.chunks import ChunkPlan, Parts

BACKENDS = ("gloo", "nccl")
CHUNK_BYTES = 16 << 20
POLL_S = 0.005
_distributed: Any = dist  # its stores and groups carry no types
_Record = TypeVar("_Record", bound=msgspec.Struct)


@dataclass(frozen=True)
class CollectiveTiming:
    """Seconds.

    Attributes:
        stall_s: that one operation of a broadcast may take; gone_s: without a sign of life, a member is forgotten.
        done_s: that a member may take to verify what came.
    """

    stall_s: float = 15.0
    gone_s: float = 15.0
    done_s: float = 30.0


DEFAULT_TIMING = CollectiveTiming()


class Hello(msgspec.Struct, frozen=True):
    """What the learner runs; key "hello"."""

    run_id: str
    manifest_digest: str
    backend: str


class Offer(msgspec.Struct, frozen=True):
    """Payloads of the newest version, deltas first, the whole state last; key "offer"."""

    push: int
    headers: list[PayloadHeader]


class Ready(msgspec.Struct, frozen=True):
    """A member wants a payload, or says why it can use none; key "ready/MEMBER".

    Attributes:
        attempt: counts this member's records; payload: its key, "" for none; error: its own words.
    """

    attempt: int
    payload: str
    error: str


class Go(msgspec.Struct, frozen=True):
    """The broadcast that answers a Ready; key "go/MEMBER/ATTEMPT".

    Attributes:
        group: names the process group; rank, size: in it, the learner being 0.
        error: why there is none.
    """

    group: int
    rank: int
    size: int
    digest_key: str
    error: str


class Rendezvous:
    """A TCPStore with typed records and bounded waits.

    Args:
        host, port: of the learner's; port 0 makes the learner's own, on a free port.
        local_host: this member's address that the others reach; the learner's is host.

    Raises:
        StreamError: nobody answers, or the host cannot be listened on.
    """

    def __init__(self, host: str, port: int, *, local_host: str = "", timeout_s: float) -> None:
        self.host, self.local_host = host, local_host or host
        timeout = timedelta(seconds=timeout_s)
        try:
            if port:
                self.store: Any = _distributed.TCPStore(
                    host, port, is_master=False, wait_for_workers=False, timeout=timeout
                )
            else:
                self.store = _listen(host, timeout)
        except (RuntimeError, OSError) as error:
            raise StreamError(
                f"no collective weight channel at {host}:{port}: {first_line(error)}"
            ) from error

    @property
    def port(self) -> int:
        """That the learner listens on."""
        return int(self.store.port)

    def put(self, key: str, record: msgspec.Struct | str) -> None:
        """Set a record or a text.

        Raises:
            WeightError: the learner is gone.
        """
        data = record if isinstance(record, str) else msgspec.json.encode(record).decode()
        with _gone(self.host):
            self.store.set(key, data)

    def get(self, key: str, kind: type[_Record]) -> _Record | None:
        """The record, None when there is none.

        Raises:
            WeightError: the learner is gone, or it is no such record.
        """
        text = self.text(key)
        if text is None:
            return None
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.MsgspecError as error:
            raise WeightError(f"{key!r} of the rendezvous is no {kind.__name__}: {error}") from error

    def text(self, key: str) -> str | None:
        """The text, None when there is none. Raises as get does."""
        with _gone(self.host):
            return bytes(self.store.get(key)).decode() if self.store.check([key]) else None

    def wait(self, key: str, timeout_s: float) -> bool:
        """Whether the key is there within timeout_s. Raises as get does.

        Looks again and again: the store's own wait writes warnings to stderr whenever it ends without the key.
        """
        deadline = time.monotonic() + timeout_s
        while self.text(key) is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def count(self, key: str, more: int = 0) -> int:
        """Add to a counter; its value. Raises as get does."""
        with _gone(self.host):
            return int(self.store.add(key, more))

    def remove(self, *keys: str) -> None:
        """Forget keys. Raises as get does."""
        with _gone(self.host):
            for key in keys:
                self.store.delete_key(key)


class BroadcastGroup:
    """A process group in which rank 0 sends payloads to all others.

    Args:
        rendezvous: shared by all; name: of the group, used once; rank, size: of this member.
        stall_s: after which any of its operations, the making included, gives up.

    Raises:
        WeightError: not all members came.
        UnsupportedOption, BackendUnavailable: no such backend, here.
    """

    def __init__(
        self, rendezvous: Rendezvous, name: str, rank: int, size: int, *, backend: str, stall_s: float
    ) -> None:
        self._device = check_backend(backend)
        store: Any = _distributed.PrefixStore(f"group/{name}", rendezvous.store)
        timeout = timedelta(seconds=stall_s)
        try:
            self._group = _make_group(store, rank, size, backend, rendezvous.local_host, timeout)
        except RuntimeError as error:
            raise WeightError(f"the members of a broadcast did not meet: {first_line(error)}") from error

    def send(self, parts: tuple[memoryview, ...], num_bytes: int, deadline: float) -> str:
        """Broadcast a payload; xxh3-64 hex of it.

        Args:
            deadline: time.monotonic() at which this member gives up.

        Raises:
            WeightError: a member was lost, or stalled. DeadlineExceeded: not complete in time.
        """
        whole, digest = Parts(parts), xxhash.xxh3_64()
        for start, end in _chunks(num_bytes):
            piece = whole.slice(start, end)
            digest.update(piece)
            _check_deadline(deadline, start, num_bytes)
            self.broadcast(_as_tensor(piece).to(self._device), start)
        return digest.hexdigest()

    def receive(self, into: memoryview, deadline: float) -> str:
        """Fill `into`; xxh3-64 hex of what came. Raises as send does."""
        digest = xxhash.xxh3_64()
        for start, end in _chunks(into.nbytes):
            piece = into[start:end]
            _check_deadline(deadline, start, into.nbytes)
            target = torch.frombuffer(piece, dtype=torch.uint8)
            if self._device.type == "cpu":
                self.broadcast(target, start)
            else:
                landing = torch.empty_like(target, device=self._device)
                self.broadcast(landing, start)
                target.copy_(landing)
            digest.update(piece)
        return digest.hexdigest()

    def broadcast(self, chunk: torch.Tensor, at: int = 0) -> None:
        """One operation: rank 0's chunk, in place, in all others' of the same size; `at` is for the error.

        Raises:
            WeightError: a member was lost, or stalled.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            self._group.broadcast([chunk], options).wait()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise WeightError(f"the broadcast broke off at byte {at}: {first_line(error)}") from error

    def close(self) -> None:
        """Drop its connections."""
        with contextlib.suppress(RuntimeError):
            self._group.shutdown()


def check_backend(backend: str) -> torch.device:
    """The device that a backend's payloads pass through.

    Raises:
        UnsupportedOption: no such backend. BackendUnavailable: not on this machine.
    """
    if backend not in BACKENDS:
        raise UnsupportedOption(f"collective backend {backend!r}; there are {', '.join(BACKENDS)}")
    if backend == "gloo":
        return torch.device("cpu")
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise BackendUnavailable(
            "push.backend = 'nccl' needs a CUDA device and a torch with NCCL; 'gloo' runs anywhere"
        )
    return torch.device("cuda", torch.cuda.current_device())


def first_line(error: BaseException) -> str:
    """Of an error of torch.distributed, which come with stack traces."""
    return (str(error).splitlines() or [repr(error)])[0][:300]


def _check_deadline(deadline: float, at: int, num_bytes: int) -> None:
    if time.monotonic() > deadline:
        raise DeadlineExceeded(f"a broadcast of {num_bytes} bytes had reached byte {at} at its deadline")


def _listen(host: str, timeout: timedelta) -> Any:
    """A store on this host's address alone: left to itself, it would listen on all of them."""
    with sockets.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]
        return _distributed.TCPStore(
            "127.0.0.1" if host == "0.0.0.0" else host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )


def _make_group(store: Any, rank: int, size: int, backend: str, host: str, timeout: timedelta) -> Any:
    if backend == "nccl":
        options = _distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return _distributed.ProcessGroupNCCL(store, rank, size, options)
    # By name, or gloo asks the resolver for this host's name and may take a minute over it, or another interface.
    options = _distributed.ProcessGroupGloo._Options()
    options._devices = [_distributed.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return _distributed.ProcessGroupGloo(store, rank, size, options)


def _chunks(num_bytes: int) -> Iterator[tuple[int, int]]:
    plan = ChunkPlan(num_bytes, CHUNK_BYTES)
    return (plan.bounds(index) for index in range(plan.num_chunks))


def _as_tensor(piece: memoryview) -> torch.Tensor:
    return torch.frombuffer(bytearray(piece) if piece.readonly else piece, dtype=torch.uint8)


@contextlib.contextmanager
def _gone(host: str) -> Generator[None]:
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, WeightError):
            raise
        raise WeightError(f"the learner's rendezvous at {host} is gone: {first_line(error)}") from error
