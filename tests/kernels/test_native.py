"""native: found, checked, left out on request, and named when it is missing."""

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import headway_kernels
from headway_kernels import native

needs_native = pytest.mark.skipif(not native.available(), reason="no native library was built")
CSRC = Path(__file__).parents[2] / "kernels" / "csrc"

PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(name)s %(message)s")
import torch
from headway_kernels import native
from headway_kernels.attention import AttentionPlan, run_attention
from headway_kernels.sampling import sample_tokens
plan = AttentionPlan.build([(0, 3, 0, 0, [])], num_queries=3, num_keys=3)
key = torch.arange(24.0).reshape(3, 1, 8) / 24
out = run_attention(key.requires_grad_(), key, key, plan, scale=1.0)
out.sum().backward()
tokens, _ = sample_tokens(key[:, 0].detach(), torch.ones(3), torch.arange(3), torch.arange(3))
print(native.available(), repr(native.why_not()), round(float(out.sum()), 4), round(float(key.grad.sum()), 3))
print(tokens.tolist())
"""


def run_program(native_setting):
    paths = [str(Path(folder).parent) for folder in headway_kernels.__path__]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{PROGRAM}"],
        env={"HEADWAY_NATIVE": native_setting, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return done.stdout.splitlines()


def compile_stub(folder, source):
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    (folder / "stub.cpp").write_text(source)
    library = folder / "stub.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", str(folder / "stub.cpp"), "-o", str(library)], check=True, timeout=60
    )
    return library


@needs_native
def test_the_library_is_loaded_once_and_speaks_this_interface():
    lib = native.library()
    assert lib is native.library()
    assert lib.headway_cpu_abi() == native.ABI
    assert native.why_not() == ""


def test_one_interface_number_is_written_in_all_places():
    header = (CSRC / "headway_cpu.h").read_text()
    cmake = (CSRC.parents[1] / "CMakeLists.txt").read_text()
    assert f"#define HEADWAY_CPU_ABI {native.ABI}\n" in header
    assert f"set(HEADWAY_CPU_ABI {native.ABI})" in cmake


@needs_native
def test_instruction_sets_are_forced_by_name():
    assert native.instruction_sets()[0] == "portable"
    native.force_instruction_set("portable")
    native.force_instruction_set(None)
    with pytest.raises(ValueError, match="'mmx' is not available"):
        native.force_instruction_set("mmx")


def test_the_fallback_computes_the_same_and_says_once_why():
    lines = run_program("0")
    warnings = [line for line in lines if line.startswith("WARNING headway.kernels")]
    assert len(warnings) == 1
    assert "HEADWAY_NATIVE=0" in warnings[0]
    assert "times slower" in warnings[0]
    assert lines[-2].startswith("False 'HEADWAY_NATIVE=0'")
    if native.available():
        with_library = run_program("1")
        assert with_library[-2].startswith("True ''")
        assert with_library[-2].split()[2:] == lines[-2].split()[2:]
        assert with_library[-1] == lines[-1]


def test_a_stale_library_is_refused_with_both_numbers(tmp_path, monkeypatch):
    stub = compile_stub(tmp_path, 'extern "C" int headway_cpu_abi(void) { return 77; }')
    monkeypatch.setenv("HEADWAY_NATIVE", str(stub))
    lib, reason = native._find()
    assert lib is None
    assert f"{stub} has interface 77, expected {native.ABI}" in reason
    assert "reinstall" in reason


def test_a_library_of_somebody_else_is_refused(tmp_path, monkeypatch):
    stub = compile_stub(tmp_path, "int unrelated = 1;")
    monkeypatch.setenv("HEADWAY_NATIVE", str(stub))
    assert "does not load" in native._find()[1]
    (tmp_path / "text.so").write_text("not a library")
    monkeypatch.setenv("HEADWAY_NATIVE", str(tmp_path / "text.so"))
    assert "does not load" in native._find()[1]


def test_a_missing_library_names_the_places_and_the_remedy(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("HEADWAY_NATIVE", raising=False)
    monkeypatch.setattr(headway_kernels, "__path__", [str(tmp_path)])
    native._load.cache_clear()
    try:
        with caplog.at_level(logging.INFO, logger="headway.kernels"):
            assert not native.available()
            assert native.library() is None
            assert native.instruction_sets() == []
        assert str(tmp_path) in native.why_not()
        assert "install gcc" in native.why_not()
        assert len(caplog.records) == 1
    finally:
        native._load.cache_clear()
    monkeypatch.setenv("HEADWAY_NATIVE", str(tmp_path / "gone.so"))
    assert native._find() == (None, f"HEADWAY_NATIVE={tmp_path / 'gone.so'} is not a file")
