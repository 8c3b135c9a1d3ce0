"""Impossible combinations are refused, with values that work; the values they name do work."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.algo import resolve_recipe
from headway.config import RunConfig, derived, load_recipe
from headway.errors import ConfigError
from headway_kernels.objective import AVAILABLE

BASE: dict[str, Any] = {"model.path": "builtin:sort", "env.name": "sort"}


def load(**keys: Any) -> RunConfig:
    return load_recipe(None, {**BASE, **{key.replace("__", "."): value for key, value in keys.items()}})


def faults(**keys: Any) -> dict[str, str]:
    try:
        load(**keys)
    except ConfigError as error:
        return dict(error.faults)
    return {}


@pytest.mark.parametrize(
    ("path", "keys"),
    [
        ("model.lora.rank", {"model__lora__alpha": 8.0}),
        ("model.lora.rank", {"model__lora__targets": ["q_proj"]}),
        ("model.lora.targets", {"model__lora__rank": 4, "model__lora__targets": ["q_proj", "q_proj"]}),
        ("model.lora.targets", {"model__lora__rank": 4, "model__lora__targets": [""]}),
        (
            "model.lora.rank",
            {
                "model__lora__rank": 4,
                "generator__engine": "vllm",
                "generator__vllm": {"tensor_parallel_size": 2},
            },
        ),
        (
            "model.lora.rank",
            {
                "model__lora__rank": 4,
                "push__dtype": "bfloat16",
                "generator__engine": "vllm",
                "generator__vllm": {"dtype": "float32"},
            },
        ),
        ("staleness.window", {"staleness__max_lag": 2, "staleness__window": 18}),
        ("staleness.window", {"staleness__max_lag": 0, "staleness__window": 2}),
        ("push.interval", {"staleness__max_lag": 2, "staleness__window": 1, "push__interval": 4}),
        ("push.interval", {"staleness__max_lag": 0, "push__interval": 2}),
        ("push.apply", {"push__apply": "swap", "push__dtype": "bfloat16"}),
        ("push.apply", {"push__apply": "swap", "push__channel": "tcp"}),
        ("push.kv", {"push__mode": "drain", "push__kv": "recompute"}),
        (
            "agreement.max_log_ratio",
            {"sampling__top_p": 0.8, "sampling__kept_sets": "ignore", "agreement__max_log_ratio": 0.1},
        ),
        ("push.kv", {"push__mode": "resume", "push__kv": "2"}),
        ("push.compression", {"push__compression": "zstd", "push__channel": "shm"}),
        ("staleness.slots", {"batch__prompts": 8, "staleness__slots": 7}),
        ("staleness.slots", {"batch__prompts": 8, "staleness__max_lag": 2, "staleness__slots": 25}),
        ("sampling.temperature", {"sampling__temperature": 0.0}),
        ("sampling.top_k", {"sampling__top_k": 10}),
        ("sampling.top_p", {"sampling__top_p": 0.9}),
        ("sampling.min_p", {"sampling__min_p": 0.1}),
        ("sampling.max_new_tokens", {"sampling__max_new_tokens": 0}),
        ("batch.samples", {"batch__samples": 1}),
        ("batch.tokens_per_row", {"batch__tokens_per_row": 64, "sampling__max_new_tokens": 64}),
        ("algo.kl_coef", {"algo__kl_coef": 0.1}),
        ("algo.kl_coef", {"algo__kl": "k3"}),
        ("model.reference", {"model__reference": "models/x"}),
        ("algo.correction", {"algo__correction": "tis"}),
        ("algo.correction", {"algo__correction": "tis", "algo__objective": "gspo"}),
        ("algo.clip_low", {"algo__clip_low": 0.2}),
        ("algo.clip_high", {"algo__clip_high": 0.2}),
        ("algo.dual_clip", {"algo__dual_clip": 3.0}),
        ("algo.clip_low", {"algo__clip_low": 1.5, "algo__objective": "grpo"}),
        ("algo.advantage", {"algo__objective": "dr_grpo", "algo__advantage": "group"}),
        ("algo.denominator", {"algo__objective": "gspo", "algo__denominator": "tokens"}),
        ("algo.cap", {"algo__objective": "grpo", "algo__cap": 2.0}),
        ("algo.correction_cap", {"algo__correction_cap": 2.0}),
        ("generator.kv_tokens", {"generator__kv_tokens": 10}),
    ],
)
def test_contradictions_are_refused_with_the_nearest_that_works(path: str, keys: dict[str, Any]) -> None:
    found = faults(**keys)
    assert set(found) == {path}
    assert "nearest" in found[path]


@pytest.mark.parametrize(
    "keys",
    [
        {"push__dtype": "bfloat16"},
        {"learner__warmup_steps": 11, "steps": 10},  # a short trial of a long recipe
        {"staleness__max_lag": 0, "staleness__window": 1},
        {"algo__objective": "grpo", "algo__correction": "tis", "algo__correction_level": "geometric"},
        {"algo__objective": "decoupled_ppo", "algo__clip_low": 0.2, "algo__dual_clip": 3.0},
        {"algo__objective": "vtrace", "algo__cap": 1.0, "algo__trace_lambda": 0.9},
        {"algo__kl": "k3", "algo__kl_coef": 0.1, "model__reference": "models/x"},
        {"staleness__max_lag": 2, "staleness__window": 1, "push__interval": 3},
        {"learner__lr": 0.0},
    ],
)
def test_unusual_but_possible(keys: dict[str, Any]) -> None:
    assert faults(**keys) == {}


def test_the_reason_for_refusing_truncated_sampling_is_given() -> None:
    assert "kept mass" in faults(sampling__top_p=0.9)["sampling.top_p"]


@given(
    prompts=st.integers(1, 12),
    max_lag=st.integers(0, 6),
    window=st.integers(0, 60),
    slots=st.integers(0, 90),
    interval=st.integers(1, 8),
)
def test_every_suggested_value_is_accepted(
    prompts: int, max_lag: int, window: int, slots: int, interval: int
) -> None:
    keys: dict[str, Any] = {
        "batch__prompts": prompts,
        "staleness__max_lag": max_lag,
        "staleness__window": window,
        "staleness__slots": slots,
        "push__interval": interval,
    }
    found = faults(**keys)
    for path, message in found.items():
        name = path.rpartition(".")[2]
        suggested = re.search(rf"nearest: {name} = (\d+)", message)
        assert suggested is not None, message
        after = faults(**{**keys, path.replace(".", "__"): int(suggested.group(1))})
        assert path not in after
    if not found:
        config = load(**keys)
        assert prompts <= derived.slots(config) <= derived.most_slots(config)
        assert derived.most_slots(config) + derived.window(config) - 1 == (max_lag + 1) * prompts
        assert interval * prompts <= derived.most_slots(config)


def test_the_open_window_follows_the_lag() -> None:
    config = load(batch__prompts=8, staleness__max_lag=4)
    assert (derived.window(config), derived.slots(config)) == (17, 24)
    synchronous = load(batch__prompts=8, staleness__max_lag=0)
    assert (derived.window(synchronous), derived.slots(synchronous)) == (1, 8)


@given(
    objective=st.sampled_from(AVAILABLE),
    advantage=st.sampled_from(["", "batch", "group", "mean", "loo"]),
    denominator=st.sampled_from(["", "tokens", "sequences", "constant"]),
    clip=st.sampled_from([{}, {"clip_low": 0.2}, {"clip_high": 0.3}, {"clip_low": 1.5}, {"dual_clip": 3.0}]),
    cap=st.sampled_from([5.0, 2.0]),
    correction=st.sampled_from([("", 5.0), ("none", 2.0), ("tis", 5.0), ("icepop", 2.0), ("mis", 2.0)]),
    level=st.sampled_from([{}, {"correction_level": "sequence"}, {"correction_floor": 3.0}]),
    proximal=st.sampled_from(["", "learner", "lag"]),
    kl=st.sampled_from([("none", 0.0), ("none", 0.1), ("k3", 0.0), ("k3", 0.1)]),
)
@settings(max_examples=300)
def test_what_is_refused_here_is_what_the_objectives_refuse(
    objective: str,
    advantage: str,
    denominator: str,
    clip: dict[str, float],
    cap: float,
    correction: tuple[str, float],
    level: dict[str, Any],
    proximal: str,
    kl: tuple[str, float],
) -> None:
    chosen: dict[str, Any] = {
        "advantage": advantage,
        "denominator": denominator,
        "cap": cap,
        "correction": correction[0],
        "correction_cap": correction[1],
        "proximal": proximal,
        "kl": kl[0],
        "kl_coef": kl[1],
        **clip,
        **level,
    }
    ours = faults(
        **{"algo__objective": objective, **{f"algo__{key}": value for key, value in chosen.items()}}
    )
    try:
        resolve_recipe(objective, **chosen)
        theirs = False
    except ConfigError:
        theirs = True
    assert bool(ours) == theirs, ours
