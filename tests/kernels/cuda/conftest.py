"""Tests marked cuda_emulated need the emulated library and AddressSanitizer: run them by `make test-cuda-emulated`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway_kernels import registry
from headway_kernels.cuda.library import library

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _emulated(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails, rather than skips, where the kernels would not be the emulated ones under the sanitizer."""
    if request.node.get_closest_marker("cuda_emulated") is None:
        yield
        return
    if "libasan" not in os.environ.get("LD_PRELOAD", "") or not library().is_emulated:
        pytest.fail("these tests need the emulated CUDA kernels: run them by `make test-cuda-emulated`")
    registry.reset()
    yield
    registry.reset()


@pytest.fixture(params=["0", "1"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The order in which threads and blocks run: as numbered, and shuffled."""
    monkeypatch.setenv("HEADWAY_EMULATOR_SEED", request.param)
    return request.param
