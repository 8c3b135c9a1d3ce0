"""The CUDA library: found once, loaded with ctypes, its interface number checked; and where a call runs.

Comes in: libheadway_kernels_cuda.so beside the package, or the file that HEADWAY_CUDA names. Goes out: a Library with
typed functions, or BackendUnavailable with the reason. HEADWAY_CUDA=0 leaves the library out.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from ctypes import CDLL, POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

import headway_kernels
from headway_kernels.errors import BackendUnavailable, HeadwayError, ShapeError

ABI = 1  # HEADWAY_CUDA_ABI in csrc/cuda/headway_cuda.h
FILE_NAME = "libheadway_kernels_cuda.so"


class KernelFault(HeadwayError, RuntimeError):
    """A kernel could not be launched, or the emulator found a fault in it."""


class PolicyOptions(Structure):
    """HeadwayPolicyOptions of csrc/cuda/headway_cuda.h."""

    _fields_ = [
        *((name, c_int32) for name in ("family", "correction", "kl", "ratio_level", "rho_level")),
        *(
            (name, c_float)
            for name in (
                "clip_lower",
                "clip_upper",
                "dual_clip",
                "cap",
                "correction_cap",
                "correction_floor",
                "gate_positive",
                "gate_negative",
                "tv_bound",
                "kl_coef",
                "entropy_coef",
            )
        ),
    ]


class PackPart(Structure):
    """HeadwayPackPart of csrc/cuda/headway_cuda.h; the last two fields are filled by Library.pack_tiles."""

    _fields_ = [
        *((name, c_void_p) for name in ("source", "target", "scales")),
        *((name, c_int64) for name in ("rows", "columns", "source_stride", "target_stride", "scale_stride")),
        *((name, c_int32) for name in ("source_dtype", "target_dtype", "format", "reserved")),
        ("groups_per_row", c_int64),
        ("reciprocal", c_double),
    ]


_P, _I, _N, _F = c_void_p, c_int, c_int64, c_float
_PLACE = (_I, _P)  # device, stream
SIGNATURES: dict[str, tuple[type, tuple[type, ...]]] = {
    "abi": (c_int, ()),
    "is_emulated": (c_int, ()),
    "num_devices": (c_int, ()),
    "message": (c_char_p, (_I,)),
    "delta_compare": (c_int, (_P, _P, _N, _I, _P, _I, _N, _I, _N, _N, _P, _P, *_PLACE)),
    "delta_layout": (c_int, (_P, _N, _I, _P, _P, _P, *_PLACE)),
    "delta_encode": (c_int, (_P, _I, _N, _P, _P, _P, _N, _N, _P, *_PLACE)),
    "delta_apply": (c_int, (_P, _P, _P, _I, _N, _N, _N, _P, *_PLACE)),
    "delta_apply_slices": (c_int, (_P, _P, _P, _I, _N, _P, _P, _P, _P, _P, _P, _N, _N, *_PLACE)),
    "segment_scan": (c_int, (_I, _P, _P, _P, _P, _P, _P, _N, _F, _F, _F, _F, _P, _P, *_PLACE)),
    "pack_tiles": (c_int64, (POINTER(PackPart),)),
    "pack_cast": (c_int, (_P, _P, _N, _N, _N, *_PLACE)),
    "policy_rows": (c_int64, (POINTER(PolicyOptions), _N, _N)),
    "policy_columns": (c_int, ()),
    "policy_loss": (c_int, (POINTER(PolicyOptions), *([_P] * 9), _N, _N, _P, _P, _P, *_PLACE)),
}


class Library:
    """The loaded library.

    Args:
        path: of the shared object.

    Attributes:
        is_emulated: the kernels run on the CPU and take CPU tensors.

    Raises:
        BackendUnavailable: it does not load, has another interface, or finds no device.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._lib = CDLL(str(path))
            for name, (result, arguments) in SIGNATURES.items():
                function = getattr(self._lib, f"headway_cuda_{name}")
                function.restype, function.argtypes = result, list(arguments)
        except (OSError, AttributeError) as error:
            raise BackendUnavailable(
                f"{path} does not load: {error}; rebuild it: python -m headway_kernels.cuda.build"
            ) from error
        abi = self._lib.headway_cuda_abi()
        if abi != ABI:
            raise BackendUnavailable(
                f"{path} has interface {abi}, expected {ABI}: a stale build; rebuild it: "
                "python -m headway_kernels.cuda.build"
            )
        self.path = path
        self.is_emulated = bool(self._lib.headway_cuda_is_emulated())
        devices = self._lib.headway_cuda_num_devices()
        if devices <= 0:
            raise BackendUnavailable(f"{path.name} finds no GPU: {self.message(-devices)}")

    def message(self, code: int) -> str:
        """What a return code means."""
        return self._lib.headway_cuda_message(code).decode() if code else "no device"

    def policy_rows(self, options: PolicyOptions, num_tokens: int, num_segments: int) -> int:
        """Rows of the partials of policy_loss."""
        return self._lib.headway_cuda_policy_rows(options, num_tokens, num_segments)

    def pack_tiles(self, part: PackPart) -> int:
        """Completes a part and returns its number of tiles."""
        return self._lib.headway_cuda_pack_tiles(part)

    def policy_columns(self) -> int:
        """Columns of the partials and results of policy_loss."""
        return self._lib.headway_cuda_policy_columns()

    def call(self, name: str, device: torch.device, *arguments: object) -> None:
        """Enqueues an op on the current stream of a tensor's device; tensors pass as their pointers, None as null.

        Raises:
            KernelFault: the launch failed.
        """
        raw = [item.data_ptr() if isinstance(item, Tensor) else item for item in arguments]
        index, stream = 0, None
        if not self.is_emulated:
            index = device.index  # a tensor's device always has one
            stream = torch.cuda.current_stream(index).cuda_stream
        code = getattr(self._lib, f"headway_cuda_{name}")(*raw, index, stream)
        if code:
            raise KernelFault(f"{name} on {device}: {self.message(code)} (code {code})")

    def lacks(self, tensors: Sequence[Tensor]) -> str | None:
        """Why the library cannot reach these tensors; None if it can."""
        expected = "cpu" if self.is_emulated else "cuda"
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            return f"its tensors are on several devices: {', '.join(sorted(map(str, devices)))}"
        if any(device.type != expected for device in devices):
            kind = (
                "emulated CUDA kernels take CPU tensors"
                if self.is_emulated
                else "CUDA kernels take CUDA tensors"
            )
            return f"{kind}; got {', '.join(map(str, devices))}"
        return None


@functools.cache
def library() -> Library:
    """The library, loaded once.

    Raises:
        BackendUnavailable: it is not built, not wanted, does not load, or finds no device.
    """
    setting = os.environ.get("HEADWAY_CUDA", "")
    if setting == "0":
        raise BackendUnavailable("HEADWAY_CUDA=0 leaves the CUDA library out")
    explicit = setting not in ("", "1")
    paths = [Path(setting)] if explicit else [Path(folder) / FILE_NAME for folder in headway_kernels.__path__]
    for path in paths:
        if path.is_file():
            return Library(path)
    if explicit:
        raise BackendUnavailable(f"HEADWAY_CUDA={setting} is not a file")
    raise BackendUnavailable(
        f"{FILE_NAME} is not built: reinstall headway on a machine with a GPU and nvcc, or run "
        "python -m headway_kernels.cuda.build in a checkout"
    )


def require(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], lib: Library) -> None:
    """Refuses a tensor that the kernels cannot read: dtype, layout or device.

    Raises:
        ShapeError: names the tensor.
    """
    place = "cpu" if lib.is_emulated else "cuda"
    if tensor.dtype not in dtypes or tensor.device.type != place or not tensor.is_contiguous():
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise ShapeError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, contiguous: "
            f"{tensor.is_contiguous()}; expected contiguous {wanted} on {place}"
        )
