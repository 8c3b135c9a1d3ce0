"""Where and how precisely a policy computes; part of the recipe ([learner] and model.head_dtype)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headway.errors import UnsupportedOption

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Compute:
    """A policy's device, precision and attention.

    Attributes:
        device: "cpu" or "cuda" (the current device).
        dtype: of the layers' products, "float32" or "bfloat16". Weights, norms, the residual stream and gradients
            stay float32, so that rows add up alike in any order.
        head_dtype: of the product with the vocabulary head, likewise.
        attention: of a learner's rows, as in learner.attention.
    """

    device: str = "cpu"
    dtype: str = "float32"
    head_dtype: str = "float32"
    attention: str = "auto"

    @property
    def place(self) -> torch.device:
        """The device.

        Raises:
            UnsupportedOption: this machine, or this build of torch, has none.
        """
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UnsupportedOption(
                f"learner.device = 'cuda': torch {torch.__version__} finds no CUDA device; allowed here: 'cpu'"
            )
        return torch.device(self.device)
