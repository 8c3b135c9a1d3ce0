"""Finding the CUDA library: what is said where there is none, or another one than expected."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headway_kernels import registry
from headway_kernels.cuda.library import ABI, SIGNATURES, Library, library
from headway_kernels.errors import BackendUnavailable
from headway_kernels.objective import Objective
from headway_kernels.policy_loss import policy_loss

HEADER = Path(__file__).resolve().parents[3] / "kernels" / "csrc" / "cuda" / "headway_cuda.h"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    for forget in (library.cache_clear, registry.reset):
        forget()
    yield
    for forget in (library.cache_clear, registry.reset):
        forget()


def compiled(folder: Path, **returns: str) -> Path:
    """A library whose functions return 1, or what is given."""
    bodies = dict.fromkeys(SIGNATURES, "1") | returns
    source = folder / "fake.c"
    functions = [
        f'const char* headway_cuda_{name}(int code) {{ return "a reason"; }}'
        if name == "message"
        else f"long headway_cuda_{name}(void) {{ return {body}; }}"
        for name, body in bodies.items()
        if body
    ]
    source.write_text("\n".join(functions), encoding="utf-8")
    path = folder / "libfake.so"
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(path)], check=True, timeout=60)
    return path


def test_the_header_declares_what_python_calls_under_the_same_number() -> None:
    header = HEADER.read_text(encoding="utf-8")
    assert re.findall(r"#define HEADWAY_CUDA_ABI (\d+)", header) == [str(ABI)]
    declared = re.findall(r"HEADWAY_CUDA_EXPORT [\w *]+?headway_cuda_(\w+)\(([^;]*)\);", header)
    assert {name for name, _ in declared} == set(SIGNATURES)
    for name, arguments in declared:
        count = 0 if arguments.strip() in ("", "void") else arguments.count(",") + 1
        assert count == len(SIGNATURES[name][1]), name


def test_a_call_that_names_cuda_says_why_it_cannot_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADWAY_CUDA", str(tmp_path / "missing.so"))
    zeros = torch.zeros(2)
    with pytest.raises(BackendUnavailable, match=r"policy_loss: backend 'cuda' .*missing\.so is not a file"):
        policy_loss(zeros, zeros, zeros, zeros, objective=Objective(), segments=None, backend="cuda")
    out = policy_loss(zeros, zeros, zeros, zeros, objective=Objective(), segments=None)  # auto takes another
    assert out.coefficient.tolist() == [0, 0]


def test_it_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_CUDA", "0")
    with pytest.raises(BackendUnavailable, match="HEADWAY_CUDA=0"):
        library()


def test_where_none_was_built_the_message_says_how_to_build_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HEADWAY_CUDA", raising=False)
    monkeypatch.setattr("headway_kernels.__path__", [str(tmp_path)])
    with pytest.raises(BackendUnavailable, match=r"python -m headway_kernels\.cuda\.build"):
        library()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc to make a library")
@pytest.mark.parametrize(
    ("returns", "message"),
    [
        ({"abi": "77"}, "interface 77, expected"),
        ({"pack_cast": ""}, "does not load: .*headway_cuda_pack_cast"),
        ({"num_devices": "-100"}, "finds no GPU: a reason"),
    ],
)
def test_another_library_is_refused_with_its_reason(
    tmp_path: Path, returns: dict[str, str], message: str
) -> None:
    with pytest.raises(BackendUnavailable, match=message):
        Library(compiled(tmp_path, **returns))


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "libbroken.so"
    path.write_bytes(b"no library")
    with pytest.raises(BackendUnavailable, match=r"libbroken\.so does not load"):
        Library(path)
