"""Objectives by name: defaults, and contradictions refused with what works."""

from __future__ import annotations

from typing import Any

import pytest

from headway.algo import Objective, resolve_recipe
from headway.errors import ConfigError
from headway_kernels.objective import AVAILABLE


@pytest.mark.parametrize(
    ("name", "advantage", "denominator", "clip"),
    [
        ("cispo", "batch", "tokens", (0.2, 0.2)),
        ("grpo", "group", "sequences", (0.2, 0.2)),
        ("dapo", "group", "tokens", (0.2, 0.28)),
        ("dr_grpo", "mean", "constant", (0.2, 0.2)),
        ("rloo", "loo", "tokens", (0.2, 0.2)),
        ("gspo", "group", "sequences", (0.2, 0.2)),
        ("reinforce_pp", "batch", "tokens", (0.2, 0.2)),
        ("ppo", "batch", "tokens", (0.2, 0.2)),
        ("sapo", "group", "sequences", (0.2, 0.2)),
        ("dppo_tv", "group", "tokens", (0.2, 0.2)),
        ("m2po", "group", "tokens", (0.2, 0.2)),
        ("vtrace", "batch", "tokens", (0.2, 0.2)),
    ],
)
def test_defaults(name: str, advantage: str, denominator: str, clip: tuple[float, float]) -> None:
    recipe = resolve_recipe(name)
    assert (recipe.advantage, recipe.denominator) == (advantage, denominator)
    assert recipe.objective == Objective(name, clip_low=clip[0], clip_high=clip[1])
    assert resolve_recipe(name, advantage="", denominator="") == recipe


def test_every_available_objective_has_defaults() -> None:
    assert {resolve_recipe(name).objective.name for name in AVAILABLE} == set(AVAILABLE)
    assert resolve_recipe().objective == Objective(
        "cispo", cap=5.0, correction="none", correction_cap=5.0, kl="none", kl_coef=0.0, entropy_coef=0.0
    )


def test_what_is_chosen_reaches_the_objective() -> None:
    recipe = resolve_recipe(
        "grpo", advantage="batch", denominator="tokens", clip_low=0.1, clip_high=0.3, dual_clip=2.0, cap=4.0,
        correction="tis", correction_cap=3.0, kl="k3", kl_coef=0.01, entropy_coef=0.001,
    )  # fmt: skip
    assert recipe.objective == Objective("grpo", 0.1, 0.3, 2.0, 4.0, "tis", 3.0, "k3", 0.01, 0.001)
    assert (recipe.advantage, recipe.denominator) == ("batch", "tokens")


@pytest.mark.parametrize(
    ("options", "path", "message"),
    [
        ({"name": "trpo"}, "algo.objective", "choose from cispo"),
        ({"name": "dr_grpo", "advantage": "group"}, "algo.advantage", "allows mean"),
        ({"name": "rloo", "advantage": "batch"}, "algo.advantage", "allows loo"),
        ({"name": "dapo", "denominator": "sequences"}, "algo.denominator", "allows tokens"),
        ({"name": "gspo", "denominator": "tokens"}, "algo.denominator", "allows sequences"),
        ({"advantage": "median"}, "algo.advantage", "unknown; choose from batch"),
        ({"correction": "vis"}, "algo.correction", "choose from none, tis"),
        ({"kl": "k4", "kl_coef": 0.1}, "algo.kl", "choose from none, k1, k2, k3"),
        ({"correction": "tis"}, "algo.objective", "count it twice"),
        ({"name": "gspo", "correction": "tis"}, "algo.objective", "count it twice"),
        ({"clip_low": 0.1}, "algo.clip_low", "does not clip"),
        ({"dual_clip": 3.0}, "algo.dual_clip", "does not clip"),
        ({"name": "grpo", "cap": 2.0}, "algo.cap", "leave it at 5"),
        ({"name": "grpo", "correction_cap": 2.0}, "algo.correction_cap", "leave it at 5"),
        ({"kl_coef": 0.1}, "algo.objective", "no effect with kl='none'"),
        ({"kl": "k3"}, "algo.kl", "kl_coef = 0"),
        ({"name": "grpo", "clip_low": 1.5}, "algo.objective", "clip_low must be in"),
        ({"name": "grpo", "dual_clip": 0.5}, "algo.objective", "dual_clip must be in"),
        ({"cap": float("nan")}, "algo.objective", "cap must be in"),
    ],
)
def test_contradictions_are_refused_with_what_works(options: dict[str, Any], path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_recipe(**options)
    assert [fault[0] for fault in caught.value.faults] == [path]
    assert message in str(caught.value)


def test_all_faults_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_recipe("dr_grpo", advantage="loo", denominator="tokens", kl="k9", path="loss")
    assert sorted(path for path, _ in caught.value.faults) == [
        "loss.advantage",
        "loss.denominator",
        "loss.kl",
    ]
