"""Everything a rollout loop needs, from a recipe: engine, reward workers, tokenizer. Shared with serial mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from headway.config import RunConfig
from headway.envs import EnvSpec, RewardPool
from headway.generate import InferenceEngine, TorchEngine
from headway.model import Compute, Lora, Tokenizer, load_policy
from headway.weights import DoubledServed, Served


def build_engine(config: RunConfig, folder: Path, tokenizer: Tokenizer) -> InferenceEngine:
    """The engine of a recipe, without any version in force.

    Args:
        folder: of the model; its weights are replaced by the first push.

    Raises:
        ModelError: the folder cannot be used. UnsupportedOption: vLLM is not there, or refuses an argument.
    """
    if config.generator.engine == "vllm":
        return _build_vllm(config, folder, tokenizer)
    return build_torch_engine(config, folder, tokenizer)


def _build_vllm(config: RunConfig, folder: Path, tokenizer: Tokenizer) -> InferenceEngine:
    from headway.generate.vllm import open_vllm  # imports vLLM's side only where it is wanted
    from headway.generate.vllm.start import Sizes

    generator = config.generator
    return open_vllm(
        folder,
        published_dtype=config.push.dtype,
        sizes=Sizes(generator.max_running, generator.kv_tokens, generator.prefill_tokens),
        kv=config.push.kv,
        head_dtype=config.model.head_dtype,
        kept_sets=config.sampling.kept_sets == "carry",
        options=generator.vllm,
        lora=Lora.of(config),
        decode=tokenizer.decode,
    )


def build_torch_engine(config: RunConfig, folder: Path, tokenizer: Tokenizer) -> TorchEngine:
    """The embedded engine of a recipe, without any version in force.

    Raises:
        ModelError: the folder cannot be used.
    """
    policy = load_policy(
        folder,
        published_dtype=config.push.dtype,
        with_grad=False,
        compute=Compute(head_dtype=config.model.head_dtype),
        lora=Lora.of(config),
    )
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


def build_served(config: RunConfig, engine: InferenceEngine) -> Served:
    """An engine's weights as pushes are to be applied to them."""
    if config.push.apply == "double":
        assert isinstance(engine, TorchEngine), "refused for the others when the recipe is read"
        return DoubledServed(engine, engine.manifest)
    return engine.served


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
