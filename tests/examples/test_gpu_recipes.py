"""The ready GPU recipes: read as they stand, and dry-run for real with a tiny model of the same architecture."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from headway.config import RunConfig, load_recipe
from headway.model.builtin import ALPHABET, sort_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = ["gsm8k_qwen3.toml", "gsm8k_qwen3_8gpus.toml"]
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    config = Qwen3Config(
        vocab_size=len(ALPHABET), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=4096,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(str(folder))
    tokenizer = sort_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(str(folder))
    return folder


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("".join(json.dumps({"question": f"s{n}+{n}=", "answer": 2 * n}) + "\n" for n in range(5)))
    return path


def dry_run(recipe: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headway", "run", str(EXAMPLES / recipe), "--dry-run", *options],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_says_what_the_gpu_path_is(recipe: str) -> None:
    config = load_recipe(EXAMPLES / recipe, {})
    assert (config.generator.engine, config.learner.device, config.learner.dtype) == (
        "vllm",
        "cuda",
        "bfloat16",
    )
    assert (config.push.dtype, config.model.head_dtype, config.learner.attention) == (
        "bfloat16",
        "float32",
        "auto",
    )
    assert gpus(config) == ([] if recipe == RECIPES[0] else [0, 1, 2, 3, 4, 5, 6, 7])


def gpus(config: RunConfig) -> list[int]:
    return [gpu for gpu in (config.learner.gpu, *config.generator.gpus) if gpu >= 0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_dry_run_finds_everything_but_the_gpu(recipe: str, model: Path, problems: Path) -> None:
    """The one thing that this machine lacks is named; with the learner on the CPU nothing is left to name."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    given = [f"--model.path={model}", f"--env.args.path={problems}", "--sampling.max_new_tokens=64"]
    if importlib.util.find_spec("vllm") is None:
        done = dry_run(recipe, *given)
        assert done.returncode == 2
        assert "generator.engine = 'vllm' needs the package vllm" in done.stderr
        given += ["--generator.engine=torch", "--generator.vllm={}", "--generator.gpus=[]"]
    done = dry_run(recipe, *given)
    assert done.returncode == 2
    assert "learner.device = 'cuda'" in done.stderr
    assert "allowed here: 'cpu'" in done.stderr
    done = dry_run(recipe, *given, "--learner.device=cpu", "--learner.gpu=-1")
    assert done.returncode == 0, done.stderr
    assert "environment: table, 5 prompts" in done.stdout
    assert "learner: bfloat16 on cpu, attention 'sdpa'" in done.stdout
    assert "head: float32 on both sides" in done.stdout
