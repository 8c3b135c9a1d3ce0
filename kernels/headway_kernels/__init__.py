"""The kernels of headway: attention, sampling, the head with its loss, each with a plain PyTorch reference.

Import the op's module: headway_kernels.attention, .sampling, .head, .head_masked, .policy_loss, .segment_scan,
.weight_delta, ... registry.py says how back-ends are chosen, tracing.py how ops meet torch.compile. This package itself
imports no torch.
"""

from __future__ import annotations

import importlib
import importlib.util

# Written by CMake. Importing it lets an editable install notice a stale native library and rebuild it.
if importlib.util.find_spec("headway_kernels._build_info") is not None:
    importlib.import_module("headway_kernels._build_info")
