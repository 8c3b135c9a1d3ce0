"""The section [model.lora]: train low-rank adapters of linear layers, and leave the model's own weights as they are."""

from __future__ import annotations

from pydantic import Field

from headway.config.section import Section


class LoraConfig(Section):
    """Low-rank adapters instead of all weights (docs/lora.md)."""

    rank: int = Field(default=0, ge=0, description="r of every adapter; 0: off, all weights are trained")
    alpha: float = Field(default=32.0, gt=0.0, description="an adapter adds alpha / r B A to its layer")
    targets: tuple[str, ...] = Field(
        default=(),
        description="last parts of the adapted layers' names, such as q_proj; empty: every linear layer but the head",
    )
