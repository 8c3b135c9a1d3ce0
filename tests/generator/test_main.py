"""The generator as a process: what its end says to who started it."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable

import pytest

from headway.config import RunConfig, create_run
from headway.errors import EXIT_USER_ERROR
from headway.launch.program import HEADWAY, generator_command


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed here")
def test_what_is_not_installed_is_not_tried_again(tiny_config: Callable[..., RunConfig]) -> None:
    folder = create_run(tiny_config(generator={"engine": "vllm"}))
    command = generator_command(HEADWAY, folder.path, "tcp://127.0.0.1:9,tcp://127.0.0.1:9", 0)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == EXIT_USER_ERROR
    assert "generator.engine = 'vllm' needs the package vllm" in ended.stderr + ended.stdout
