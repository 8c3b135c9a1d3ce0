"""Manifests of a given size, names of segments, and publishers in processes of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from headway.types import Manifest, TensorSpec
from headway.weights.segment import shared_directory

WRITER = Path(__file__).with_name("writer.py")


@pytest.fixture
def manifest_of() -> Callable[..., Manifest]:
    """Two tensors: three quarters of the elements, and the rest."""

    def make(num_elements: int = 4096, dtype: str = "float32", name: str = "a") -> Manifest:
        first = 3 * num_elements // 4
        tensors = [
            TensorSpec(name, [], [first], 0, first, True),
            TensorSpec("b", [], [num_elements - first], first, num_elements - first, False),
        ]
        return Manifest(dtype, tensors, num_elements, first, {})

    return make


@pytest.fixture
def name() -> Iterator[str]:
    """Of a segment; removed afterwards whoever owned it."""
    chosen = f"headway-test-{uuid.uuid4().hex[:12]}-{os.getpid()}"
    yield chosen
    (shared_directory() / chosen).unlink(missing_ok=True)


@pytest.fixture
def start_writer() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Run writer.py; its standard input is what keeps it alive."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, str(WRITER), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(scope="session")
def writer() -> ModuleType:
    """writer.py as a module: the sizes it uses."""
    spec = importlib.util.spec_from_file_location("weights_writer", WRITER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
