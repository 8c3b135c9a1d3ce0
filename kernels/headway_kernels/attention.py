"""Attention of ragged queries over a key-value pool or over a packed row with shared prefixes.

Comes in: query [N, Hq, D], key and value [M, Hkv, D], an AttentionPlan. Goes out: [N, Hq, D]. The generator
calls it under no_grad, once a layer of a step; the learner through autograd. Never blocks.

Legend: N query tokens, M key tokens, Hq query heads, Hkv key-value heads (Hq a multiple of it), D head
dimension.
"""

from __future__ import annotations

from ctypes import CDLL, byref
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from headway_kernels import native
from headway_kernels.attention_plan import AttentionPlan
from headway_kernels.attention_reference import reference_attention
from headway_kernels.errors import BackendUnavailable, ShapeError, UnsupportedOption

__all__ = ["AttentionPlan", "Backend", "run_attention"]

Backend = Literal["auto", "cpu", "reference"]
MAX_HEAD_DIM = 512  # headway::MAX_HEAD_DIM, the bound of the native library's scratch


def run_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    backend: Backend = "auto",
    num_threads: int | None = None,
) -> torch.Tensor:
    """softmax(scale * query . key) . value over the keys that the plan gives each query.

    The result does not depend on num_threads, nor on what lies outside a run's keys (NaN there does not
    leak). Both backends are deterministic; the native one is fp32 on the CPU and is what "auto" takes where
    it can.

    Args:
        query: [N, Hq, D]; any token and head strides, the last dimension contiguous. So too key and value.
        key: [M, Hkv, D].
        value: [M, Hkv, D].
        plan: for N queries and M keys.
        scale: factor of the scores, usually D ** -0.5.
        backend: "cpu" is the native library, "reference" plain PyTorch (any dtype and device).
        num_threads: of the native library; torch.get_num_threads() by default. 1 starts no thread.

    Returns:
        [N, Hq, D], contiguous; zeros for queries of no run. Differentiable once in query, key and value.

    Raises:
        ShapeError: shapes, dtypes or strides do not fit each other or the plan.
        UnsupportedOption: backend "cpu" for tensors that it does not take, or an unknown backend.
        BackendUnavailable: backend "cpu" and no native library.
    """
    _check(query, key, value, plan)
    lib = _choose(query, backend)
    if lib is None:
        return reference_attention(query, key, value, plan, scale)
    threads = torch.get_num_threads() if num_threads is None else num_threads
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return _NativeAttention.apply(query, key, value, plan, scale, threads)
    out = _new_output(query, plan)
    _forward(lib, query, key, value, plan, out, None, scale, threads)
    return out


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan) -> None:
    if query.dim() != 3 or key.dim() != 3 or key.shape != value.shape:
        raise ShapeError(
            f"attention: query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}; "
            "expected [N, Hq, D], [M, Hkv, D] and [M, Hkv, D]"
        )
    (num_queries, num_heads, dim), (num_keys, num_kv_heads, key_dim) = query.shape, key.shape
    if dim != key_dim or dim == 0 or num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ShapeError(
            f"attention: {num_heads} query heads of dimension {dim}, {num_kv_heads} key heads of {key_dim}; "
            "expected equal dimensions and a multiple of the key heads"
        )
    if num_queries != plan.num_queries or num_keys != plan.num_keys:
        raise ShapeError(
            f"attention: {num_queries} queries and {num_keys} keys, but the plan was made for "
            f"{plan.num_queries} and {plan.num_keys}"
        )
    if not query.dtype == key.dtype == value.dtype or not query.device == key.device == value.device:
        raise ShapeError(
            f"attention: query, key, value are {query.dtype} on {query.device}, {key.dtype} on {key.device}, "
            f"{value.dtype} on {value.device}; expected one dtype and one device"
        )
    if dim > 1 and not query.stride(2) == key.stride(2) == value.stride(2) == 1:
        raise ShapeError("attention: the last dimension of query, key and value must be contiguous")


def _choose(query: torch.Tensor, backend: str) -> CDLL | None:
    """The library to run on, or None for the reference."""
    if backend == "reference":
        return None
    fits = query.dtype == torch.float32 and query.device.type == "cpu" and query.shape[2] <= MAX_HEAD_DIM
    if backend == "auto":
        return native.library() if fits else None
    if backend != "cpu":
        raise UnsupportedOption(f"attention: backend {backend!r}; expected 'auto', 'cpu' or 'reference'")
    if not fits:
        raise UnsupportedOption(
            f"attention: backend 'cpu' takes float32 CPU tensors with head dimension <= {MAX_HEAD_DIM}, got "
            f"{query.dtype} on {query.device} with {query.shape[2]}; use 'auto' or 'reference'"
        )
    lib = native.library()
    if lib is None:
        raise BackendUnavailable(f"attention: backend 'cpu' is not available: {native.why_not()}")
    return lib


def _new_output(query: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    new = torch.empty if plan.covers_all else torch.zeros
    return new(query.shape, dtype=torch.float32)


def _view(tensor: torch.Tensor) -> native.ViewStruct:
    strides = tensor.stride()
    return native.ViewStruct(tensor.data_ptr(), strides[0], strides[1])


def _forward(
    lib: CDLL,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: AttentionPlan,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    threads: int,
) -> None:
    lib.headway_attention_forward(
        byref(plan.struct),
        byref(_view(query)),
        byref(_view(key)),
        byref(_view(value)),
        byref(_view(out)),
        None if lse is None else lse.data_ptr(),
        query.shape[1],
        key.shape[1],
        query.shape[2],
        scale,
        threads,
    )


class _NativeAttention(torch.autograd.Function):
    """The native forward and backward; saves the output and each row's log-sum-exp, never the scores."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: AttentionPlan,
        scale: float,
        threads: int,
    ) -> torch.Tensor:
        lib = native.library()
        assert lib is not None
        out = _new_output(query, plan)
        lse = torch.empty(query.shape[:2], dtype=torch.float32)
        _forward(lib, query, key, value, plan, out, lse, scale, threads)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.plan, ctx.scale, ctx.threads = plan, scale, threads
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the names
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        d_out = grad_outputs[0]
        if d_out.stride(2) != 1:
            d_out = d_out.contiguous()
        lib = native.library()
        assert lib is not None
        d_query = _new_output(query, ctx.plan)
        d_key, d_value = (torch.zeros(key.shape, dtype=torch.float32) for _ in range(2))
        lib.headway_attention_backward(
            byref(ctx.plan.struct),
            *(byref(_view(tensor)) for tensor in (query, key, value, out)),
            lse.data_ptr(),
            *(byref(_view(tensor)) for tensor in (d_out, d_query, d_key, d_value)),
            query.shape[1],
            key.shape[1],
            query.shape[2],
            ctx.scale,
            ctx.threads,
        )
        return d_query, d_key, d_value, None, None, None
