"""Memory larger than the machine's, for offsets beyond 2^31: only the pages that are touched exist."""

from __future__ import annotations

import mmap

_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python's mmap does not name


def sparse_memory(num_bytes: int) -> mmap.mmap:
    """Zeroed, writable; freed when the last tensor over it goes."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
