"""No key is accepted and ignored: each changes the effective config and is read somewhere in the engine."""

import re
import typing
from pathlib import Path
from typing import Any

import pytest

from headway.config import paths
from headway.config.checks import value_of
from headway.config.loading import validate

ENGINE = Path(__file__).parents[2] / "engine" / "headway"
BASE: dict[str, Any] = {"model": {"path": "builtin:sort"}, "env": {"name": "sort"}}

# What must be given beside a key for its other value to be possible.
COMPANIONS: dict[str, dict[str, Any]] = {
    "learner.gpu": {"learner.device": "cuda"},
    "generator.gpus": {"generator.engine": "vllm"},
    "model.lora.alpha": {"model.lora.rank": 4},
    "model.lora.targets": {"model.lora.rank": 4},
    "model.head_dtype": {"push.dtype": "bfloat16"},
    "learner.dtype": {"push.dtype": "bfloat16"},
    "model.reference": {"algo.kl": "k3", "algo.kl_coef": 0.1},
    "algo.kl": {"algo.kl_coef": 0.1},
    "algo.kl_coef": {"algo.kl": "k3"},
    "algo.correction_cap": {"algo.objective": "grpo", "algo.correction": "tis"},
    "algo.correction": {"algo.objective": "grpo"},
    "algo.correction_level": {"algo.objective": "grpo", "algo.correction": "tis"},
    "algo.correction_floor": {"algo.objective": "grpo", "algo.correction": "icepop"},
    "algo.proximal": {"algo.objective": "grpo", "algo.correction": "tis"},
    "algo.gate_positive": {"algo.objective": "sapo"},
    "algo.gate_negative": {"algo.objective": "sapo"},
    "algo.tv_bound": {"algo.objective": "dppo_tv"},
    "algo.m2_bound": {"algo.objective": "m2po"},
    "algo.trace_lambda": {"algo.objective": "vtrace"},
    "algo.trace_cap": {"algo.objective": "vtrace"},
    "algo.clip_low": {"algo.objective": "grpo"},
    "algo.clip_high": {"algo.objective": "grpo"},
    "algo.dual_clip": {"algo.objective": "grpo"},
    "staleness.window": {"staleness.max_lag": 4},
    "generator.vllm": {"generator.engine": "vllm"},
    "sampling.top_k": {"sampling.kept_sets": "carry"},
    "sampling.top_p": {"sampling.kept_sets": "carry"},
    "sampling.min_p": {"sampling.kept_sets": "carry"},
    "sampling.kept_sets": {"sampling.top_p": 0.8},
    "push.store": {"push.channel": "store"},
    "push.interval": {"staleness.max_lag": 8},
    "stream.bind": {"stream.transport": "tcp"},
    "stream.keys": {"stream.transport": "tcp"},
}
OTHER: dict[str, Any] = {
    "agreement.mean_log_ratio": 0.01,
    "agreement.max_log_ratio": 0.2,
    "agreement.min_ess": 0.9,
    "staleness.slots": 12,
    "staleness.window": 3,
    "model.lora.targets": ["q_proj"],
    "push.kv": "2",
    "generator.kv_tokens": 100_000,
    "algo.clip_low": 0.3,
    "algo.clip_high": 0.3,
    "algo.dual_clip": 3.0,
    "learner.warmup_steps": 7,
    "env.args": {"digits": 5},
    "generator.vllm": {"block_size": 16},
    "stream.bind": "tcp://127.0.0.1:5700",
    "generator.gpus": [1],
    "sampling.top_k": 20,
    "sampling.stop_strings": ["\n"],
    "telemetry.sinks": ["tensorboard"],
    "telemetry.prometheus_host": "0.0.0.0",
}


def other_value(path: str) -> Any:
    if path in OTHER:
        return OTHER[path]
    info = paths.fields()[path]
    default: Any = "" if info.is_required() else info.get_default(call_default_factory=True)
    choices = typing.get_args(info.annotation)
    if typing.get_origin(info.annotation) is typing.Literal:
        return next((choice for choice in choices if choice != default), None)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + 1
    if isinstance(default, float):
        return default * 0.5 or 0.25
    return "other"


def with_key(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    section, _, rest = path.partition(".")
    return {**data, section: with_key(data.get(section, {}), rest, value) if rest else value}


def flippable() -> list[str]:
    """All keys but those with one choice, kept for the choices to come."""
    return [path for path in paths.fields() if other_value(path) is not None]


@pytest.mark.parametrize("path", flippable())
def test_each_key_changes_the_effective_config(path: str) -> None:
    value = other_value(path)
    data = BASE
    for companion, given in COMPANIONS.get(path, {}).items():
        data = with_key(data, companion, given)
    # the base holds the companions only, so it may be refused on its own; the flipped recipe must not be
    flipped = validate(with_key(data, path, value))
    default = (
        ""
        if paths.fields()[path].is_required()
        else paths.fields()[path].get_default(call_default_factory=True)
    )
    assert value_of(flipped, path) != default


@pytest.mark.parametrize("path", sorted(paths.fields()))
def test_each_key_is_read_by_the_engine(path: str) -> None:
    leaf = path.rpartition(".")[2]
    config = ENGINE / "config"
    sources = [source for source in ENGINE.rglob("*.py") if config not in source.parents]
    sources += [config / "derived.py", config / "plan.py", config / "folder.py"]
    text = "\n".join(source.read_text() for source in sources)
    assert re.search(rf"\.{leaf}\b", text), f"no module reads {path}"
