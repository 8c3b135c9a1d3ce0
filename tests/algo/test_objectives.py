"""Objectives by name: defaults, and contradictions refused with what works."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest

from headway.algo import Objective, resolve_recipe
from headway.config import AlgoConfig, algo_checks
from headway.errors import ConfigError
from headway_kernels.objective import (
    AVAILABLE,
    CORRECTABLE,
    CORRECTIONS,
    FAMILIES,
    KL_ESTIMATORS,
    LEVELS,
    Family,
)


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


def test_decoupled_ppo_comes_with_a_correction_and_a_proximal_policy() -> None:
    recipe = resolve_recipe("decoupled_ppo")
    assert (recipe.objective.correction, recipe.proximal, recipe.reads_lag) == ("tis", "lag", True)
    plain = resolve_recipe("decoupled_ppo", correction="mis", proximal="learner")
    assert (plain.objective.correction, plain.reads_lag, plain.reads_scores) == ("mis", False, False)
    assert not resolve_recipe("grpo").reads_scores
    assert resolve_recipe("vtrace").reads_scores


def test_what_is_chosen_reaches_the_objective() -> None:
    recipe = resolve_recipe(
        "grpo", advantage="batch", denominator="tokens", clip_low=0.1, clip_high=0.3, dual_clip=2.0, cap=4.0,
        correction="icepop", correction_cap=3.0, correction_floor=0.2, correction_level="geometric",
        proximal="lag", kl="k3", kl_coef=0.01, entropy_coef=0.001,
    )  # fmt: skip
    assert recipe.objective == Objective(
        "grpo", 0.1, 0.3, 2.0, 4.0, "icepop", 3.0, "k3", 0.01, 0.001, "geometric", 0.2
    )
    assert (recipe.advantage, recipe.denominator, recipe.proximal) == ("batch", "tokens", "lag")
    gates = resolve_recipe("sapo", gate_positive=2.0, gate_negative=3.0).objective
    assert (gates.gate_positive, gates.gate_negative) == (2.0, 3.0)
    assert resolve_recipe("dppo_tv", tv_bound=0.3).objective.tv_bound == 0.3
    assert resolve_recipe("m2po", m2_bound=0.1).objective.m2_bound == 0.1
    trace = resolve_recipe("vtrace", cap=1.0, trace_lambda=0.9, trace_cap=0.5)
    assert (trace.objective.cap, trace.trace_lambda, trace.trace_cap) == (1.0, 0.9, 0.5)


@pytest.mark.parametrize(
    ("options", "path", "message"),
    [
        ({"name": "trpo"}, "algo.objective", "choose from cispo"),
        ({"name": "dr_grpo", "advantage": "group"}, "algo.advantage", "defined by 'mean'"),
        ({"name": "rloo", "advantage": "batch"}, "algo.advantage", "defined by 'loo'"),
        ({"name": "reinforce_pp", "advantage": "group"}, "algo.advantage", "defined by 'batch'"),
        ({"name": "dapo", "denominator": "sequences"}, "algo.denominator", "defined by 'tokens'"),
        ({"name": "gspo", "denominator": "tokens"}, "algo.denominator", "defined by 'sequences'"),
        ({"advantage": "median"}, "algo.advantage", "unknown; choose from batch"),
        ({"correction": "vis"}, "algo.correction", "choose from none, tis, icepop, mis"),
        ({"kl": "k4", "kl_coef": 0.1}, "algo.kl", "choose from none, k1, k2, k3"),
        ({"clip": 0.1}, "algo.clip", "is no key of"),
        ({"correction": "tis"}, "algo.correction", "count it twice"),
        ({"name": "gspo", "correction": "tis"}, "algo.correction", "count it twice"),
        ({"name": "m2po", "correction": "icepop"}, "algo.correction", "count it twice"),
        ({"name": "decoupled_ppo", "correction": "none"}, "algo.correction", "objective = 'ppo'"),
        ({"name": "grpo", "correction_level": "sequence"}, "algo.correction_level", "does not read it"),
        (
            {"name": "grpo", "correction": "mis", "correction_floor": 0.1},
            "algo.correction_floor",
            "correction = 'icepop'",
        ),
        (
            {"name": "grpo", "correction": "icepop", "correction_floor": 9.0},
            "algo.correction_floor",
            "every token would be rejected",
        ),
        ({"name": "grpo", "proximal": "lag"}, "algo.proximal", "does not read it"),
        ({"name": "grpo", "correction": "tis", "clip_low": 0.1}, "algo.clip_low", "proximal = 'lag'"),
        (
            {"name": "sapo", "correction": "tis", "gate_positive": 2.0},
            "algo.gate_positive",
            "proximal = 'lag'",
        ),
        ({"name": "sapo", "tv_bound": 0.5}, "algo.tv_bound", "only objective = 'dppo_tv'"),
        ({"trace_lambda": 0.5}, "algo.trace_lambda", "only objective = 'vtrace'"),
        ({"clip_low": 0.1}, "algo.clip_low", "does not clip"),
        ({"dual_clip": 3.0}, "algo.dual_clip", "does not clip"),
        ({"name": "grpo", "cap": 2.0}, "algo.cap", "nearest: 5"),
        ({"name": "grpo", "correction_cap": 2.0}, "algo.correction_cap", "nearest: 5"),
        ({"kl_coef": 0.1}, "algo.kl_coef", "kl = 'none' leaves out"),
        ({"kl": "k3"}, "algo.kl_coef", "without effect"),
        ({"name": "grpo", "clip_low": 1.5}, "algo.clip_low", "clips nothing"),
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
        resolve_recipe("dr_grpo", advantage="loo", denominator="tokens", kl_coef=0.1, path="loss")
    assert sorted(path for path, _ in caught.value.faults) == [
        "loss.advantage",
        "loss.denominator",
        "loss.kl_coef",
    ]


def test_the_recipe_s_names_are_the_kernels() -> None:
    """Tables that lie in different layers say the same."""
    names = typing.get_args(AlgoConfig.model_fields["objective"].annotation)
    assert set(names) == set(AVAILABLE)
    assert set(algo_checks.CORRECTABLE) == set(CORRECTABLE)
    clipped = {name for name, family in FAMILIES.items() if family is Family.CLIP}
    assert set(algo_checks.CLIPPED) == clipped
    assert {name for name, family in FAMILIES.items() if family is Family.CAP} == set(algo_checks.CAPPED)
    for key, words in (("correction", CORRECTIONS), ("correction_level", LEVELS), ("kl", KL_ESTIMATORS)):
        assert tuple(filter(None, typing.get_args(AlgoConfig.model_fields[key].annotation))) == words
    plain = Objective()
    for field in dataclasses.fields(Objective):
        default = AlgoConfig.model_fields.get(field.name)
        if default is not None and isinstance(default.default, float):
            assert default.default == getattr(plain, field.name), field.name
