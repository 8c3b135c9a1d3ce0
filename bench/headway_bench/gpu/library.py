"""The CUDA library for the GPU of this run: found, or built where nvcc is there; and the build's time."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import torch

from headway_bench.gpu.context import Context
from headway_kernels.cuda import build
from headway_kernels.cuda.library import library
from headway_kernels.errors import BackendUnavailable


def make(context: Context) -> None:
    """Builds the library into a temporary folder where none is found; notes why it cannot."""
    try:
        print(f"  {library().path}", flush=True)
    except BackendUnavailable as error:
        missing = str(error)
    else:
        return
    if not context.is_cuda or "HEADWAY_CUDA" in os.environ or shutil.which("nvcc") is None:
        context.report.note(f"NO CUDA LIBRARY: its ops are not run: {missing}")
        return
    major, minor = torch.cuda.get_device_capability(context.device)
    began = time.monotonic()
    with context.noting("building the CUDA library"):
        out = Path(tempfile.mkdtemp(prefix="headway-cuda-")) / build.FILE_NAME
        built = build.build(out, [10 * major + minor], limit_s=context.remaining_s())
        os.environ["HEADWAY_CUDA"] = str(built)  # this process's, and the sanitizer's after it
        print(
            f"  {library().path}: built for sm_{major}{minor} in {time.monotonic() - began:.0f} s", flush=True
        )
