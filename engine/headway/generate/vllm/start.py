"""From a model folder to a vLLM engine whose weights can be pushed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from headway.errors import ModelError, UnsupportedOption
from headway.generate.slots import MAX_POOL_BYTES
from headway.generate.vllm.adapters import adapter_arguments, serve_adapters
from headway.generate.vllm.engine import Limits, VLLMEngine
from headway.generate.vllm.kept import SamplerTap, returns_masks
from headway.generate.vllm.library import (
    check_arguments,
    check_head,
    engine_arguments,
    head_overrides,
    live_runner,
    load_vllm,
    num_kv_tokens,
    tensor_parallel,
    with_workers,
)
from headway.generate.vllm.sharded import EXTENSION, Workers, serve_workers
from headway.generate.vllm.weights import serve
from headway.model import Lora, Policy, load_policy
from headway.weights.served import TORCH_DTYPES

_log = logging.getLogger(__name__)
BLOCK_TOKENS = 32


@dataclass(frozen=True)
class Sizes:
    """What the engine must hold.

    Attributes:
        max_running: sequences at once; kv_tokens: of the cache, 0: what max_running sequences of the full context
            need, at most 4 GiB on a CPU, and what vLLM finds free on a GPU; prefill_tokens: prompt tokens of a step.
    """

    max_running: int
    kv_tokens: int
    prefill_tokens: int


def open_vllm(
    folder: Path,
    *,
    published_dtype: str,
    sizes: Sizes,
    kv: str,
    head_dtype: str = "float32",
    kept_sets: bool = False,
    options: Mapping[str, Any],
    decode: Callable[[Sequence[int]], str],
    lora: Lora | None = None,
) -> VLLMEngine:
    """An engine without any version in force.

    Args:
        folder: of the model, in transformers format; vLLM loads it too.
        published_dtype: of what will be pushed; vLLM computes in it unless options["dtype"] is "float32".
        kv: "keep" or "recompute"; head_dtype: of the product with the vocabulary head.
        kept_sets: whether requests may ask what their tokens were sampled from.
        options: vLLM's own engine arguments.
        lora: the adapters that will be pushed; None: all weights will be.

    Raises:
        UnsupportedOption: vLLM is missing, of an unknown version, or refuses an argument.
        ModelError: vLLM cannot load the model. WeightError: its weights cannot be written in place.
    """
    check_arguments(options)
    vllm = load_vllm()
    policy = load_policy(folder, published_dtype=published_dtype, with_grad=False, lora=lora)
    arguments = _arguments(folder, policy, published_dtype, sizes, options, on_gpu=torch.cuda.is_available())
    arguments["hf_overrides"] = head_overrides(options.get("hf_overrides"), head_dtype)
    if policy.adapters is not None:
        arguments |= adapter_arguments(vllm, policy.adapters)
    num_workers = tensor_parallel(options)
    prepared, masked = _prepared(vllm, arguments, num_workers, kept_sets=kept_sets)
    try:
        with with_workers(num_workers, eager=bool(arguments["enforce_eager"])):
            llm = vllm.LLMEngine.from_engine_args(prepared)
    except (ValueError, RuntimeError, NotImplementedError, AssertionError, OSError) as error:
        raise ModelError(f"vllm {vllm.__version__} cannot serve {folder}: {error}") from error
    workers = Workers(llm) if num_workers > 1 else None
    check_head(vllm, llm, head_dtype, workers.models[0].head if workers else None)
    limits = Limits(
        min(policy.context_length, int(llm.vllm_config.model_config.max_model_len)),
        policy.vocab_size,
        num_kv_tokens(llm),
        sizes.max_running,
    )
    tap = SamplerTap(llm) if kept_sets and not masked else None
    engine = VLLMEngine(
        vllm, llm, manifest=policy.manifest, limits=limits, kv=kv, decode=decode, tap=tap, workers=workers
    )
    _serve(engine, llm, policy, workers, folder)
    _log.info("vllm %s, %s, %d tokens of KV cache", vllm.__version__, arguments["dtype"], limits.pool_tokens)
    return engine


def _prepared(
    vllm: ModuleType, arguments: dict[str, Any], num_workers: int, *, kept_sets: bool
) -> tuple[Any, bool]:
    """vLLM's EngineArgs, and whether its outputs will have sampling masks.

    Raises:
        UnsupportedOption: kept sets are asked for where nothing can read them.
    """
    prepared = engine_arguments(vllm, arguments)
    if not kept_sets:
        return prepared, False
    if returns_masks(prepared):
        return engine_arguments(vllm, {**arguments, "return_sampling_mask": True}), True
    if num_workers > 1:
        raise UnsupportedOption(
            f"sampling.kept_sets = 'carry' with generator.vllm.tensor_parallel_size = {num_workers}: this vLLM's "
            "sampler runs in a worker process and does not return them; allowed: tensor_parallel_size = 1, or "
            "kept_sets = 'ignore'"
        )
    return prepared, False


def _serve(engine: VLLMEngine, llm: Any, policy: Policy, workers: Workers | None, folder: Path) -> None:
    """Tell an engine how its weights, or its adapters, are written."""
    if workers is not None:
        engine.serve(serve_workers(workers, policy.manifest, policy.flat, engine))
    elif policy.adapters is None:
        engine.serve(serve(live_runner(llm), policy.manifest, policy.flat, engine))
    else:
        adapter, served = serve_adapters(llm, policy.manifest, policy.adapters, engine, folder)
        engine.serve(served, adapter)


def _arguments(
    folder: Path,
    policy: Policy,
    published_dtype: str,
    sizes: Sizes,
    options: Mapping[str, Any],
    *,
    on_gpu: bool,
) -> dict[str, Any]:
    dtype = str(options.get("dtype", published_dtype))
    if dtype not in (published_dtype, "float32"):
        raise UnsupportedOption(
            f"generator.vllm.dtype = {dtype!r}: weights are published in {published_dtype} (push.dtype) and cannot be "
            f"rounded again on arrival; allowed: {published_dtype!r}, 'float32'"
        )
    num_workers = tensor_parallel(options)
    arguments: dict[str, Any] = {
        "enforce_eager": not on_gpu,
        "max_model_len": policy.context_length,
        "block_size": BLOCK_TOKENS,
        "enable_prefix_caching": True,
        **options,
        "dtype": dtype,
        "model": str(folder),
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "max_num_seqs": sizes.max_running,
        "max_num_batched_tokens": max(sizes.prefill_tokens, sizes.max_running),
        "async_scheduling": False,
        "distributed_executor_backend": "mp" if num_workers > 1 else "uni",
        "disable_log_stats": True,
    }
    if num_workers > 1:
        arguments["worker_extension_cls"] = EXTENSION
    if not on_gpu:
        # A prompt whose prefill is split takes a sample back, which seeded sampling on a CPU cannot.
        if options.get("enable_chunked_prefill"):
            raise UnsupportedOption(
                "generator.vllm.enable_chunked_prefill = True: not on a CPU, where vLLM's seeded sampling fails then; "
                "allowed: False"
            )
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(
            arguments["max_num_batched_tokens"], int(arguments["max_model_len"])
        )
    if sizes.kv_tokens or not on_gpu:
        size = TORCH_DTYPES[dtype].itemsize
        num_kv_heads = max(1, policy.num_kv_heads // num_workers)  # of one worker, as the size that is given
        token_bytes = 2 * policy.num_layers * num_kv_heads * policy.head_dim * size
        wanted = sizes.kv_tokens or min(
            sizes.max_running * int(arguments["max_model_len"]), MAX_POOL_BYTES // token_bytes
        )
        blocks = -(-wanted // int(arguments["block_size"]))
        arguments["kv_cache_memory_bytes"] = (blocks + 2) * int(arguments["block_size"]) * token_bytes
    return arguments
