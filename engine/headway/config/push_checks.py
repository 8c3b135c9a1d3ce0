"""The rules of [push]'s channels."""

from __future__ import annotations

from headway.config.rule import Rule
from headway.config.schema import RunConfig


def _store_has_a_place(config: RunConfig) -> str:
    push = config.push
    if push.channel == "store" and not push.store:
        return "push.channel = 'store' needs a directory or a URL that every generator reaches"
    if push.store and push.channel != "store":
        return (
            f"{push.store!r} is for push.channel = 'store', this is {push.channel!r}; take one of the two out"
        )
    return ""


def _keys_protect_the_weights(config: RunConfig) -> str:
    if config.push.channel != "collective" or not config.stream.keys:
        return ""
    return (
        "torch.distributed authenticates nobody, so stream.keys would not protect the weights; "
        "nearest: push.channel = 'tcp'"
    )


def _swap_is_possible(config: RunConfig) -> str:
    push = config.push
    if push.apply != "swap" or (push.channel in ("auto", "shm") and push.dtype == "float32"):
        return ""
    return (
        f"'swap' serves from shared memory what it finds there, but push.channel = {push.channel!r} and push.dtype = "
        f"{push.dtype!r}; nearest: apply = 'auto'"
    )


def _kv_is_read(config: RunConfig) -> str:
    push = config.push
    if push.mode == "in_flight" or push.kv == "keep":
        return ""
    why = "leaves no sequence running" if push.mode == "drain" else "forwards every prefix again"
    return f"{push.kv!r} has no effect: mode = {push.mode!r} {why}; nearest: kv = 'keep'"


def _compression_is_read(config: RunConfig) -> str:
    push = config.push
    if push.compression == "none" or push.channel != "shm":
        return ""
    return f"{push.compression!r} would only slow shared memory down; nearest: compression = 'none'"


def _vllm_can_apply(config: RunConfig) -> str:
    push = config.push
    if config.generator.engine != "vllm" or push.apply in ("auto", "copy"):
        return ""
    return (
        f"{push.apply!r} needs weights in the published layout, and vLLM fuses them; nearest for "
        "generator.engine = 'vllm': apply = 'auto'"
    )


def _vllm_can_rebuild(config: RunConfig) -> str:
    push = config.push
    if config.generator.engine != "vllm" or push.kv in ("keep", "recompute"):
        return ""
    return (
        f"{push.kv!r}: vLLM's cache is kept or dropped as a whole; allowed for generator.engine = 'vllm': "
        "'keep', 'recompute'"
    )


def _vllm_is_read(config: RunConfig) -> str:
    generator = config.generator
    if generator.engine == "vllm" or not generator.vllm:
        return ""
    return f"{generator.vllm!r} is for generator.engine = 'vllm', this is {generator.engine!r}; take one of the two out"


PUSH_RULES = (
    Rule(("generator.vllm", "generator.engine"), _vllm_is_read),
    Rule(("push.apply", "generator.engine"), _vllm_can_apply),
    Rule(("push.kv", "generator.engine"), _vllm_can_rebuild),
    Rule(("push.apply", "push.channel", "push.dtype"), _swap_is_possible),
    Rule(("push.kv", "push.mode"), _kv_is_read),
    Rule(("push.compression", "push.channel"), _compression_is_read),
    Rule(("push.store", "push.channel"), _store_has_a_place),
    Rule(("push.channel", "stream.keys"), _keys_protect_the_weights),
)
