"""The rules of what each side computes in and with."""

from __future__ import annotations

from collections.abc import Callable

from headway.config import derived
from headway.config.agreement import AgreementConfig
from headway.config.rule import Rule
from headway.config.schema import RunConfig

HALF_KERNELS = ("flash", "varlen")


def _head_is_published_so(config: RunConfig) -> str:
    if config.model.head_dtype == "float32" or config.push.dtype == "bfloat16":
        return ""
    return (
        f"'bfloat16' would round a head that is published in push.dtype = {config.push.dtype!r}; nearest: 'float32', "
        "or push.dtype = 'bfloat16'"
    )


def _layers_are_published_so(config: RunConfig) -> str:
    if config.learner.dtype == "float32" or config.push.dtype == "bfloat16":
        return ""
    return (
        f"'bfloat16' would train with rounded weights while generators get push.dtype = {config.push.dtype!r}; "
        "nearest: push.dtype = 'bfloat16', or learner.dtype = 'float32'"
    )


def _attention_fits(config: RunConfig) -> str:
    learner = config.learner
    if learner.attention in HALF_KERNELS and (learner.device != "cuda" or learner.dtype != "bfloat16"):
        return (
            f"{learner.attention!r} computes in bfloat16 on a CUDA device, this is learner.device = "
            f"{learner.device!r}, learner.dtype = {learner.dtype!r}; nearest: 'auto'"
        )
    if learner.attention == "native" and (learner.device != "cpu" or learner.dtype != "float32"):
        return (
            f"'native' computes in float32 on the CPU, this is learner.device = {learner.device!r}, learner.dtype = "
            f"{learner.dtype!r}; nearest: 'auto'"
        )
    if learner.attention == "flex" and learner.device == "cpu":
        return "'flex': torch's FlexAttention has no backward pass on a CPU; nearest: 'auto'"
    return ""


def _vllm_head_is_ours(config: RunConfig) -> str:
    overrides = config.generator.vllm.get("hf_overrides")
    if isinstance(overrides, dict) and "head_dtype" in overrides:
        return (
            "hf_overrides.head_dtype would set the precision of the head on one side only; take it out and set "
            "model.head_dtype, which both sides follow"
        )
    return ""


def _each_replica_has_a_gpu(config: RunConfig) -> str:
    generator = config.generator
    each = derived.gpus_of_a_generator(config)
    if generator.gpus and len(generator.gpus) != generator.replicas * each:
        count = "one" if each == 1 else f"{each} (generator.vllm.tensor_parallel_size)"
        return (
            f"{generator.gpus} names {len(generator.gpus)} for generator.replicas = {generator.replicas}; expected "
            f"{count} for each replica, or none"
        )
    shares = [generator.gpus[at : at + each] for at in range(0, len(generator.gpus), each)]
    twice = next((share for share in shares if len(set(share)) < each), None)
    if twice is not None:
        return f"{twice} names a GPU twice for one generator, each of whose ranks needs one of its own"
    negative = [gpu for gpu in generator.gpus if gpu < 0]
    return f"{negative[0]}: GPUs are counted from 0" if negative else ""


def _gpu_is_used(config: RunConfig) -> str:
    learner = config.learner
    if learner.gpu < 0 or learner.device == "cuda":
        return ""
    return f"{learner.gpu} has no effect with learner.device = {learner.device!r}; nearest: -1, or device = 'cuda'"


def _gpus_are_used(config: RunConfig) -> str:
    generator = config.generator
    if not generator.gpus or generator.engine == "vllm":
        return ""
    return f"{generator.gpus} has no effect: the embedded engine computes on the CPU; nearest: [], or engine = 'vllm'"


def _is_judged(name: str) -> Callable[[RunConfig], str]:
    def broken(config: RunConfig) -> str:
        value = getattr(config.agreement, name)
        if value is None or derived.sides_compare(config):
            return ""
        return (
            f"{value} has no effect with sampling.kept_sets = 'ignore', where the two sides score over different ids; "
            "nearest: sampling.kept_sets = 'carry', or take it out"
        )

    return broken


COMPUTE_RULES = (
    Rule(("learner.gpu", "learner.device"), _gpu_is_used),
    Rule(("generator.gpus", "generator.engine"), _gpus_are_used),
    Rule(("generator.gpus", "generator.replicas", "generator.vllm"), _each_replica_has_a_gpu),
    Rule(("model.head_dtype", "push.dtype"), _head_is_published_so),
    Rule(("learner.dtype", "push.dtype"), _layers_are_published_so),
    Rule(("learner.attention", "learner.device", "learner.dtype"), _attention_fits),
    Rule(("generator.vllm",), _vllm_head_is_ours),
    *(
        Rule((f"agreement.{name}", "sampling.kept_sets"), _is_judged(name))
        for name in AgreementConfig.model_fields
    ),
)
