"""What tests of vLLM share: whether it is here, prompts, and how near its log-probs come to float64."""

from __future__ import annotations

import importlib.util

import pytest

HERE = importlib.util.find_spec("vllm") is not None
NEEDS_VLLM = [
    pytest.mark.skipif(not HERE, reason="vllm is not installed here; `make test-vllm` runs these"),
    pytest.mark.filterwarnings("ignore"),  # its own and its dependencies'
]
PROMPT = [5, 9, 30, 7, 41, 12]
LONG_PROMPT = [3 + (7 * place) % 40 for place in range(40)]  # more than a block of the prefix cache
TOLERANCE = 1e-4
