"""The native CPU library: found once, loaded with ctypes, its interface number checked.

Comes in: libheadway_kernels_cpu.so, which CMake installs beside this package. Goes out: a CDLL with typed
functions, or None with a reason; then every op runs on its plain PyTorch reference. Called by the ops of this
package.

HEADWAY_NATIVE=0 in the environment leaves the library out; HEADWAY_NATIVE=/path/to/lib.so loads that one.
"""

from __future__ import annotations

import functools
import logging
import os
from ctypes import CDLL, POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

import headway_kernels

ABI = 4  # HEADWAY_CPU_ABI in csrc/headway_cpu.h
FILE_NAME = "libheadway_kernels_cpu.so"
SLOWDOWN = "10 to 100"  # of the reference, measured on decode steps, learner rows and sampling

logger = logging.getLogger("headway.kernels")


class PlanStruct(Structure):
    """HeadwayPlan of csrc/headway_cpu.h: pointers to the plan's int64 arrays and their sizes."""

    _fields_ = [
        ("query_start", c_void_p),
        ("query_len", c_void_p),
        ("causal_start", c_void_p),
        ("causal_base", c_void_p),
        ("range_offsets", c_void_p),
        ("range_start", c_void_p),
        ("range_len", c_void_p),
        ("num_runs", c_int64),
        ("num_queries", c_int64),
        ("num_keys", c_int64),
    ]


class ViewStruct(Structure):
    """HeadwayView of csrc/headway_cpu.h: a [tokens, heads, head_dim] fp32 tensor, strides in elements."""

    _fields_ = [("data", c_void_p), ("token_stride", c_int64), ("head_stride", c_int64)]


class DeltaStruct(Structure):
    """HeadwayDelta of csrc/headway_cpu.h: a valid weight delta."""

    _fields_ = [
        ("formats", c_void_p),
        ("offsets", c_void_p),
        ("payload", c_void_p),
        ("num_elements", c_int64),
        ("dtype", c_int32),
    ]


class HeadStruct(Structure):
    """HeadwayHead of csrc/headway_cpu.h."""

    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("vocabulary", c_int64),
        ("hidden", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("dtype", c_int32),
    ]


class RowsStruct(Structure):
    """HeadwayRows of csrc/headway_cpu.h."""

    _fields_ = [
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("count", c_int64),
        ("target", c_void_p),
        ("inv_temperature", c_void_p),
    ]


class ScoresStruct(Structure):
    """HeadwayScores of csrc/headway_cpu.h."""

    _fields_ = [(name, c_void_p) for name in ("top", "total", "miss", "logp", "logsumexp", "entropy")]


class SlopesStruct(Structure):
    """HeadwaySlopes of csrc/headway_cpu.h."""

    _fields_ = [(name, c_void_p) for name in ("top", "alpha", "beta", "at_target")]


class ScanStruct(Structure):
    """HeadwayScan of csrc/headway_cpu.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("rewards", "segments", "values", "log_ratio", "mask", "bootstrap")),
        *((name, c_void_p) for name in ("advantage", "target")),
        ("num_segments", c_int64),
        *((name, c_double) for name in ("gamma", "lam", "rho_cap", "c_cap")),
        *((name, c_int32) for name in ("kind", "is_double")),
    ]


class PackPartStruct(Structure):
    """HeadwayPackPart of csrc/headway_cpu.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("source", "target", "scales")),
        *((name, c_int64) for name in ("rows", "columns", "source_stride", "target_stride", "scale_stride")),
        *((name, c_int32) for name in ("source_dtype", "target_dtype", "format", "reserved")),
    ]


def library() -> CDLL | None:
    """The loaded library, or None; the first call logs what was found."""
    return _load()[0]


def available() -> bool:
    """Whether ops with backend="cpu" can run here."""
    return library() is not None


def why_not() -> str:
    """Why the library is missing; "" where it is loaded."""
    return _load()[1]


def instruction_sets() -> list[str]:
    """The instruction sets that library and processor both have, best last; [] without the library."""
    lib = library()
    return [] if lib is None else lib.headway_cpu_isas().decode().split(",")


def force_instruction_set(name: str | None) -> None:
    """Restrict the library to one of `instruction_sets()` (tests, benchmarks); None lifts it.

    Raises:
        ValueError: the library is missing or does not have it.
    """
    lib = library()
    if lib is None or lib.headway_cpu_force_isa(None if name is None else name.encode()) != 0:
        raise ValueError(f"instruction set {name!r} is not available; got {instruction_sets()}")


@functools.cache
def _load() -> tuple[CDLL | None, str]:
    lib, reason = _find()
    if lib is None:
        logger.warning(
            "native CPU library not used: %s; the ops run on plain PyTorch, attention and sampling %s times slower",
            reason,
            SLOWDOWN,
        )
    else:
        logger.info("native CPU library: %s", lib.headway_cpu_isas().decode())
    return lib, reason


def _find() -> tuple[CDLL | None, str]:
    setting = os.environ.get("HEADWAY_NATIVE", "")
    if setting == "0":
        return None, "HEADWAY_NATIVE=0"
    explicit = setting not in ("", "1")
    paths = [Path(setting)] if explicit else [Path(folder) / FILE_NAME for folder in headway_kernels.__path__]
    for path in paths:
        if path.is_file():
            return _open(path)
    if explicit:
        return None, f"HEADWAY_NATIVE={setting} is not a file"
    places = ", ".join(str(path.parent) for path in paths)
    return None, f"{FILE_NAME} not found in {places} (install gcc and cmake, then reinstall headway)"


def _open(path: Path) -> tuple[CDLL | None, str]:
    try:
        lib = CDLL(str(path))
        lib.headway_cpu_abi.restype = c_int
        abi = lib.headway_cpu_abi()
    except (OSError, AttributeError) as error:
        return None, f"{path} does not load: {error} (reinstall headway)"
    if abi != ABI:
        return None, f"{path} has interface {abi}, expected {ABI}: a stale build (reinstall headway)"
    _declare(lib)
    return lib, ""


def _declare(lib: CDLL) -> None:
    plan, view = POINTER(PlanStruct), POINTER(ViewStruct)
    views = [view] * 4
    dims = [c_int64, c_int64, c_int64, c_float, c_int64]  # heads, kv heads, head_dim, scale, threads
    lib.headway_attention_forward.argtypes = [plan, *views, c_void_p, *dims]
    lib.headway_attention_forward.restype = c_int
    lib.headway_attention_backward.argtypes = [plan, *views, c_void_p, *views, *dims]
    lib.headway_attention_backward.restype = c_int
    lib.headway_sample_tokens.argtypes = [
        *(c_void_p, c_int64, c_int64, c_int64),  # logits, row stride, rows, vocabulary
        *([c_void_p] * 5),  # 1/temperature, seeds, positions, tokens, log-probs
        c_int64,
    ]
    lib.headway_sample_tokens.restype = c_int64
    _declare_delta(lib)
    _declare_ops(lib)
    lib.headway_cpu_isas.argtypes = []
    lib.headway_cpu_isas.restype = c_char_p
    lib.headway_cpu_force_isa.argtypes = [c_char_p]
    lib.headway_cpu_force_isa.restype = c_int
    lib.headway_cpu_has_threads.argtypes = []
    lib.headway_cpu_has_threads.restype = c_int


def _declare_delta(lib: CDLL) -> None:
    delta, address = POINTER(DeltaStruct), c_void_p
    lib.headway_delta_encode.argtypes = [
        *(address, address, c_int64),  # sources, their starts, their number
        *(c_int32, c_int32, address, c_int64, c_int),  # dtypes, old, elements, update
        *(address, address, address, c_int64),  # formats, offsets, payload, threads
    ]
    lib.headway_delta_encode.restype = c_int64
    lib.headway_delta_apply.argtypes = [delta, address, c_int64]
    lib.headway_delta_apply.restype = None
    lib.headway_delta_apply_slices.argtypes = [delta, *([address] * 5), c_int64]
    lib.headway_delta_apply_slices.restype = None
    lib.headway_delta_check.argtypes = [delta, POINTER(c_int64), POINTER(c_int64), c_int64]
    lib.headway_delta_check.restype = c_int64
    lib.headway_delta_merge.argtypes = [delta, delta, address, address, address, c_int64]
    lib.headway_delta_merge.restype = c_int64


def _declare_ops(lib: CDLL) -> None:
    head, rows = POINTER(HeadStruct), POINTER(RowsStruct)
    lib.headway_head_row_stride.argtypes = [c_int64]
    lib.headway_head_row_stride.restype = c_int64
    lib.headway_head_score.argtypes = [head, rows, c_void_p, POINTER(ScoresStruct), c_int64]
    lib.headway_head_score.restype = None
    lib.headway_head_gradient.argtypes = [
        *(head, rows, POINTER(SlopesStruct), c_void_p),  # ..., kept logits
        *(c_void_p, c_int64),  # live rows, their number
        *([c_void_p] * 3),  # gradients of x, weight, bias
        c_int64,
    ]
    lib.headway_head_gradient.restype = None
    lib.headway_segment_scan.argtypes = [POINTER(ScanStruct), c_int64]
    lib.headway_segment_scan.restype = c_int64
    lib.headway_pack_cast.argtypes = [POINTER(PackPartStruct), c_int64, c_int64]
    lib.headway_pack_cast.restype = None
