"""The emulator finds each planted fault of faults.cu, whatever the order of the threads, and no other."""

from __future__ import annotations

import os
import subprocess
import sys
from ctypes import CDLL, c_char_p, c_int, c_void_p
from pathlib import Path

import pytest
import torch

from headway_kernels.cuda.library import library

pytestmark = pytest.mark.cuda_emulated

THREADS = 64
# What a missing barrier shows first depends on who runs first.
RACES = (
    "a write and a read of shared staged",
    "a read and a write of shared staged",
    "is read before it is written",
)
FAULTS = {
    1: RACES,  # no barrier between the writes and the reads of other warps
    2: RACES,  # none between those of one warp
    3: RACES,  # none between reads and later writes
    4: ("divergent barrier: 63 threads wait at __syncthreads",),
    5: ("divergent barrier: threads met at __syncthreads",),
    6: ("divergent barrier: 0 threads wait at __syncthreads() and 32 at a warp collective",),
    7: ("shared staged[120] is out of bounds, size 64",),
    10: RACES,  # with a reader of another warp, that many later readers followed
    8: ("shared staged[3] is read before it is written",),
}


def faults() -> CDLL:
    lib = CDLL(str(library().path.with_name("libfaults.so")))
    lib.headway_fault.argtypes, lib.headway_fault.restype = [c_int, c_void_p], c_int
    lib.headway_fault_message.restype = c_char_p
    return lib


@pytest.mark.usefixtures("order")
def test_a_sound_kernel_runs() -> None:
    data = torch.arange(THREADS, dtype=torch.int32)
    assert faults().headway_fault(0, data.data_ptr()) == 0
    assert data.tolist() == list(range(THREADS))[::-1]


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: int) -> None:
    lib, data = faults(), torch.arange(THREADS, dtype=torch.int32)
    assert lib.headway_fault(fault, data.data_ptr()) == -2
    message = lib.headway_fault_message().decode()
    assert any(expected in message for expected in FAULTS[fault]), message
    assert lib.headway_fault(0, data.data_ptr()) == 0  # and the next launch is sound again


def test_global_memory_out_of_bounds_stops_the_process() -> None:
    code = (
        "import ctypes, sys; lib = ctypes.CDLL(sys.argv[1]); data = ctypes.create_string_buffer(256); "
        "libc = ctypes.CDLL(None); libc.malloc.restype = ctypes.c_void_p; "
        "lib.headway_fault(9, ctypes.c_void_p(libc.malloc(ctypes.c_size_t(256)))); print('survived')"
    )
    path = Path(library().path).with_name("libfaults.so")
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(os.environ),
    )
    assert done.returncode != 0
    assert "survived" not in done.stdout
    assert "heap-buffer-overflow" in done.stderr
    assert "WRITE of size 4" in done.stderr
