"""Adapters on disk: a folder as PEFT writes it, and the whole model with the adapters added into its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from headway.model.lora import Adapters

PREFIX = "base_model.model."


def write_adapter(
    folder: Path, tensors: Mapping[str, Tensor], *, rank: int, targets: Sequence[str], base: str
) -> None:
    """Write adapter_config.json and adapter_model.safetensors into a new folder.

    Args:
        tensors: A and B by parameter name. B holds the factor alpha / r, so the configuration says alpha = r.
        targets: last parts of the adapted layers' names; base: folder of the model.
    """
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    named = {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(named, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})


def write_own_adapter(folder: Path, adapters: Adapters, base: str) -> None:
    """Write a module's adapters as they are."""
    tensors = {
        f"{name}.{factor}.weight": getattr(layer, factor).weight
        for name, layer in adapters.layers.items()
        for factor in ("lora_A", "lora_B")
    }
    write_adapter(folder, tensors, rank=adapters.lora.rank, targets=adapters.targets, base=base)


def merged_state(state: Mapping[str, Tensor], adapters: Adapters) -> dict[str, Tensor]:
    """A module's state with W + B A in place of W, and without the adapters.

    Args:
        state: its state_dict.
    """
    merged = {f"{name}.weight": layer.merged() for name, layer in adapters.layers.items()}
    own = set(adapters.names)
    return {name: merged.get(name, tensor) for name, tensor in state.items() if name not in own}
