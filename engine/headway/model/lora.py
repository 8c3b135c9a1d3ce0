"""Low-rank adapters: targeted linear layers compute y = W x + b + B A x, and only A [r, in] and B [out, r] are trained.

B holds the factor alpha / r of the usual form y = W x + b + (alpha / r) B A x, so that what is published is what every
engine multiplies by, whatever alpha is; the optimizer scales its steps so that training is that of the usual form
(docs/lora.md, docs/adr/0015). The layers keep their names, and their weights theirs; the adapters' are PEFT's:
NAME.lora_A.weight, NAME.lora_B.weight.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headway.config import RunConfig
from headway.errors import ModelError

FACTORS = ("lora_A.weight", "lora_B.weight")


@dataclass(frozen=True)
class Lora:
    """Which adapters a policy has.

    Attributes:
        rank: r; alpha: of alpha / r; targets: last parts of layers' names, none: every linear layer but the head.
        seed: of A; B starts at zero.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()
    seed: int = 0

    @staticmethod
    def of(config: RunConfig) -> Lora | None:
        """What a recipe asks for; None: all weights are trained."""
        lora = config.model.lora
        return Lora(lora.rank, lora.alpha, lora.targets, config.seed) if lora.rank else None

    @property
    def scale(self) -> float:
        """alpha / r."""
        return self.alpha / self.rank


@dataclass
class Switch:
    """Shared by the layers of a module: whether they add their adapters."""

    on: bool = True


class Factor(nn.Module):
    """A matrix [out, in] of an adapter; fp32."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in] -> [..., out]."""
        return nn.functional.linear(input, self.weight)


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter; weight and bias are those of the layer that it replaces."""

    def __init__(self, base: nn.Linear, rank: int, switch: Switch) -> None:
        nn.Module.__init__(self)  # nn.Linear's would make, and draw, a weight of its own
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        device = base.weight.device
        self.lora_A = Factor(torch.zeros(rank, self.in_features, device=device))
        self.lora_B = Factor(torch.zeros(self.out_features, rank, device=device))
        self._switch = switch

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in] -> [..., out]."""
        out = nn.functional.linear(input, self.weight, self.bias)
        return out + self.lora_B(self.lora_A(input)) if self._switch.on else out

    def merged(self) -> Tensor:
        """W + B A, [out, in]."""
        return self.weight.detach() + self.lora_B.weight.detach() @ self.lora_A.weight.detach()


@dataclass(frozen=True)
class Adapters:
    """The adapters of one module.

    Attributes:
        lora: as asked for; targets: last parts of the adapted layers' names; layers: by name, in module order.
    """

    lora: Lora
    targets: tuple[str, ...]
    layers: dict[str, AdaptedLinear]
    switch: Switch

    @property
    def names(self) -> list[str]:
        """Of the parameters: every A, then every B."""
        return [f"{name}.{factor}" for factor in FACTORS for name in self.layers]

    @property
    def num_a(self) -> int:
        """Of `names` that are an A."""
        return len(self.layers)

    @contextmanager
    def off(self) -> Generator[None]:
        """The layers compute as if they had no adapters."""
        before, self.switch.on = self.switch.on, False
        try:
            yield
        finally:
            self.switch.on = before


def adapt(module: PreTrainedModel, lora: Lora) -> Adapters:
    """Give a module adapters, in place. A is Kaiming-uniform, as PEFT draws it; B is zero, so nothing changes yet.

    Raises:
        ModelError: no layer, or a target that no layer bears, or one that is no plain linear layer of the model's body.
    """
    head = module.get_output_embeddings()
    targets = lora.targets or _default_targets(module)
    found = _matches(module, targets)
    _check(module, targets, found, head)
    switch = Switch()
    draw = torch.Generator().manual_seed(lora.seed)
    layers: dict[str, AdaptedLinear] = {}
    for name, layer in found.items():
        assert isinstance(layer, nn.Linear)
        adapted = AdaptedLinear(layer, lora.rank, switch)
        bound = 1.0 / math.sqrt(layer.in_features)
        a = torch.empty(lora.rank, layer.in_features).uniform_(-bound, bound, generator=draw)
        adapted.lora_A.weight.data.copy_(a)
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, adapted)
        layers[name] = adapted
    return Adapters(lora, targets, layers, switch)


def _default_targets(module: PreTrainedModel) -> tuple[str, ...]:
    """Last parts of the names of all linear layers of the body.

    Raises:
        ModelError: there is none, or matrices that are neither those of a linear layer nor embeddings.
    """
    known = (nn.Linear, nn.Embedding)
    odd: list[str] = []
    names: set[str] = set()
    for name, layer in module.base_model.named_modules():
        if isinstance(layer, nn.Linear):
            names.add(name.rpartition(".")[2])
        elif not isinstance(layer, known):
            odd += [f"{name}.{own}" for own, p in layer.named_parameters(recurse=False) if p.dim() >= 2]
    kind = type(module).__name__
    if odd:
        raise ModelError(
            f"model.lora.targets: {kind} multiplies by {odd[0]}{f' and {len(odd) - 1} more' if odd[1:] else ''}, which "
            f"no linear layer holds and which would stay as they are; name what to adapt, of {', '.join(sorted(names))}"
        )
    if not names:
        raise ModelError(f"model.lora.rank: {kind} has no linear layer that could be adapted; allowed: 0")
    return tuple(sorted(names))


def _matches(module: PreTrainedModel, targets: tuple[str, ...]) -> dict[str, nn.Module]:
    """Modules by each of their names that end in a target, whole parts only."""
    return {
        name: layer
        for name, layer in module.named_modules(remove_duplicate=False)
        if any(name == target or name.endswith(f".{target}") for target in targets)
    }


def _check(
    module: PreTrainedModel, targets: tuple[str, ...], found: dict[str, nn.Module], head: nn.Module | None
) -> None:
    kind = type(module).__name__
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in found):
            linear = {
                n.rpartition(".")[2] for n, m in module.base_model.named_modules() if isinstance(m, nn.Linear)
            }
            raise ModelError(
                f"model.lora.targets: no layer of {kind} is named {target!r}; there are: {', '.join(sorted(linear))}"
            )
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, layer in found.items():
        if layer is head:
            raise ModelError(
                f"model.lora.targets: {name} is the vocabulary head of {kind}, which has no adapter; take it out"
            )
        if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
            raise ModelError(
                f"model.lora.targets: {name} of {kind} is a {type(layer).__name__}; only plain linear layers can be "
                "adapted; take it out"
            )
        if len(shared := names[id(layer.weight)]) > 1:
            raise ModelError(
                f"model.lora.targets: {' and '.join(shared)} of {kind} are one weight, which cannot have adapters of "
                "their own; take them out"
            )
