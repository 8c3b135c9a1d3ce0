"""What the plane is measured against: its parts alone, without anything that makes them safe."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import zmq


def pull(seconds: float, start: float, socket: zmq.Socket[bytes]) -> float:
    """Messages per second that a PULL socket reads as multipart, after `start` seconds of warm-up."""
    end = time.monotonic() + start
    while time.monotonic() < end:
        socket.recv_multipart()
    num, began = 0, time.monotonic()
    while (elapsed_s := time.monotonic() - began) < seconds:
        socket.recv_multipart()
        num += 1
    return num / elapsed_s


def append(path: Path, frames: Sequence[bytes], seconds: float, per_sync: int) -> float:
    """Messages per second that plain writes put on the disk, with an fsync after every `per_sync` of them."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        num, began = 0, time.monotonic()
        while (elapsed_s := time.monotonic() - began) < seconds:
            for _ in range(per_sync):
                os.writev(fd, frames)
            os.fdatasync(fd)
            num += per_sync
        return num / elapsed_s
    finally:
        os.close(fd)
        path.unlink()
