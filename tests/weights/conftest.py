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
from typing import Any

import pytest
import torch

from headway.types import Manifest, PolicyVersion, TensorSpec
from headway.weights import DoubledServed, FlatServed, Stager
from headway.weights.segment import shared_directory

WRITER, READER = Path(__file__).with_name("writer.py"), Path(__file__).with_name("reader.py")


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
    """Run writer.py, or another script of this folder; its standard input is what keeps it alive."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object, script: Path = WRITER) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
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


def load(path: Path) -> ModuleType:
    """A script of this folder as a module."""
    spec = importlib.util.spec_from_file_location(f"weights_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def writer() -> ModuleType:
    """writer.py as a module: the sizes it uses."""
    return load(WRITER)


@pytest.fixture(scope="session")
def chaos() -> Any:
    """ChaosChannel of chaos.py."""
    return load(Path(__file__).with_name("chaos.py")).ChaosChannel


class FlatEngine:
    """The least engine there is: a flat buffer and the version in force."""

    def __init__(self, num_elements: int) -> None:
        self.flat = torch.zeros(num_elements)
        self.version: PolicyVersion | None = None
        self.pauses = 0

    def apply(self, copy: Callable[[torch.Tensor], PolicyVersion]) -> None:
        self.version = copy(self.flat)
        self.pauses += 1

    def swap(self, flat: torch.Tensor, version: PolicyVersion) -> None:
        self.flat, self.version = flat, version
        self.pauses += 1


class Generator:
    """An engine behind a stager, turned by hand."""

    def __init__(
        self, receiver: Any, manifest: Manifest, *, swap: bool = False, doubled: bool = False
    ) -> None:
        self.engine = FlatEngine(manifest.num_elements)
        served = (DoubledServed if doubled else FlatServed)(self.engine, manifest)
        self.stager = Stager(receiver, served, manifest, swap=swap)
        self.acked: list[Any] = []

    def turn(self, most: int = 100) -> None:
        """Until the stager has nothing to do."""
        for _ in range(most):
            if not self.stager.turn():
                return
        raise AssertionError(f"the stager does not come to rest: {self.stager.last_failure}")

    def refresh(self) -> bool:
        """What happens between two decode steps, and the proof after it."""
        self.turn()
        self.stager.relieve()
        if self.stager.staged() is None or self.stager.commit() is None:
            return False
        self.turn()
        self.acked += self.stager.proofs()
        return True


@pytest.fixture
def generator() -> Callable[..., Generator]:
    return Generator
