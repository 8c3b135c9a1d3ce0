"""Sampling of the next token, with its log-prob under the distribution that it was drawn from.

Comes in: logits [N, V], a temperature, a seed and a position per row. Goes out: tokens [N] and log-probs [N].
Called by the generator once a decode step, under no_grad. A row's draw depends on its own logits,
temperature, seed and position alone, so a request's tokens do not depend on what it was batched with.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

from ctypes import CDLL
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from headway_kernels import native
from headway_kernels.errors import BackendUnavailable, ShapeError, UnsupportedOption

Backend = Literal["auto", "cpu", "reference"]


def sample_tokens(
    logits: torch.Tensor,
    inv_temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    backend: Backend = "auto",
    num_threads: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row from softmax(logits * inv_temperature), by inversion of its distribution function.

    The uniform number comes from `uniforms(seeds, positions)`. Both backends draw the same token unless the
    uniform number lies within rounding of a boundary between two tokens. A token whose logit is -inf is never
    drawn.

    Args:
        logits: [N, V] float32 CPU, V >= 1, rows of any stride; -inf masks a token.
        inv_temperature: [N] float32 > 0; inf takes the first of the largest logits and reports its log-prob
            at temperature 1.
        seeds: [N] int64, one a request.
        positions: [N] int64, the index of the token within its request.
        backend: "cpu" is the native library, "reference" numpy in float64.
        num_threads: of the native library; torch.get_num_threads() by default.

    Returns:
        tokens [N] int64 and log-probs [N] float32, the latter within 1e-6 * max(1, |logit|) of exact. A row
        with a NaN, a +inf or nothing but -inf gets token -1 and log-prob NaN: the caller counts it.

    Raises:
        ShapeError: shapes or dtypes do not fit, or an inverse temperature is not positive.
        UnsupportedOption: an unknown backend.
        BackendUnavailable: backend "cpu" and no native library.
    """
    _check(logits, inv_temperature, seeds, positions)
    if backend not in ("auto", "cpu", "reference"):
        raise UnsupportedOption(f"sampling: backend {backend!r}; expected 'auto', 'cpu' or 'reference'")
    lib = None if backend == "reference" else native.library()
    if lib is None and backend == "cpu":
        raise BackendUnavailable(f"sampling: backend 'cpu' is not available: {native.why_not()}")
    if lib is None:
        return _reference(logits, inv_temperature, seeds, positions)
    threads = torch.get_num_threads() if num_threads is None else num_threads
    return _native(lib, logits, inv_temperature, seeds, positions, threads)


def uniforms(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), 53 bits each, from Philox4x32-10: key = seed, counter = position.

    J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

    Args:
        seeds: [N], every bit counts.
        positions: [N].
    """
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    key, counter = seeds.astype(np.uint64), positions.astype(np.uint64)
    k0, k1 = key & low, key >> half
    c0, c1 = counter & low, counter >> half
    c2, c3 = np.zeros_like(c0), np.zeros_like(c0)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ k0, b & low, (a >> half) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    bits = ((c0 >> np.uint64(5)) << np.uint64(26)) | (c1 >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53


def _check(
    logits: torch.Tensor, inv_temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> None:
    if (
        logits.dim() != 2
        or logits.shape[1] == 0
        or logits.dtype != torch.float32
        or logits.device.type != "cpu"
    ):
        raise ShapeError(
            f"sampling: logits are {logits.dtype} {tuple(logits.shape)} on {logits.device}; "
            "expected float32 [N, V >= 1] on the CPU"
        )
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ShapeError("sampling: the last dimension of logits must be contiguous")
    for name, tensor, dtype in (
        ("inv_temperature", inv_temperature, torch.float32),
        ("seeds", seeds, torch.int64),
        ("positions", positions, torch.int64),
    ):
        if tensor.dtype != dtype or tensor.shape != logits.shape[:1] or tensor.device.type != "cpu":
            raise ShapeError(
                f"sampling: {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; "
                f"expected {dtype} ({logits.shape[0]},) on the CPU"
            )
    refused = ~(inv_temperature.numpy() > 0)
    if refused.any():
        row = int(refused.argmax())
        raise ShapeError(
            f"sampling: inv_temperature[{row}] is {float(inv_temperature[row])}; "
            "expected > 0 (inf takes the maximum)"
        )


def _native(
    lib: CDLL,
    logits: torch.Tensor,
    inv_temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    threads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, vocab_size = logits.shape
    inv_temperature, seeds, positions = (
        inv_temperature.contiguous(),
        seeds.contiguous(),
        positions.contiguous(),
    )
    tokens = torch.empty(num_rows, dtype=torch.int64)
    logprobs = torch.empty(num_rows, dtype=torch.float32)
    lib.headway_sample_tokens(
        logits.data_ptr(),
        logits.stride(0),
        num_rows,
        vocab_size,
        inv_temperature.data_ptr(),
        seeds.data_ptr(),
        positions.data_ptr(),
        tokens.data_ptr(),
        logprobs.data_ptr(),
        threads,
    )
    return tokens, logprobs


def _reference(
    logits: torch.Tensor, inv_temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows = logits.shape[0]
    draws = uniforms(seeds.numpy(), positions.numpy())
    scales = inv_temperature.numpy().astype(np.float64)
    tokens = np.full(num_rows, -1, dtype=np.int64)
    logprobs = np.full(num_rows, np.nan, dtype=np.float64)
    for i in range(num_rows):  # a row at a time: float64 copies of all rows would be twice the logits
        row = logits[i].detach().numpy().astype(np.float64)
        top = row.max()
        if not np.isfinite(top):
            continue
        greedy = np.isinf(scales[i])
        relative = (row - top) * (1.0 if greedy else scales[i])
        cumulative = np.cumsum(np.exp(relative))
        # target < the last sum, so the first sum above it exists; its own weight is positive.
        target = draws[i] * cumulative[-1]
        token = int(row.argmax()) if greedy else int(np.searchsorted(cumulative, target, side="right"))
        tokens[i] = token
        logprobs[i] = relative[token] - np.log(cumulative[-1])
    return torch.from_numpy(tokens), torch.from_numpy(logprobs).float()
