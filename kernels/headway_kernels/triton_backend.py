"""What the Triton back-end has, on CUDA GPUs of compute capability 8.0 and later; see registry.py and triton/.

In Triton's interpreter (TRITON_INTERPRET=1, for proofs) it runs on CPU tensors, if it is asked for by name.
"""

from __future__ import annotations

import importlib
import importlib.metadata

import torch

from headway_kernels.errors import BackendUnavailable
from headway_kernels.registry import Backend

# By op, the module of headway_kernels.triton that has its `lacks` and `triton_<op>`.
_MODULES = {
    "head_logp": "head_logp",
    "head_loss_step": "head_step",
    "head_masked": "head_masked",
    "policy_loss": "policy_loss",
    "segment_scan": "segment_scan",
}
_FIRST, _BEYOND = (3, 6), (3, 9)
_NEEDED = "triton>=3.6,<3.9"


def backends() -> list[Backend]:
    """One entry an op.

    Raises:
        BackendUnavailable: no triton of a supported version, or no GPU that it compiles for.
    """
    _check_version()
    interpreted = importlib.import_module("headway_kernels.triton.interpreted").is_interpreted()
    if not interpreted:
        _check_device()
    entries: list[Backend] = []
    for op, name in _MODULES.items():
        module = importlib.import_module(f"headway_kernels.triton.{name}")
        entries.append(Backend("triton", op, module.lacks, getattr(module, f"triton_{op}"), not interpreted))
    return entries


def _check_version() -> None:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        message = f"triton is not installed; it needs {_NEEDED}, which torch for CUDA brings"
        raise BackendUnavailable(message) from None
    found = tuple(int(part) for part in version.split(".")[:2])
    if not _FIRST <= found < _BEYOND:
        raise BackendUnavailable(f"triton {version} is not supported; it needs {_NEEDED}")


def _check_device() -> None:
    if not torch.cuda.is_available():
        raise BackendUnavailable("no CUDA GPU is visible to torch")
    if torch.version.hip is not None:
        raise BackendUnavailable("the kernels were never run on ROCm")
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        raise BackendUnavailable(
            f"the GPU has compute capability {capability[0]}.{capability[1]}; the kernels need 8.0"
        )
