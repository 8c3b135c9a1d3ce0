"""Everything a learner needs, from a recipe: policy, trainer, prompts, gate. Shared with serial mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headway.algo import Recipe, resolve_recipe
from headway.config import AlgoConfig, RunConfig, derived
from headway.envs import EnvSpec, load_environment
from headway.learner.prompts import PromptSource
from headway.learner.tickets import TicketMaker
from headway.model import Compute, Lora, Policy, Tokenizer, load_policy, load_tokenizer, resolve_model
from headway.staleness import Gate, StalenessPolicy, StalenessUnit, make_policy
from headway.trainer import StartCheck, Trainer


@dataclass(frozen=True)
class LearnerParts:
    """What a learner is made of, in one process or another.

    Attributes:
        folder: of the model, whose tokenizer goes with the final policy.
    """

    folder: Path
    tokenizer: Tokenizer
    policy: Policy
    trainer: Trainer
    prompts: PromptSource
    tickets: TicketMaker
    gate: Gate


def build_learner(config: RunConfig, note: Callable[[str], None]) -> LearnerParts:
    """Load and make everything.

    Args:
        note: told what takes long.

    Raises:
        HeadwayError: the model, the environment or the recipe cannot be used.
    """
    folder = resolve_model(config.model.path, note)
    tokenizer = load_tokenizer(folder)
    policy = load_policy(
        folder,
        published_dtype=config.push.dtype,
        with_grad=True,
        compute=compute_of(config),
        lora=Lora.of(config),
    )
    numerics = derived.numerics(config, policy.attention.name)
    note(numerics)
    if not derived.sides_compare(config):
        note(
            "log-probs are not compared: sampling.kept_sets = 'ignore' puts every ratio off by the kept mass"
        )
    reference = load_reference(config, policy, note)
    environment = load_environment(EnvSpec(config.env.name, config.env.args))
    return LearnerParts(
        folder=folder,
        tokenizer=tokenizer,
        policy=policy,
        trainer=Trainer(
            policy,
            config,
            recipe_of(config.algo),
            reference,
            StartCheck(derived.agreement_limits(config), numerics) if derived.sides_compare(config) else None,
        ),
        prompts=PromptSource(environment, tokenizer, config.env, config.seed),
        tickets=TicketMaker(config, tokenizer.eos_ids, policy.vocab_size),
        gate=make_gate(config),
    )


def load_reference(config: RunConfig, policy: Policy, note: Callable[[str], None]) -> Policy | None:
    """The frozen policy of the KL term; None when the objective needs none.

    Args:
        policy: that is trained; without its adapters it is the starting policy.

    Raises:
        ModelError: it cannot be loaded.
    """
    if not recipe_of(config.algo).objective.needs_reference:
        return None
    if policy.adapters is not None and not config.model.reference:
        return policy.without_adapters()
    folder = resolve_model(config.model.reference or config.model.path, note)
    return load_policy(folder, with_grad=False, compute=compute_of(config))


def compute_of(config: RunConfig) -> Compute:
    """What the learner's policy computes on and in."""
    learner = config.learner
    return Compute(learner.device, learner.dtype, config.model.head_dtype, learner.attention)


def recipe_of(algo: AlgoConfig) -> Recipe:
    """The objective that a recipe's [algo] names, with its defaults filled in."""
    return resolve_recipe(
        algo.objective,
        advantage=algo.advantage,
        denominator=algo.denominator,
        clip_low=algo.clip_low,
        clip_high=algo.clip_high,
        dual_clip=algo.dual_clip,
        cap=algo.cap,
        correction=algo.correction,
        correction_level=algo.correction_level,
        correction_cap=algo.correction_cap,
        correction_floor=algo.correction_floor,
        proximal=algo.proximal,
        gate_positive=algo.gate_positive,
        gate_negative=algo.gate_negative,
        tv_bound=algo.tv_bound,
        m2_bound=algo.m2_bound,
        trace_lambda=algo.trace_lambda,
        trace_cap=algo.trace_cap,
        kl=algo.kl,
        kl_coef=algo.kl_coef,
        entropy_coef=algo.entropy_coef,
    )


def staleness_policy(config: RunConfig) -> StalenessPolicy:
    """The staleness policy that a recipe names."""
    staleness = config.staleness
    return make_policy(
        staleness.policy,
        staleness.max_lag,
        config.batch.prompts,
        window=staleness.window or None,
        push_interval=config.push.interval,
        slots=staleness.slots or None,
    )


def make_gate(config: RunConfig) -> Gate:
    """The gate of a new run."""
    return Gate(staleness_policy(config), unit=StalenessUnit(config.staleness.unit))
