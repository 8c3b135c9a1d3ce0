"""Everything a rollout loop needs, from a recipe: engine, reward workers, tokenizer. Shared with serial mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from headway.config import RunConfig
from headway.envs import EnvSpec, RewardPool
from headway.generate import TorchEngine
from headway.model import Tokenizer, load_policy


def build_engine(config: RunConfig, folder: Path, tokenizer: Tokenizer) -> TorchEngine:
    """The engine of a recipe, without any version in force.

    Args:
        folder: of the model; its weights are replaced by the first push.

    Raises:
        ModelError: the folder cannot be used.
    """
    policy = load_policy(folder, published_dtype=config.push.dtype, with_grad=False)
    generator, sampling = config.generator, config.sampling
    # A group's prompt is shared, so what a sequence needs for itself is its budget; prompts come on top.
    default = generator.max_running * (
        sampling.max_new_tokens + policy.context_length // config.batch.samples + 1
    )
    return TorchEngine(
        policy,
        max_running=generator.max_running,
        kv_tokens=generator.kv_tokens or default,
        prefill_tokens=generator.prefill_tokens,
        kv=int(config.push.kv) if config.push.kv.isdigit() else config.push.kv,
        decode=tokenizer.decode,
    )


def build_rewards(config: RunConfig) -> RewardPool:
    """The reward workers of a recipe, started.

    Raises:
        EnvironmentFailure: the environment cannot be built.
    """
    spec = EnvSpec(config.env.name, config.env.args)
    reward = config.reward
    return RewardPool(spec, reward.workers, reward.deadline_s, max_failure_share=reward.max_failure_share)


def set_threads(count: int, note: Callable[[str], None]) -> None:
    """Limit this process's torch threads; says how many."""
    torch.set_num_threads(count)
    note(f"torch uses {count} thread{'s' if count > 1 else ''}")
