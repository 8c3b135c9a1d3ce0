"""A push into vLLM's live parameters: where each published tensor lands, proved once against vLLM's own loader.

vLLM loads the model folder itself, so at start its parameters hold what its loader made of the folder. The rules
come from the model class's own `packed_modules_mapping` (qkv_proj from q, k and v; gate_up_proj from gate and up);
a tensor that no rule covers stops the start by name, or takes the fallback. Before the first push the table is
proved: the folder's weights, sent along the table, must be what is there. From then on a push is copies along it.

On a CPU vLLM multiplies by packed copies of the matrices and drops the matrices. They are put back here, and the
layers multiply by them: a packed copy could not be written in place. The packed layer is still there for the proof.

Where the table cannot be made, every push hands all tensors to vLLM's layerwise reload, which is slower: chosen
once, and reported.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headway.errors import WeightError
from headway.types import Manifest, PolicyVersion
from headway.weights.digest import byte_view
from headway.weights.served import InPlace, SlicedServed, published_dtype, write_flat
from headway.weights.slices import Rule, Target, build_table
from headway_kernels.weight_delta import Delta, SliceTable, apply_slices, whole

_log = logging.getLogger(__name__)
_PROOF_ROWS = 4
_PROOF_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@dataclass(frozen=True)
class Packed:
    """A layer that multiplied by a packed copy.

    Attributes:
        layer: vLLM's; multiply: as it did, x [n, in] -> [n, out] without a bias. weight: put back, to be filled.
    """

    layer: torch.nn.Module
    multiply: Callable[[Tensor], Tensor]
    weight: Tensor


class EngineSide(Protocol):
    """What a push tells the engine."""

    def tear(self) -> None:
        """Called before the first element is written."""
        ...

    def put(self, version: PolicyVersion) -> None:
        """Called after the last one."""
        ...


def rules_of(model: torch.nn.Module, manifest: Manifest) -> list[Rule]:
    """Rules for every published name, from what the model class says that it fuses."""
    return rules_over(fused_parts(model), {name for name, _ in model.named_parameters()}, manifest)


def fused_parts(model: torch.nn.Module) -> dict[str, list[str]]:
    """What the model class says that it fuses: a fused module's name, and its parts' in order."""
    return dict(getattr(model, "packed_modules_mapping", {}))


def rules_over(mapping: Mapping[str, Sequence[str]], live: Container[str], manifest: Manifest) -> list[Rule]:
    """As rules_of, from fused_parts and the names of the engine's parameters."""
    rules: list[Rule] = []
    for fused, parts in mapping.items():
        for part in parts:
            pattern = rf"(.*)\.{re.escape(part)}\.(weight|bias)"
            matches = [re.fullmatch(pattern, spec.name) for spec in manifest.tensors]
            if any(match.expand(rf"\1.{fused}.\2") in live for match in matches if match):
                rules.append(Rule(pattern, rf"\1.{fused}.\2", stack=(part, tuple(parts))))
    aliases = [alias for spec in manifest.tensors for alias in spec.aliases if alias not in live]
    rules += [Rule(re.escape(alias), "") for alias in aliases]  # tied, and one tensor in the engine
    return [*rules, Rule(r".*", r"\g<0>")]


def packed_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any, tuple[int, int]]]:
    """Name, layer and matrix [out, in] of those that multiply by a packed copy, as a CPU build has them."""
    for name, layer in model.named_modules():
        attributes: Any = layer
        if not hasattr(layer, "cpu_linear"):
            continue
        if attributes.weight.numel():
            yield name, layer, tuple(attributes.weight.shape)
        else:  # dropped
            outputs = getattr(attributes, "output_size_per_partition", None) or attributes.output_size
            inputs = getattr(attributes, "input_size_per_partition", None) or attributes.input_size
            yield name, layer, (outputs, inputs)


def unpack(model: torch.nn.Module) -> list[Packed]:
    """Put the matrices of packed layers back; they multiply by them from now on."""
    packed: list[Packed] = []
    for _, layer, shape in packed_layers(model):
        old, attributes = layer.cpu_linear, layer
        weight: Tensor = attributes.weight
        if weight.numel() == 0:
            weight = torch.zeros(shape, dtype=weight.dtype)
            attributes.weight = torch.nn.Parameter(weight, requires_grad=False)
        bias: Tensor | None = getattr(attributes, "bias", None)
        if bias is not None and bias.dtype != weight.dtype:  # some packed kernels want it in fp32
            bias.data = bias.data.to(weight.dtype)
        attributes.cpu_linear = torch.nn.functional.linear
        given = attributes.weight
        packed.append(Packed(layer, lambda x, old=old, given=given: old(x, given, None), given))
    return packed


def targets_of(model: torch.nn.Module, manifest: Manifest) -> list[Target]:
    """The engine's parameters, dropped matrices included; rows that only pad a vocabulary are left out.

    vLLM pads vocabularies to a multiple of 64: rows beyond the published ones are masked by it and stay zero.
    """
    published = {name: spec.shape for spec in manifest.tensors for name in (spec.name, *spec.aliases)}
    dropped = {f"{name}.weight": shape for name, _, shape in packed_layers(model)}
    targets: list[Target] = []
    for name, parameter in model.named_parameters():
        shape = dropped.get(name, tuple(parameter.shape))
        wanted = published.get(name, shape)
        if len(shape) == len(wanted) == 2 and shape[0] > wanted[0]:
            shape = (wanted[0], shape[1])
        targets.append(Target(name, shape))
    return targets


def live_tensors(model: torch.nn.Module, targets: Sequence[Target]) -> list[Tensor]:
    """The memory of the targets, once `unpack` has put every matrix back."""
    parameters = dict(model.named_parameters())
    return [parameters[target.name].detach()[: target.shape[0]] for target in targets]


def prove(table: SliceTable, tensors: Sequence[Tensor], packed: Sequence[Packed], folder: Tensor) -> None:
    """Write the folder's weights along the table, and compare with what vLLM's loader had made of them.

    Args:
        folder: published values [num_elements], of the published dtype. Afterwards they are what is served.

    Raises:
        WeightError: an element differs, or a layer that was packed computes something else.
    """
    restored = {layer.weight.data_ptr() for layer in packed}
    fresh = [tensor.data_ptr() in restored for tensor in tensors]
    prove_copies(lambda delta: apply_slices(delta, table, tensors, cast=True), tensors, fresh, folder)
    prove_products(packed)


def prove_copies(
    write: Callable[[Delta], None], tensors: Sequence[Tensor], fresh: Sequence[bool], folder: Tensor
) -> None:
    """Write the folder's weights along the table, and compare with what vLLM's loader had made of them.

    Args:
        write: along the table; fresh: of each tensor, whether vLLM's loader left nothing in it.

    Raises:
        WeightError: an element differs.
    """
    before = [None if new else tensor.clone() for new, tensor in zip(fresh, tensors, strict=True)]
    write(whole(folder))
    for index, (old, tensor) in enumerate(zip(before, tensors, strict=True)):
        if old is not None and not torch.equal(old, tensor):
            raise WeightError(
                f"the slice table writes other values into tensor {index} {list(tensor.shape)} than vLLM's loader"
            )


def prove_products(packed: Sequence[Packed]) -> None:
    """Compare what packed layers computed with products by the matrices that were put back and written.

    Raises:
        WeightError: a layer computes something else.
    """
    noise = torch.Generator().manual_seed(0)
    for layer in packed:
        x = torch.randn(_PROOF_ROWS, layer.weight.shape[1], generator=noise).to(layer.weight.dtype)
        theirs, mine = layer.multiply(x).float(), torch.nn.functional.linear(x, layer.weight).float()
        bound = _PROOF_TOLERANCE[layer.weight.dtype] * max(1.0, float(theirs.abs().max()))
        if not float((theirs - mine).abs().max()) <= bound:
            raise WeightError(
                f"a packed {type(layer.layer).__name__} {list(layer.weight.shape)} computes something else than the "
                "matrix that the slice table puts in its place"
            )


def named(manifest: Manifest, state: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Every published name, tied ones included, with its values out of a flat [num_elements]."""
    for spec in manifest.tensors:
        values = state[spec.offset : spec.offset + spec.size].view(spec.shape)
        for name in (spec.name, *spec.aliases):
            yield name, values


class VLLMServed(SlicedServed):
    """Served along a slice table.

    Args:
        table, tensors, manifest: as SlicedServed; engine: told when a write begins and when it is whole.
    """

    def __init__(
        self, table: SliceTable, tensors: Sequence[Tensor], manifest: Manifest, engine: EngineSide
    ) -> None:
        super().__init__(table, tensors, manifest, engine.put)
        self._engine = engine

    def write(self, version: PolicyVersion, deltas: Sequence[Delta]) -> None:
        """See Served."""
        self._engine.tear()
        super().write(version, deltas)


class ReloadServed(InPlace):
    """Served through vLLM's layerwise reload: each push hands every tensor over again.

    What is read back is what was handed over: vLLM's own copies are behind its loader.
    """

    def __init__(self, runner: Any, manifest: Manifest, folder: Tensor, engine: EngineSide) -> None:
        self._runner, self._manifest, self._engine = runner, manifest, engine
        self._state = folder.to(published_dtype(manifest)).clone()

    @property
    def swaps(self) -> bool:
        """Never."""
        return False

    def write(self, version: PolicyVersion, deltas: Sequence[Delta]) -> None:
        """See Served."""
        self._engine.tear()
        for delta in deltas:
            write_flat(delta, self._state)
        self._reload()
        self._engine.put(version)

    def _reload(self) -> None:
        self._runner.reload_weights(weights_iterator=named(self._manifest, self._state))

    def swap(self, version: PolicyVersion, state: Tensor) -> None:
        """Refused."""
        raise WeightError("weights behind vLLM's loader cannot be swapped")

    def read(self, start: int, end: int) -> memoryview:
        """See Served."""
        return byte_view(self._state[start:end])


def serve(runner: Any, manifest: Manifest, folder: Tensor, engine: EngineSide) -> VLLMServed | ReloadServed:
    """The way of pushing into this model.

    Args:
        runner: vLLM's; folder: the model folder's published values [num_elements], which vLLM has loaded.

    Raises:
        WeightError: the table and vLLM's loader disagree.
    """
    model: torch.nn.Module = runner.model
    targets = targets_of(model, manifest)
    try:
        table = build_table(manifest, targets, rules_of(model, manifest))
    except WeightError as error:
        _log.warning("weights go through vLLM's layerwise reload, which is slower: %s", error)
        return ReloadServed(runner, manifest, folder, engine)
    packed = unpack(model)
    tensors = live_tensors(model, targets)
    prove(table, tensors, packed, folder.to(published_dtype(manifest)))
    _log.info(
        "weights are written in place: %d tensors into %d of vLLM's, proved against its loader",
        len(manifest.tensors),
        len(tensors),
    )
    return VLLMServed(table, tensors, manifest, engine)
