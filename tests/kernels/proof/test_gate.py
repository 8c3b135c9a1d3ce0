"""The resource gate fails on planted faults, its page is compared, and what it leaves out it says.

Marked slow: what compiles; `make gate` runs them all.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headway_kernels.proof import cubin, gate, page
from headway_kernels.proof.bounds import ARCHITECTURES, Bound, occupancy
from headway_kernels.proof.cubin import Usage
from headway_kernels.proof.page import Row

ROOT = Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
SOUND = Usage(
    name="k", registers=64, threads=256, stack_bytes=0, shared_bytes=4096, spills=0, atomics=0, matrix=8,
    instructions=99,
)  # fmt: skip
BOUND = Bound(registers=64, shared_kib=4, matrix=True)


def usage(**changes: int) -> Usage:
    fields = {name: getattr(SOUND, name) for name in Usage.__slots__}
    return Usage(**(fields | changes))


def row(**changes: Any) -> Row:
    fields: dict[str, Any] = {
        "op": "op", "backend": "triton", "label": "bf16", "kernel": "k", "architecture": 90, "usage": SOUND,
        "bound": BOUND,
    }  # fmt: skip
    return Row(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"spills": 1}, ["1 local loads and stores"]),
        ({"stack_bytes": 8}, ["8 bytes of stack"]),
        ({"registers": 65}, ["65 registers; allowed: 64"]),
        ({"shared_bytes": 4097}, ["4097 bytes of shared memory; allowed: 4096"]),
        ({"atomics": 2}, ["2 atomic instructions"]),
        ({"matrix": 0}, ["no tensor-core instruction"]),
        ({"registers": 65, "atomics": 1}, ["65 registers", "1 atomic"]),
    ],
)
def test_each_bound_is_held(changes: dict[str, int], found: list[str]) -> None:
    broken = BOUND.broken(usage(**changes), 90)
    assert len(broken) == len(found)
    assert all(part in text for part, text in zip(found, broken, strict=True))


def test_shared_memory_is_bounded_by_the_architecture_too() -> None:
    wide = Bound(registers=255, shared_kib=400)
    assert not wide.broken(usage(shared_bytes=227 * 1024), 90)
    assert wide.broken(usage(shared_bytes=227 * 1024 + 1), 90)
    assert wide.broken(usage(shared_bytes=164 * 1024), 80)


# By hand from the limits: 64 warps, 65,536 registers in units of 256 a warp, 228 KiB less 1 KiB a block.
@pytest.mark.parametrize(
    ("registers", "threads", "shared", "expected"),
    [
        (32, 256, 0, 1.0),
        (64, 256, 0, 0.5),
        (65, 256, 0, 3 * 8 / 64),
        (255, 256, 0, 8 / 64),
        (168, 256, 0, 8 / 64),
        (32, 256, 100 * 1024, 2 * 8 / 64),
        (16, 32, 0, 0.5),
    ],
)
def test_occupancy(registers: int, threads: int, shared: int, expected: float) -> None:
    assert occupancy(usage(registers=registers, threads=threads, shared_bytes=shared), 90) == expected


TRITON = {"triton": "triton 3.7.1"}
EMPTY = f"before\n{page.BEGIN}\n{page.END}\nafter\n"


def test_a_written_page_is_up_to_date_and_keeps_its_prose() -> None:
    rows = [row(architecture=value) for value in ARCHITECTURES]
    written = page.replaced(EMPTY, page.table(rows, TRITON))
    assert written.startswith("before\n")
    assert written.endswith("after\n")
    assert "| op | triton: bf16 | `k` | 64 / 4.0 / 50% | 64 / 4.0 / 50% | 64 / 4.0 / 50% |" in written
    assert page.differences(written, rows, TRITON) == []
    assert page.replaced(written, page.table(rows, TRITON)) == written


def test_a_page_that_is_not_up_to_date_is_found() -> None:
    written = page.replaced(EMPTY, page.table([row(), row(kernel="gone")], TRITON))
    found = page.differences(written, [row(usage=usage(registers=48)), row(kernel="new")], TRITON)
    assert [text.split(";")[0] for text in found] == [
        "the page has other counts of op, triton: bf16, `k`: ['', '64 / 4.0 / 50%', ''], now "
        "['', '48 / 4.0 / 62%', '']",
        "the page lacks op, triton: bf16, `new`",
        "the page lists op, triton: bf16, `gone`, which is gone",
    ]
    assert all("make gate-table" in text for text in found)


def test_counts_of_another_compiler_are_not_compared_its_kernels_are() -> None:
    written = page.replaced(EMPTY, page.table([row()], TRITON))
    changed = [row(usage=usage(registers=48)), row(kernel="new")]
    (found,) = page.differences(written, changed, {"triton": "triton 3.6.0"})
    assert "`new`" in found


def test_a_back_end_that_is_left_out_is_not_called_gone() -> None:
    both = {**TRITON, "cuda": "nvcc 13.0.88"}
    written = page.replaced(EMPTY, page.table([row(), row(backend="cuda", label="")], both))
    assert page.differences(written, [row()], TRITON) == []


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(page.UnmarkedPage, match="gate-table"):
        page.differences("no marks", [row()], TRITON)


def test_names_are_read_out_of_symbols() -> None:
    assert cubin.short_name("_ZN7headway4scanILi2EEEvNS_5ScanTE") == "scan<2>"
    assert cubin.short_name("_Z6encodeItEvPT_") == "encode<uint16>"
    assert cubin.short_name("loss_rows") == "loss_rows"


def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))


def test_what_is_left_out_is_said_with_its_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_triton(monkeypatch)
    assert gate.main(["--check", str(ROOT / "docs/kernels.md")]) == 0
    lines = page.listed((ROOT / "docs/kernels.md").read_text(encoding="utf-8"))
    out = capsys.readouterr().out
    for backend in ("triton", "cuda"):
        count = 3 * sum(key[1].startswith(backend) for key in lines)
        assert count > 0
        assert f"SKIPPED {backend}" in out
        assert f"0 of {count} listed compilations" in out


def test_the_page_is_not_written_with_a_part_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without_triton(monkeypatch)
    path = tmp_path / "page.md"
    path.write_text(EMPTY, encoding="utf-8")
    assert gate.main(["--write", str(path)]) == 1
    assert "the page stays" in capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == EMPTY


def test_a_cubin_of_another_name_and_a_kernel_without_a_bound_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(gate.UnknownCubin, match=r"OP\.sm_NN"):
        gate.cuda_rows([tmp_path / "scan.cubin"])
    monkeypatch.setattr(gate, "read_cubin", lambda path: [usage(name="unbounded") for _ in [path]])
    with pytest.raises(gate.UnknownCubin, match="unbounded has no bound"):
        gate.cuda_rows([tmp_path / "scan.sm_90.cubin"])


def test_without_a_disassembler_nothing_is_called_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    without_triton(monkeypatch)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(cubin.NoDisassembler, match="triton-proof"):
        cubin.read_bytes(b"")


@needs_triton
def test_a_file_that_is_no_cubin_is_unreadable() -> None:
    with pytest.raises(cubin.UnreadableCubin):
        cubin.read_bytes(b"no cubin")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Usage]]:
    """Compiles a launch of a kernel of faulty.py for sm_90, and measures it."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import faulty

    from headway_kernels.proof.capture import capture

    def measure(name: str, *arguments: Any, **options: Any) -> Usage:
        with capture(90) as found:
            getattr(faulty, name)[(1,)](*arguments, **options)
        (only,) = found
        assert only.name == name
        return only.usage

    yield measure
    sys.modules.pop("faulty", None)


ROOMY = Bound(registers=255, shared_kib=64)


@pytest.mark.slow
def test_a_sound_kernel_passes_and_a_bound_below_it_fails(compiled: Callable[..., Usage]) -> None:
    found = compiled("sound", torch.zeros(1024), torch.zeros(1), N=1024, num_warps=4)
    assert not ROOMY.broken(found, 90)
    assert found.threads == 128
    assert Bound(registers=found.registers - 1, shared_kib=64).broken(found, 90)


@pytest.mark.slow
def test_a_kernel_that_spills_is_found(compiled: Callable[..., Usage]) -> None:
    x = torch.zeros(65536)
    found = compiled("holds_too_much", x, x, ROUNDS=2, N=65536, num_warps=4)
    assert found.spills > 0
    assert "local loads and stores" in ROOMY.broken(found, 90)[0]


@pytest.mark.slow
def test_a_kernel_that_adds_atomically_is_found(compiled: Callable[..., Usage]) -> None:
    found = compiled("adds_atomically", torch.zeros(1024), torch.zeros(1), N=1024, num_warps=4)
    assert "atomic" in ROOMY.broken(found, 90)[0]
    assert not Bound(registers=255, shared_kib=64, atomics=True).broken(found, 90)


@pytest.mark.slow
def test_a_product_without_tensor_cores_is_found(compiled: Callable[..., Usage]) -> None:
    wants = Bound(registers=255, shared_kib=64, matrix=True)
    half = compiled("multiplies", torch.zeros(32, 32).half(), torch.zeros(32, 32), N=32)
    assert half.matrix > 0
    assert not wants.broken(half, 90)
    single = compiled("multiplies", torch.zeros(32, 32), torch.zeros(32, 32), N=32)
    assert "tensor-core" in wants.broken(single, 90)[0]


@needs_triton
def test_every_kernel_is_in_the_catalog() -> None:
    """A kernel that no call of the catalog launches would pass the gate unseen; the gate fails on a missing bound."""
    import triton

    from headway_kernels.triton import catalog

    if triton.knobs.runtime.interpret:
        pytest.skip("decorated for the interpreter")
    kernels: set[str] = set()
    for path in (ROOT / "kernels/headway_kernels/triton").glob("*.py"):
        if path.stem in ("__init__", "catalog"):
            continue
        module = importlib.import_module(f"headway_kernels.triton.{path.stem}")
        kernels |= {
            name
            for name, value in vars(module).items()
            if isinstance(value, triton.JITFunction) and f"    {name}[(" in path.read_text(encoding="utf-8")
        }
    assert kernels == set(catalog.BOUNDS)
    lines = page.listed((ROOT / "docs/kernels.md").read_text(encoding="utf-8"))
    assert {key[2].strip("`") for key in lines if key[1].startswith("triton")} == kernels


@pytest.mark.slow
def test_kernels_are_not_compiled_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    from headway_kernels.proof.capture import capture

    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    with pytest.raises(RuntimeError, match="process of its own"), capture(90):
        pass
