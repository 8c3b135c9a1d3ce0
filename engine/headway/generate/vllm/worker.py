"""What headway runs inside vLLM's worker processes: the model described, its parameters shared with the generator.

vLLM mixes WeightWorker into its worker class (engine argument `worker_extension_cls`); headway.generate.vllm.sharded
calls it through vLLM's collective_rpc, at start and never for a push: a push is written into memory that both sides
have mapped. On a CPU the parameters are moved into a segment of the generator's; on a GPU they stay where they are,
and the generator opens their memory by CUDA's IPC handles.
"""

from __future__ import annotations

import ctypes
import glob
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from headway.errors import WeightError
from headway.generate.vllm.library import head_of
from headway.generate.vllm.weights import Packed, fused_parts, named, packed_layers, prove_products, unpack
from headway.types import Manifest
from headway.weights.digest import tensor_over
from headway.weights.segment import SharedSegment, shared_directory
from headway.weights.served import published_dtype

ALIGNMENT = 64
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Split:
    """How the ranks share one parameter.

    Attributes:
        dimension: that they split, None: every rank has all of it.
        parts: sizes along it of what a fused parameter is stacked from, on one rank; empty: not fused.
        padded: sum of the ranks' sizes along it where the last rows only pad a vocabulary; else 0.
    """

    dimension: int | None = None
    parts: tuple[int, ...] = ()
    padded: int = 0


@dataclass(frozen=True)
class Slot:
    """One parameter of a rank.

    Attributes:
        shape: with dropped matrices put back, without the rows that only pad a vocabulary.
        num_bytes: of the memory that it needs, padding included; fresh: vLLM dropped what its loader had put there.
    """

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    fresh: bool
    split: Split


@dataclass(frozen=True)
class WorkerModel:
    """One rank's model.

    Attributes:
        head: as library.head_of; fused: as weights.fused_parts; slots: in the order of its parameters.
    """

    head: tuple[str, str]
    fused: dict[str, list[str]]
    slots: list[Slot]

    @property
    def num_bytes(self) -> int:
        """Of a segment that holds all parameters."""
        return sum(_aligned(slot.num_bytes) for slot in self.slots)


@dataclass(frozen=True)
class Place:
    """Where a shared parameter is: in the segment, or behind torch's function that opens a CUDA tensor."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    opened_by: tuple[Any, tuple[Any, ...]] | None = None

    def open(self, segment: SharedSegment | None) -> Tensor:
        """The tensor, in this process."""
        if self.opened_by is not None:
            function, arguments = self.opened_by
            return function(*arguments)
        assert segment is not None
        size = self.dtype.itemsize * torch.Size(self.shape).numel()
        data = memoryview(segment.memory)[self.offset : self.offset + size]
        return tensor_over(data, self.dtype).view(self.shape)


class WeightWorker:
    """Mixed into vLLM's worker; every name is prefixed, for vLLM refuses one that its worker has."""

    model_runner: Any  # the worker's, as is the rank
    rank: int
    headway_packed: list[Packed]
    headway_state: Tensor

    def headway_describe(self, parent: int) -> WorkerModel:
        """The model of this rank. From now on the worker ends with the process `parent`, which started it."""
        end_with_parent(parent)
        _unlink_collectives()
        model: torch.nn.Module = self.model_runner.model
        return WorkerModel(head_of(model), fused_parts(model), describe(model))

    def headway_share(self, names: list[str]) -> list[Place]:
        """Put the parameters where the generator can write them.

        Args:
            names: of each rank's segment; empty: the parameters are on GPUs.
        """
        model: torch.nn.Module = self.model_runner.model
        self.headway_packed = unpack(model)
        parameters = [parameter for _, parameter in model.named_parameters() if parameter.numel()]
        if names:
            return _move(parameters, SharedSegment(names[self.rank], None))
        return [Place(0, tuple(each.shape), each.dtype, reduce_tensor(each.detach())) for each in parameters]

    def headway_prove(self) -> str:
        """After the first write: why a layer that was packed computes something else; empty if none does."""
        try:
            prove_products(self.headway_packed)
        except WeightError as error:
            return str(error)
        self.headway_packed = []
        return ""

    def headway_attach(self, name: str, manifest: Manifest) -> None:
        """Map the published state, for `headway_reload`."""
        dtype = published_dtype(manifest)
        data = memoryview(SharedSegment(name, None).memory)[: manifest.num_elements * dtype.itemsize]
        self.headway_state = tensor_over(data, dtype)

    def headway_reload(self, manifest: Manifest) -> None:
        """vLLM's layerwise reload of all that the state holds."""
        device = next(self.model_runner.model.parameters()).device
        pairs = named(manifest, self.headway_state)
        self.model_runner.reload_weights(weights_iterator=((name, t.to(device)) for name, t in pairs))


def describe(model: torch.nn.Module) -> list[Slot]:
    """The parameters of one rank's model, before anything was put back."""
    dropped = {f"{name}.weight": shape for name, _, shape in packed_layers(model)}
    slots: list[Slot] = []
    for name, parameter in model.named_parameters():
        shape = tuple(dropped.get(name, parameter.shape))
        num_bytes = parameter.element_size() * torch.Size(shape).numel()
        layer: Any = model.get_submodule(name.rpartition(".")[0])
        split = split_of(layer, parameter, shape)
        if split.padded:
            shape = (layer.shard_indices.num_org_elements, *shape[1:])
        slots.append(Slot(name, shape, num_bytes, parameter.numel() == 0, split))
    return slots


def split_of(layer: Any, parameter: Any, shape: tuple[int, ...]) -> Split:
    """How vLLM's ranks share a parameter of one of its layers, by what the layer says of itself."""
    ranks = int(getattr(layer, "tp_size", 1))
    if ranks == 1:
        return Split()
    if hasattr(layer, "shard_indices"):
        return Split() if layer.num_added_embeddings else Split(0, padded=shape[0] * ranks)
    for side, usual in (("input", 1), ("output", 0)):
        # A matrix [out, in] that a packed layer has dropped leaves a parameter that says nothing of itself.
        dimension = getattr(parameter, f"{side}_dim", usual if usual < len(shape) else None)
        whole = getattr(layer, f"{side}_size", None)
        if dimension is not None and whole != getattr(layer, f"{side}_size_per_partition", whole):
            sizes = getattr(layer, "output_sizes", ()) if side == "output" else ()
            return Split(int(dimension), tuple(int(size) // ranks for size in sizes))
    return Split()


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, be it stopped or deep in a collective.

    Args:
        parent: process id of the starter; one that is gone already ends this process now.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _unlink_collectives() -> None:
    """Take the names off the memory of vLLM's CPU collectives, which it never does; all ranks have it mapped."""
    identity = os.environ.get("VLLM_DIST_IDENT")
    if identity:
        for path in glob.glob(f"{shared_directory()}/{glob.escape(identity)}-*cpushm*"):
            Path(path).unlink(missing_ok=True)


def _move(parameters: list[torch.nn.Parameter], segment: SharedSegment) -> list[Place]:
    places: list[Place] = []
    offset = 0
    for parameter in parameters:
        place = Place(offset, tuple(parameter.shape), parameter.dtype)
        moved = place.open(segment)
        moved.copy_(parameter.detach())
        parameter.data = moved
        places.append(place)
        offset += _aligned(moved.numel() * moved.element_size())
    return places


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
