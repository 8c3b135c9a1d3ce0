"""A push of adapters into vLLM: its own LoRA layers hold them in stacked tensors, which a slice table leads into.

vLLM loads one adapter at start, from a folder of noise that PEFT could have written, and puts it into its only slot;
every request names it. The folder is the proof: what vLLM's loader made of it must be what the table writes. From then
on a push is copies along the table. The base stays as vLLM has loaded it, packed or not.

vLLM multiplies B by alpha / r when it loads an adapter and never again. What headway publishes holds that factor
(headway.model.lora), so the folder says alpha = r, and the live tensors hold what is published, bit for bit.
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from headway.errors import UnsupportedOption, WeightError
from headway.generate.vllm.library import live_runner
from headway.generate.vllm.weights import EngineSide, VLLMServed
from headway.model import Adapters, write_adapter
from headway.types import Manifest, TensorSpec
from headway.weights.served import published_dtype
from headway_kernels.weight_delta import Run, SliceTable, apply_slices, whole

_log = logging.getLogger(__name__)
NAME, NUMBER = "headway", 1


def adapter_arguments(vllm: ModuleType, adapters: Adapters) -> dict[str, Any]:
    """vLLM's engine arguments for one adapter.

    Raises:
        UnsupportedOption: it has no room for the rank.
    """
    from vllm.config.lora import LoRAConfig  # pyright: ignore[reportMissingImports]

    rank = adapters.lora.rank
    ranks = _ranks(LoRAConfig)
    room = [largest for largest in ranks if largest >= rank]
    if ranks and not room:
        raise UnsupportedOption(
            f"model.lora.rank = {rank}: vllm {vllm.__version__} has no room for it; allowed: 1 to {max(ranks)}"
        )
    arguments: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(room, default=rank),
    }
    if any(field.name == "lora_target_modules" for field in dataclasses.fields(vllm.EngineArgs)):
        leaves = {name.rpartition(".")[2] for name in adapters.layers}
        arguments["lora_target_modules"] = sorted(leaves)  # else every layer computes with zeros
    return arguments


def _ranks(settings: Any) -> tuple[int, ...]:
    """Sizes that vLLM makes room for; () if it does not say."""
    annotation = typing.get_type_hints(settings).get("max_lora_rank")
    return tuple(size for size in typing.get_args(annotation) if isinstance(size, int))


@dataclass(frozen=True)
class Slot:
    """Where one layer's adapter lies.

    Attributes:
        a: [R, in] and b: [out, R], live; R >= r, and what is beyond r is zero.
    """

    a: Tensor
    b: Tensor


def slots_of(llm: Any) -> Mapping[str, Slot]:
    """The slot of every layer that could have an adapter, by the layer's published name.

    Raises:
        WeightError: this vLLM holds its adapters in a way that is not known here.
    """
    manager: Any = getattr(getattr(live_runner(llm), "lora_manager", None), "_adapter_manager", None)
    if manager is None or not hasattr(manager, "lora_index_to_id"):
        raise WeightError(
            "model.lora.rank: this vLLM keeps its adapters in a way that is not known here; allowed: 0"
        )
    index = manager.lora_index_to_id.index(NUMBER)
    slots: dict[str, Slot] = {}
    for name, layer in manager.modules.items():
        stacked_a: Any = getattr(layer, "lora_a_stacked", None)
        stacked_b: Any = getattr(layer, "lora_b_stacked", None)
        parts: list[str] = manager.packed_modules.get(name, [name])
        if not isinstance(stacked_a, tuple) or not len(parts) == len(stacked_a) == len(stacked_b):
            continue  # of another kind than linear, or stacked otherwise
        for part, a, b in zip(parts, stacked_a, stacked_b, strict=True):
            slots[part] = Slot(a[index, 0], b[index, 0])
    return slots


def build_adapter_table(manifest: Manifest, slots: Mapping[str, Slot]) -> tuple[SliceTable, list[Tensor]]:
    """The table from the manifest's flat buffer to the slots, and the live tensors it leads to.

    Raises:
        WeightError: names a layer whose adapter has no slot, or one of another shape.
    """
    tensors: list[Tensor] = []
    runs: list[Run] = []
    for number, spec in enumerate(manifest.tensors):
        layer, factor, _ = spec.name.rsplit(".", 2)
        slot = slots.get(layer)
        if slot is None:
            raise WeightError(
                f"model.lora.targets: vLLM has no adapter of its own for {layer}, so it cannot be pushed; take "
                f"{layer.rpartition('.')[2]} out"
            )
        live = slot.a if factor == "lora_A" else slot.b
        tensors.append(live)
        runs.append(_run(spec, factor, live, number))
    return SliceTable.build(manifest.num_elements, [tensor.numel() for tensor in tensors], runs), tensors


def _run(spec: TensorSpec, factor: str, live: Tensor, number: int) -> Run:
    """A fills the first rows of its tensor, B the first columns."""
    rows, columns = spec.shape
    fits = live.shape[1] == columns if factor == "lora_A" else live.shape[0] == rows
    if not fits or live.shape[0] < rows or live.shape[1] < columns or not live.is_contiguous():
        raise WeightError(f"{spec.name} {spec.shape} does not fit vLLM's {list(live.shape)}")
    if factor == "lora_A":
        return Run(spec.offset, rows * columns, number, 0)
    return Run(spec.offset, columns, number, 0, rows=rows, source_stride=columns, row_stride=live.shape[1])


def serve_adapters(
    llm: Any, manifest: Manifest, adapters: Adapters, engine: EngineSide, base: Path
) -> tuple[Any, VLLMServed]:
    """Give vLLM its adapter; the LoRARequest that names it, and the way of pushing into it.

    Args:
        llm: an engine made with `adapter_arguments`; base: folder of the model.

    Raises:
        WeightError: a layer's adapter cannot be written in place, or the table and vLLM's loader disagree.
    """
    noise = torch.zeros(manifest.num_elements, dtype=published_dtype(manifest))
    draw = torch.Generator().manual_seed(0)
    for spec in manifest.tensors:
        noise[spec.offset : spec.offset + spec.size] = torch.randn(spec.size, generator=draw)
    request = _load(llm, manifest, noise, adapters, base)
    table, tensors = build_adapter_table(manifest, slots_of(llm))
    prove_adapters(table, tensors, noise)
    _log.info("adapters are written in place: %d tensors of rank %d", len(tensors), adapters.lora.rank)
    return request, VLLMServed(table, tensors, manifest, engine)


def _load(llm: Any, manifest: Manifest, flat: Tensor, adapters: Adapters, base: Path) -> Any:
    """Let vLLM load `flat` as an adapter and keep it; the request that names it."""
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    tensors = {
        spec.name: flat[spec.offset : spec.offset + spec.size].view(spec.shape) for spec in manifest.tensors
    }
    with tempfile.TemporaryDirectory(prefix="headway-adapter-") as room:
        folder = Path(room) / NAME
        write_adapter(folder, tensors, rank=adapters.lora.rank, targets=adapters.targets, base=str(base))
        request = LoRARequest(NAME, NUMBER, str(folder))
        try:
            loaded = llm.add_lora(request) and llm.pin_lora(NUMBER)
        except (ValueError, RuntimeError, KeyError, AssertionError) as error:
            raise WeightError(f"model.lora: vLLM cannot load these adapters: {error}") from error
    if not loaded:
        raise WeightError("model.lora: vLLM did not take the adapter")
    return request


def prove_adapters(table: SliceTable, tensors: Sequence[Tensor], loaded: Tensor) -> None:
    """Write what vLLM has loaded along the table, and compare; afterwards the adapters are zero.

    Args:
        loaded: published values [num_elements].

    Raises:
        WeightError: an element differs.
    """
    before = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    apply_slices(whole(loaded), table, list(tensors), cast=True)
    for index, (old, tensor) in enumerate(zip(before, tensors, strict=True)):
        if not torch.equal(old, tensor):
            raise WeightError(
                f"the slice table writes other values into adapter {index} {list(tensor.shape)} than vLLM's loader"
            )
        tensor.zero_()
