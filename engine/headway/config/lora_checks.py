"""The rules of [model.lora]."""

from __future__ import annotations

from headway.config.lora import LoraConfig
from headway.config.rule import Rule
from headway.config.schema import RunConfig

PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def _has_a_rank(config: RunConfig) -> str:
    lora, default = config.model.lora, LoraConfig()
    if lora.rank:
        return ""
    for name in ("alpha", "targets"):
        if getattr(lora, name) != getattr(default, name):
            return f"0 trains all weights, so model.lora.{name} has no effect; nearest: rank = 16, or take {name} out"
    return ""


def _targets_are_named_once(config: RunConfig) -> str:
    targets = config.model.lora.targets
    once = [target for target in dict.fromkeys(targets) if target]
    if len(once) == len(targets):
        return ""
    return f"{list(targets)} names a layer twice, or one without a name; nearest: {once}"


def _one_process_serves(config: RunConfig) -> str:
    if not config.model.lora.rank or config.generator.engine != "vllm":
        return ""
    for name in PARALLEL:
        value = config.generator.vllm.get(name, 1)
        if value != 1:
            return (
                f"{config.model.lora.rank} with generator.vllm.{name} = {value!r}: adapters are written into one "
                "process's model; nearest: rank = 0, or take it out and raise generator.replicas"
            )
    return ""


def _base_is_served_alike(config: RunConfig) -> str:
    if not config.model.lora.rank or config.generator.engine != "vllm":
        return ""
    dtype = config.generator.vllm.get("dtype", config.push.dtype)
    if dtype == config.push.dtype:
        return ""
    return (
        f"{config.model.lora.rank} with generator.vllm.dtype = {dtype!r}: the learner computes with a base rounded to "
        f"push.dtype = {config.push.dtype!r}, vLLM would with another; nearest: take generator.vllm.dtype out"
    )


LORA_RULES = (
    Rule(("model.lora.rank", "model.lora.alpha", "model.lora.targets"), _has_a_rank),
    Rule(("model.lora.targets",), _targets_are_named_once),
    Rule(("model.lora.rank", "generator.engine", "generator.vllm"), _one_process_serves),
    Rule(("model.lora.rank", "generator.engine", "generator.vllm", "push.dtype"), _base_is_served_alike),
)
