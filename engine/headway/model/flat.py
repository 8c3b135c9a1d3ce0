"""Flat parameters: one contiguous buffer that a module's parameters are views of.

One buffer makes an optimizer step, a gradient norm, a publish and an apply single passes over memory, and lets
both sides of a push agree on one order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import xxhash
from torch import Tensor, nn

from headway.errors import ModelError
from headway.types import Manifest, TensorSpec

ALIGNMENT = 16  # elements: 64 bytes in fp32, what vector loads and memcpy want


FROZEN = "(frozen parameters)"  # among the digests of buffers


def build_manifest(module: nn.Module, dtype: str, trained: Sequence[str] | None = None) -> Manifest:
    """Describe a module's parameters: matrices first (they are decayed), then the rest, each in module order.

    Args:
        module: its parameters must be floating point.
        dtype: of the published weights, "float32" or "bfloat16".
        trained: names of the parameters that the manifest holds, in their order; the others are frozen, and a digest
            of their values is among those of the buffers. None: it holds all.

    Raises:
        ModelError: a parameter is not floating point.
    """
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    by_name = dict(module.named_parameters(remove_duplicate=False))
    digests = _buffer_digests(module)
    if trained is not None:
        digests[FROZEN] = _frozen_digest(module, set(trained), dtype)
    for name in by_name if trained is None else trained:
        parameter = by_name[name]
        if not parameter.is_floating_point():
            raise ModelError(
                f"parameter {name} is {parameter.dtype}; only floating-point parameters can be trained"
            )
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    ordered = sorted(parameters, key=lambda key: parameters[key].dim() < 2)
    tensors: list[TensorSpec] = []
    offset = num_decayed = 0
    for key in ordered:
        parameter = parameters[key]
        decayed = parameter.dim() >= 2
        first, *aliases = names[key]
        tensors.append(TensorSpec(first, aliases, list(parameter.shape), offset, parameter.numel(), decayed))
        offset += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        num_decayed = offset if decayed else num_decayed
    return Manifest(dtype, tensors, offset, num_decayed, digests)


def _frozen_digest(module: nn.Module, trained: Collection[str], dtype: str) -> str:
    """Over names, shapes and values, as published, of the parameters that are not trained."""
    digest = xxhash.xxh3_64()
    for name, parameter in module.named_parameters():
        if name not in trained:
            values = parameter.detach().cpu()
            values = values.bfloat16() if dtype == "bfloat16" else values
            digest.update(f"{name} {list(parameter.shape)}\n".encode())
            digest.update(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _buffer_digests(module: nn.Module) -> dict[str, str]:
    """Digests of persistent and non-persistent buffers: a wrong rope table looks exactly like staleness."""
    return {
        name: xxhash.xxh3_64_hexdigest(buffer.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, buffer in module.named_buffers()
        if buffer.numel()
    }


def flatten(module: nn.Module, manifest: Manifest, *, with_grad: bool) -> tuple[Tensor, Tensor | None]:
    """Move a module's parameters into one fp32 buffer, in place.

    Args:
        module: its parameters become views of the buffer; those that the manifest does not hold are frozen.
        manifest: as build_manifest gives for this module. The buffers are on the module's device.
        with_grad: also make a gradient buffer that every `.grad` is a view of.

    Returns:
        (flat [num_elements] fp32, grad [num_elements] fp32 or None).
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
    flat = aligned_zeros(manifest.num_elements, device)
    grad = aligned_zeros(manifest.num_elements, device) if with_grad else None
    for parameter in parameters.values():
        parameter.requires_grad_(False)
    for spec in manifest.tensors:
        parameter = parameters[spec.name]
        view = flat[spec.offset : spec.offset + spec.size].view(spec.shape)
        view.copy_(parameter.detach())
        parameter.data = view
        parameter.requires_grad_(with_grad)
        if grad is not None:
            parameter.grad = grad[spec.offset : spec.offset + spec.size].view(spec.shape)
    return flat, grad


def rebind(module: nn.Module, manifest: Manifest, flat: Tensor) -> None:
    """Let a module's parameters be views of another flat buffer, without copying.

    Args:
        module: without gradients; manifest: its own. flat: fp32 [num_elements], which the caller keeps alive.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for spec in manifest.tensors:
        parameters[spec.name].data = flat[spec.offset : spec.offset + spec.size].view(spec.shape)


def aligned_zeros(num_elements: int, device: torch.device | str = "cpu") -> Tensor:
    """fp32 zeros [num_elements] that start on a 64-byte boundary."""
    raw = torch.zeros(num_elements + ALIGNMENT, dtype=torch.float32, device=device)
    shift = (-raw.data_ptr() % 64) // 4
    return raw[shift : shift + num_elements]
