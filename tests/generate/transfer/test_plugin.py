"""The plugin in a vLLM's process, and where a vLLM learns of a learner; vLLM itself is not needed."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.errors import ConfigError, UnsupportedOption
from headway.generate.vllm import transfer


@pytest.mark.parametrize("version", ["0.27.9", "0.34.0", "1.0.0.dev3", "unknown"])
def test_another_vllm_is_left_alone(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        transfer.importlib, "import_module", lambda name: SimpleNamespace(__version__=version)
    )
    with caplog.at_level(logging.INFO):
        transfer.register()
    assert f"vllm {version} is not supported" in caplog.text


def test_a_vllm_that_cannot_be_looked_at_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        transfer.importlib, "import_module", lambda name: SimpleNamespace(__version__="0.30.0")
    )
    transfer.register()
    assert "is not registered" in caplog.text


def test_every_vllm_of_this_environment_finds_the_plugin() -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="headway")
    assert entry.load() is transfer.register


def test_a_vllm_that_does_not_use_it_pays_little() -> None:
    heavy = "[name for name in ('torch', 'transformers', 'pydantic', 'vllm') if name in sys.modules]"
    code = f"import sys, headway.generate.vllm.transfer; print({heavy})"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("text", ["", "7", "0.x", "-1.0", "0.1.2", "latest"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedOption, match=r"allowed: 'newest', or EPOCH\.STEP"):
        transfer.parse_version(text)


def test_a_run_that_publishes_nothing_yet_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "abc"}))
    (tmp_path / "config.toml").write_text('[model]\npath = "builtin:sort5"\n[env]\nname = "sort"\n')
    with pytest.raises(ConfigError, match=r"weights\.json: the run's learner publishes no weights yet"):
        transfer.init_info_of_run(tmp_path)
    (tmp_path / "weights.json").write_text('{"address": "tcp:x", "manifest_digest": "d", "dtype": "float32"}')
    assert transfer.init_info_of_run(tmp_path, keys="k") == {
        "address": "tcp:x", "manifest_digest": "d", "dtype": "float32", "run_id": "abc", "keys": "k",
    }  # fmt: skip
