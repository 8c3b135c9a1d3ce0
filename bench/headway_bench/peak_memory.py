"""The memory that a call adds to this process at its highest, from the kernel's own counters (Linux)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from headway.errors import UnsupportedOption

CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
RESET_PEAK = "5"  # proc_pid_clear_refs(5)


def peak_extra_mb(work: Callable[[], object]) -> float:
    """Runs `work` once; MB (10^6 bytes) of resident memory above what was resident before.

    What the allocator still held is given back first. What `work` keeps from earlier calls (a thread's scratch)
    is not seen: hundreds of KB here.

    Raises:
        UnsupportedOption: this system does not count peaks per call.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        CLEAR.write_text(RESET_PEAK, encoding="ascii")
    except OSError as error:
        raise UnsupportedOption(f"peak memory cannot be measured here: {CLEAR}: {error}") from None
    before = _kib("VmRSS")
    work()
    return max(0, _kib("VmHWM") - before) * 1024 / 1e6


def _kib(name: str) -> int:
    for line in STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise UnsupportedOption(f"peak memory cannot be measured here: {STATUS} has no {name}")
