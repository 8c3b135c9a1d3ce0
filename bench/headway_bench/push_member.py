"""The receiving side of the push bench, in a process of its own: `python -m headway_bench.push_member ROLE JSON`.

Reads one command a line from its standard input, answers with one line of JSON; ends when the input does. All times
are of the monotonic clock, which the processes of one machine share.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.types import Manifest, PolicyVersion, TensorSpec
from headway.weights import ChannelReceiver, DoubledServed, FlatServed, PayloadHeader, Stager
from headway.weights.served import TORCH_DTYPES

DEADLINE_S = 300.0
PIECE_BYTES = 1 << 20


def manifest_of(num_elements: int, dtype: str) -> Manifest:
    """One tensor of so many elements."""
    return Manifest(dtype, [TensorSpec("w", [], [num_elements], 0, num_elements, True)], num_elements, 0, {})


def touched(num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Memory whose pages are all there."""
    memory = np.empty(num_bytes, np.uint8)
    memory.fill(1)
    return memory


def open_end(channel: str, address: str, digest: str, manifest: Manifest | None = None) -> ChannelReceiver:
    """A channel's receiver."""
    if channel == "shm":
        from headway.weights.shm import SCHEME, ShmReceiver

        assert manifest is not None
        return ShmReceiver(address.removeprefix(SCHEME), manifest, whole_only=False)
    if channel == "tcp":
        from headway.weights.tcp_receiver import TcpReceiver

        return TcpReceiver(address, "bench", digest)
    if channel == "store":
        from headway.weights.blobs import open_blobs
        from headway.weights.store_receiver import StoreReceiver

        return StoreReceiver(open_blobs(address.removeprefix("store:")), "bench", digest, poll_s=0.001)
    from headway.weights.collective_receiver import CollectiveReceiver

    return CollectiveReceiver(address, "bench", digest)


# Bytes alone -------------------------------------------------------------------------------------------------


def serve_channel(arguments: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Fetch the newest payload into memory that is there already."""
    into = touched(arguments["num_bytes"])
    end = open_end(arguments["channel"], arguments["address"], "bench")
    held: PolicyVersion | None = None
    state = ""

    def fetch(command: dict[str, Any]) -> dict[str, Any]:
        nonlocal held, state
        header = wait_for(end, held, state)
        end.fetch(header, memoryview(into), DEADLINE_S)
        held, state = header.version, header.state_digest
        return {"done_at": time.monotonic(), "byte": int(into[command["probe"]])}

    end.wait(0)
    return fetch


def wait_for(end: ChannelReceiver, held: PolicyVersion | None, state: str) -> PayloadHeader:
    """The next version's header."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        header = end.newest(held, state)
        if header is not None:
            return header
        end.wait(1.0)
    raise SystemExit(f"no version after {held} in {DEADLINE_S:.0f} s")


def serve_raw(arguments: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Plain TCP, straight into the destination, without a digest."""
    into = touched(arguments["num_bytes"])
    connection = socket.socket()
    if arguments["buffer_bytes"]:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, arguments["buffer_bytes"])
    connection.connect(("127.0.0.1", arguments["port"]))

    def receive(command: dict[str, Any]) -> dict[str, Any]:
        view, at = memoryview(into), 0
        while at < into.nbytes:
            at += connection.recv_into(view[at : at + PIECE_BYTES])
        return {"done_at": time.monotonic(), "byte": int(into[command["probe"]])}

    return receive


def serve_files(arguments: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A safetensors or torch.save file, loaded and copied into the destination."""
    into = torch.from_numpy(touched(arguments["num_bytes"]))

    def load(command: dict[str, Any]) -> dict[str, Any]:
        from safetensors.torch import load_file

        path = command["path"]
        tensors = load_file(path) if path.endswith(".safetensors") else torch.load(path, weights_only=True)
        into.copy_(tensors["w"])
        return {"done_at": time.monotonic(), "byte": int(into[command["probe"]])}

    return load


def serve_gloo(arguments: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The receiving rank of a gloo broadcast into the destination."""
    from headway.weights.collective_group import BroadcastGroup, Rendezvous

    into = torch.from_numpy(touched(arguments["num_bytes"]))
    rendezvous = Rendezvous("127.0.0.1", arguments["port"], timeout_s=DEADLINE_S)
    group = BroadcastGroup(rendezvous, "bench", 1, 2, backend="gloo", stall_s=DEADLINE_S)

    def receive(command: dict[str, Any]) -> dict[str, Any]:
        for piece in into.split(arguments["piece_bytes"]):
            group.broadcast(piece)
        return {"done_at": time.monotonic(), "byte": int(into[command["probe"]])}

    return receive


# Whole pushes ------------------------------------------------------------------------------------------------


class BenchEngine:
    """A FlatEngine without a model: weights, in fp32 or as published, that can be written and swapped."""

    def __init__(self, num_elements: int, dtype: str) -> None:
        kind = TORCH_DTYPES[dtype]
        self.flat = torch.from_numpy(touched(num_elements * kind.itemsize)).view(kind).zero_()

    def apply(self, copy: Callable[[Tensor], PolicyVersion]) -> None:
        """See FlatEngine."""
        copy(self.flat)

    def swap(self, flat: Tensor, version: PolicyVersion) -> None:
        """See FlatEngine."""
        self.flat = flat


class Stamped:
    """A receiver whose fetches are timed; everything else is the receiver's own."""

    def __init__(self, receiver: ChannelReceiver) -> None:
        self._receiver = receiver
        self.fetched_at = 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._receiver, name)
        if name not in ("fetch", "pin"):
            return found

        def timed(*arguments: Any) -> Any:
            result = found(*arguments)
            self.fetched_at = time.monotonic()
            return result

        return timed


def serve_push(arguments: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Stage, commit and prove the next version; every stage's time."""
    manifest = manifest_of(arguments["num_elements"], arguments["dtype"])
    end: Any = Stamped(open_end(arguments["channel"], arguments["address"], manifest.digest, manifest))
    engine = BenchEngine(manifest.num_elements, arguments["engine_dtype"])
    served = (DoubledServed if arguments["doubled"] else FlatServed)(engine, manifest)
    stager = Stager(end, served, manifest, swap=arguments["swap"], deadline_s=DEADLINE_S)

    def push(command: dict[str, Any]) -> dict[str, Any]:
        wanted = PolicyVersion(0, command["step"])
        deadline = time.monotonic() + DEADLINE_S
        while stager.staged() != wanted:
            if not stager.turn():
                stager.wait(0.2)
            if time.monotonic() > deadline:
                raise SystemExit(f"version {wanted} was not staged: {stager.last_failure}")
        staged_at = time.monotonic()
        stager.commit()
        committed_at = time.monotonic()
        stager.turn()
        proved_at = time.monotonic()
        [proof] = stager.proofs()
        return {
            "fetched_at": end.fetched_at,
            "staged_at": staged_at,
            "committed_at": committed_at,
            "proved_at": proved_at,
            "digest": proof.digest,
        }

    return push


ROLES: dict[str, Callable[[dict[str, Any]], Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "channel": serve_channel,
    "raw": serve_raw,
    "files": serve_files,
    "gloo": serve_gloo,
    "push": serve_push,
}


def main(role: str, arguments: dict[str, Any]) -> None:
    """Answer commands until the input ends."""
    torch.set_num_threads(1)
    handle = ROLES[role](arguments)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"begun_at": time.monotonic()}), flush=True)
        print(json.dumps(handle(json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
