"""Sending memory without copying it: its pages are lent to the kernel, and the receiver's read is the only copy.

    memory --vmsplice--> pipe --splice--> socket

On loopback the receiver then reads straight from the sender's pages, so they must keep their bytes until it has.
Nothing tells when that is; but what is sent after them by copy has to queue behind them, and a queue is bounded by
the buffers of the two sockets. Whoever sends COPIED_TAIL_BYTES by copy after the last lent byte, and has seen the
kernel take them, may let the memory go. Until then the receiver's digest catches a changed byte as any other damage.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import select
import socket as sockets
import sys

import numpy as np

PIPE_BYTES = 1 << 20
COPIED_TAIL_BYTES = 4 << 20
"""More than what waits in two sockets whose buffers are LOOPBACK_BUFFER_BYTES, which the kernel doubles."""


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Lender:
    """Lends memory to one socket; used by one thread.

    Raises:
        OSError: this system cannot (no Linux, the call is filtered, no pipe to be had).
    """

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise OSError(errno.ENOSYS, "memory is lent to sockets on Linux only")
        self._vmsplice = ctypes.CDLL(None, use_errno=True).vmsplice
        self._vmsplice.restype = ctypes.c_ssize_t
        self._read, self._write = os.pipe()
        try:
            with contextlib.suppress(OSError):  # beyond what this user may have: the default serves, slower
                fcntl.fcntl(self._write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            with mmap.mmap(-1, mmap.PAGESIZE) as page:
                self._lend(np.frombuffer(page, np.uint8).ctypes.data, mmap.PAGESIZE)
                os.read(self._read, mmap.PAGESIZE)
        except BaseException:
            self.close()
            raise

    def _lend(self, base: int, length: int) -> int:
        vector = _Vector(base, length)
        taken = self._vmsplice(self._write, ctypes.byref(vector), 1, 0)
        if taken < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"vmsplice: {os.strerror(code)}")
        return int(taken)

    def send(self, socket: sockets.socket, body: memoryview) -> None:
        """Hand `body` to the socket, waiting as long as its timeout allows for each part.

        Raises:
            OSError: the peer is gone, or did not read for the socket's timeout. The connection is of no use then.
        """
        memory = np.frombuffer(body, np.uint8)
        poll = select.poll()
        poll.register(socket, select.POLLOUT)
        timeout_s = socket.gettimeout()
        at = 0
        while at < memory.nbytes:
            left = self._lend(memory.ctypes.data + at, min(memory.nbytes - at, PIPE_BYTES))
            at += left
            while left:
                try:
                    left -= os.splice(self._read, socket.fileno(), left, flags=os.SPLICE_F_NONBLOCK)
                except BlockingIOError:
                    if not poll.poll(None if timeout_s is None else timeout_s * 1000):
                        raise TimeoutError(f"the peer did not read for {timeout_s} s") from None

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._read)
        os.close(self._write)
