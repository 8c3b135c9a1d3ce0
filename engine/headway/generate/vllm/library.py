"""The one place that knows vLLM's versions: import, what is allowed to be set, and where the live model is.

vLLM is imported when an engine is opened and not before; its settings of the environment must be there by then.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from headway.errors import UnsupportedOption

OLDEST, BEYOND = (0, 28), (0, 34)
"""Versions that this package was written for: OLDEST <= version < BEYOND."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core is stepped here, between two pushes
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",  # models are folders
}

OWNED: dict[str, str] = {
    "model": "model.path",
    "tokenizer": "model.path",
    "skip_tokenizer_init": "the learner tokenises",
    "return_sampling_mask": "sampling.kept_sets",
    "logprobs_mode": "the ratio needs the log-probs of what was sampled from",
    "max_num_seqs": "generator.max_running",
    "max_num_batched_tokens": "generator.prefill_tokens",
    "num_gpu_blocks_override": "generator.kv_tokens",
    "kv_cache_memory_bytes": "generator.kv_tokens",
    "async_scheduling": "tokens and weights change in turn",
    "load_format": "weights come by push",
    "distributed_executor_backend": "the model is written in this process",
    "disable_log_stats": "headway's own metrics",
    "quantization": "pushed weights are not quantised",
    "enable_lora": "model.lora",
    "max_loras": "model.lora",
    "max_lora_rank": "model.lora.rank",
    "lora_dtype": "push.dtype",
    "lora_target_modules": "model.lora.targets",
}
"""Engine arguments that headway sets, each with the key or the reason."""

ONE_PROCESS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse engine arguments that headway owns, or that need more than one process. Does not import vLLM.

    Raises:
        UnsupportedOption: names the argument.
    """
    for name, value in arguments.items():
        if name in OWNED:
            raise UnsupportedOption(
                f"generator.vllm.{name} = {value!r}: set by headway ({OWNED[name]}); take it out"
            )
        if name in ONE_PROCESS and value != 1:
            raise UnsupportedOption(
                f"generator.vllm.{name} = {value!r}: weights are written into one process's model; allowed: 1. "
                "More GPUs: generator.replicas"
            )


def load_vllm() -> ModuleType:
    """The vllm module, of a version that is known here.

    Raises:
        UnsupportedOption: not installed, or of another version.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        module = importlib.import_module("vllm")
    except ImportError as error:
        raise UnsupportedOption(
            f"generator.engine = 'vllm' needs the package vllm, {_range()}: {error}. Install it into this "
            "environment (on a machine without a GPU: `make vllm-env`), or set generator.engine = 'torch'"
        ) from error
    version = str(getattr(module, "__version__", "unknown"))
    parts = version.split(".")
    known = len(parts) > 1 and parts[0].isdigit() and parts[1].isdigit()
    if not (known and OLDEST <= (int(parts[0]), int(parts[1])) < BEYOND):
        raise UnsupportedOption(
            f"generator.engine = 'vllm': vllm {version} is installed; supported: {_range()}"
        )
    return module


def _range() -> str:
    return f"{OLDEST[0]}.{OLDEST[1]} <= version < {BEYOND[0]}.{BEYOND[1]}"


def check_known(vllm: ModuleType, arguments: Mapping[str, Any]) -> None:
    """Refuse engine arguments that this version does not know.

    Raises:
        UnsupportedOption: names the argument, and the nearest.
    """
    known = {field.name for field in dataclasses.fields(vllm.EngineArgs)}
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), 1)
            raise UnsupportedOption(
                f"generator.vllm.{name}: vllm {vllm.__version__} has no such engine argument"
                f"{f'; did you mean {near[0]}?' if near else ''}"
            )


def engine_arguments(vllm: ModuleType, arguments: Mapping[str, Any]) -> Any:
    """vLLM's EngineArgs.

    Raises:
        UnsupportedOption: it knows no such argument, or refuses a value.
    """
    check_known(vllm, arguments)
    try:
        return vllm.EngineArgs(**arguments)
    except (TypeError, ValueError) as error:
        raise UnsupportedOption(f"generator.vllm: vllm {vllm.__version__} refuses: {error}") from error


def live_runner(llm: Any) -> Any:
    """The model runner of an in-process LLMEngine.

    Raises:
        UnsupportedOption: the engine core runs in another process.
    """
    core = getattr(llm.engine_core, "engine_core", None)
    if core is None:
        raise UnsupportedOption(
            "generator.engine = 'vllm': the engine core runs in a process of its own; unset "
            "VLLM_ENABLE_V1_MULTIPROCESSING, or set it to 0"
        )
    driver = core.model_executor.driver_worker
    return getattr(driver, "worker", driver).model_runner


def num_kv_tokens(llm: Any) -> int:
    """Tokens that the KV cache holds."""
    config = llm.vllm_config.cache_config
    return int(config.num_gpu_blocks) * int(config.block_size)


def head_overrides(given: Any, head_dtype: str) -> dict[str, Any]:
    """The argument `hf_overrides` that also sets the head's precision.

    Args:
        given: the recipe's own, or None. head_dtype: model.head_dtype.

    Raises:
        UnsupportedOption: the recipe's own is no table, or sets the head's precision by itself.
    """
    if given is not None and not isinstance(given, dict):
        raise UnsupportedOption(f"generator.vllm.hf_overrides = {given!r}: must be a table")
    overrides: dict[str, Any] = dict(given or {})  # pyright: ignore[reportUnknownArgumentType]
    if overrides.get("head_dtype", head_dtype) != head_dtype:
        raise UnsupportedOption(
            f"generator.vllm.hf_overrides.head_dtype = {overrides['head_dtype']!r}: both sides follow "
            f"model.head_dtype = {head_dtype!r}; take it out"
        )
    return {**overrides, "head_dtype": head_dtype}


def check_head(vllm: ModuleType, llm: Any, head_dtype: str) -> None:
    """Refuse an engine whose vocabulary head is not computed in `head_dtype`.

    Older versions ignore the setting, and a platform may fall back to the model's dtype, both without a word.

    Raises:
        UnsupportedOption: says what it computes in.
    """
    model: Any = live_runner(llm).model
    processor = getattr(model, "logits_processor", None)
    layers = str(llm.vllm_config.model_config.dtype).removeprefix("torch.")
    of_head = getattr(processor, "head_dtype", None)
    found = layers if of_head is None else str(of_head).removeprefix("torch.")
    if found == head_dtype:
        return
    others = f"model.head_dtype = {found!r}"
    if head_dtype == "float32":
        others += ", or generator.vllm.dtype = 'float32', which computes the whole model in it"
    raise UnsupportedOption(
        f"model.head_dtype = {head_dtype!r}: vllm {vllm.__version__} computes the head of {type(model).__name__} in "
        f"{found} here, so only the learner would follow; allowed: {others}"
    )
