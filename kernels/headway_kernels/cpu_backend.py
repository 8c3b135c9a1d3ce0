"""What the native CPU library has; see registry.py."""

from __future__ import annotations

from headway_kernels import native
from headway_kernels.errors import BackendUnavailable
from headway_kernels.head_native import native_head_logp, native_head_loss_step, supports_head
from headway_kernels.registry import Backend
from headway_kernels.segment_scan_native import native_segment_scan, supports_scan


def backends() -> list[Backend]:
    """One entry an op.

    Raises:
        BackendUnavailable: the library was not built, or does not load.
    """
    if not native.available():
        raise BackendUnavailable(native.why_not())
    return [
        Backend("cpu", "head_logp", supports_head, native_head_logp),
        Backend("cpu", "head_loss_step", supports_head, native_head_loss_step),
        Backend("cpu", "segment_scan", supports_scan, native_segment_scan),
    ]
