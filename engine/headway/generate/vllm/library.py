"""The one place that knows vLLM's versions: import, what is allowed to be set, and where the live model is.

vLLM is imported when an engine is opened and not before; its settings of the environment must be there by then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import os
from collections.abc import Generator, Iterable, Mapping
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
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process whose thread pools have run hangs
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else as many NUMA nodes as workers; generator.threads counts
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
    "distributed_executor_backend": "it follows from tensor_parallel_size",
    "worker_extension_cls": "headway's own shares the workers' weights",
    "disable_log_stats": "headway's own metrics",
    "quantization": "pushed weights are not quantised",
    "enable_lora": "model.lora",
    "max_loras": "model.lora",
    "max_lora_rank": "model.lora.rank",
    "lora_dtype": "push.dtype",
    "lora_target_modules": "model.lora.targets",
}
"""Engine arguments that headway sets, each with the key or the reason."""

ONE_STAGE = ("pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size", "nnodes")


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse engine arguments that headway owns, or that split an engine otherwise than by tensors.

    Does not import vLLM.

    Raises:
        UnsupportedOption: names the argument.
    """
    for name, value in arguments.items():
        if name in OWNED:
            raise UnsupportedOption(
                f"generator.vllm.{name} = {value!r}: set by headway ({OWNED[name]}); take it out"
            )
        if name in ONE_STAGE and value != 1:
            raise UnsupportedOption(
                f"generator.vllm.{name} = {value!r}: weights are written into ranks that each hold a share of every "
                "layer; allowed: 1. More GPUs: generator.replicas, generator.vllm.tensor_parallel_size"
            )
    tensor_parallel(arguments)


def tensor_parallel(arguments: Mapping[str, Any]) -> int:
    """Worker processes of an engine; 1: the model is in this process.

    Raises:
        UnsupportedOption: no number of processes.
    """
    size = arguments.get("tensor_parallel_size", 1)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UnsupportedOption(
            f"generator.vllm.tensor_parallel_size = {size!r}: expected a number of GPUs, 1 or more, that divides the "
            "model's attention heads"
        )
    return size


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
    if not is_known(version):
        raise UnsupportedOption(
            f"generator.engine = 'vllm': vllm {version} is installed; supported: {_range()}"
        )
    return module


def is_known(version: str) -> bool:
    """Whether this package was written for that version of vLLM."""
    parts = version.split(".")
    numbers = len(parts) > 1 and parts[0].isdigit() and parts[1].isdigit()
    return numbers and OLDEST <= (int(parts[0]), int(parts[1])) < BEYOND


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


@contextlib.contextmanager
def with_workers(num_workers: int, *, eager: bool) -> Generator[None]:
    """While an engine starts: what its worker processes inherit."""
    # a sharded embedding compiles a kernel, be the rest eager: a minute of a C++ compiler on a CPU
    name, inherited = "TORCHDYNAMO_DISABLE", os.environ.get("TORCHDYNAMO_DISABLE")
    if num_workers > 1 and eager:
        os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        if inherited is None:
            os.environ.pop(name, None)


def live_runner(llm: Any) -> Any:
    """The model runner of an in-process LLMEngine.

    Raises:
        UnsupportedOption: the engine core, or the model, is in another process.
    """
    core = getattr(llm.engine_core, "engine_core", None)
    if core is None:
        raise UnsupportedOption(
            "generator.engine = 'vllm': the engine core runs in a process of its own; unset "
            "VLLM_ENABLE_V1_MULTIPROCESSING, or set it to 0"
        )
    driver = getattr(core.model_executor, "driver_worker", None)
    if driver is None:
        raise UnsupportedOption(
            "generator.vllm.tensor_parallel_size: the model is in vLLM's worker processes; allowed here: 1"
        )
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


def head_of(model: Any) -> tuple[str, str]:
    """A live model's class, and what its vocabulary head computes in; "": what its layers do."""
    of_head = getattr(getattr(model, "logits_processor", None), "head_dtype", None)
    return type(model).__name__, "" if of_head is None else str(of_head).removeprefix("torch.")


def check_head(vllm: ModuleType, llm: Any, head_dtype: str, head: tuple[str, str] | None = None) -> None:
    """Refuse an engine whose vocabulary head is not computed in `head_dtype`.

    Older versions ignore the setting, and a platform may fall back to the model's dtype, both without a word.

    Args:
        head: as head_of, where the model is in other processes.

    Raises:
        UnsupportedOption: says what it computes in.
    """
    name, of_head = head_of(live_runner(llm).model) if head is None else head
    found = of_head or str(llm.vllm_config.model_config.dtype).removeprefix("torch.")
    if found == head_dtype:
        return
    others = f"model.head_dtype = {found!r}"
    if head_dtype == "float32":
        others += ", or generator.vllm.dtype = 'float32', which computes the whole model in it"
    raise UnsupportedOption(
        f"model.head_dtype = {head_dtype!r}: vllm {vllm.__version__} computes the head of {name} in "
        f"{found} here, so only the learner would follow; allowed: {others}"
    )


def layerwise_reload(model: Any, model_config: Any, weights: Iterable[tuple[str, Any]]) -> None:
    """Load named tensors of the checkpoint's layout into a live model, as vLLM's own weight-transfer engines do."""
    reload: Any = importlib.import_module("vllm.model_executor.model_loader.reload")
    reload.initialize_layerwise_reload(model)
    model.load_weights(weights)
    reload.finalize_layerwise_reload(model, model_config)


def call_core(llm: Any, method: str, *arguments: Any) -> Any:
    """Call an LLMEngine's engine core, which lives in this process or in one of its own."""
    core = getattr(llm.engine_core, "engine_core", None)
    if core is None:
        return llm.engine_core.call_utility(method, *arguments)
    return getattr(core, method)(*arguments)


def has_batches(llm: Any) -> bool:
    """Whether an LLMEngine whose core is in this process has tokens on their way that no step has returned."""
    return bool(getattr(getattr(llm.engine_core, "engine_core", None), "batch_queue", None))
