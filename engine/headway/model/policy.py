"""A policy: the transformers module, its flat parameters, its head, and how to call it on packed tokens.

Both sides use this class: the learner with gradients, the generator and the reference model without.

Legend: N packed tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from headway.errors import ModelError
from headway.model.attention import AttentionContext
from headway.model.attention_choice import Place, choose_attention
from headway.model.compute import DTYPES, Compute
from headway.model.flat import build_manifest, flatten, rebind
from headway.model.lora import Adapters, Lora, adapt
from headway.packing import Row
from headway.types import Manifest


@dataclass(frozen=True)
class Head:
    """The vocabulary head: logits = softcap(scale * (x W^T + b)).

    Attributes:
        weight: [V, H]; bias: [V] or None; softcap: final_logit_softcapping; scale: logit scale. None: absent.
        dtype: of the product; the sum of it is fp32 at least.
    """

    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    scale: float | None
    dtype: torch.dtype = torch.float32

    def operands(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """hidden [N, H], weight and bias as they are multiplied, without gradients."""
        bias = None if self.bias is None else self.bias.detach().to(self.dtype)
        return hidden.detach().to(self.dtype), self.weight.detach().to(self.dtype), bias

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> fp32 logits [N, V]."""
        bias = None if self.bias is None else self.bias.to(self.dtype)
        logits = torch.nn.functional.linear(hidden.to(self.dtype), self.weight.to(self.dtype), bias).float()
        if self.scale is not None:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


@dataclass(frozen=True)
class Stretch:
    """A part of the flat buffer that is optimized alike.

    Attributes:
        start, end: elements; decayed: whether weight decay applies.
        scale: of what is stored here over what the optimizer steps (see headway.model.lora).
    """

    start: int
    end: int
    decayed: bool
    scale: float = 1.0


class Policy:
    """A causal language model over flat fp32 parameters.

    Args:
        module: loaded with attention "headway", in fp32.
        published_dtype: dtype of the published weights ("float32" or "bfloat16").
        with_grad: make a gradient buffer and train; else parameters are frozen.
        compute: device, precision and attention.
        lora: train adapters, which are then all that is flat and published; the module's own weights are rounded to
            the published dtype and stay. None: train and publish all.

    Attributes:
        adapters: None without `lora`.

    Raises:
        ModelError: the module needs something that headway's attention or head does not do.
        UnsupportedOption: the device or the attention cannot be had here.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        *,
        published_dtype: str,
        with_grad: bool,
        compute: Compute | None = None,
        lora: Lora | None = None,
    ) -> None:
        compute = compute or Compute()
        self.device = compute.place
        self.dtype = DTYPES[compute.dtype]
        # Never in train mode: dropout would make the learner's log-probs differ from the generator's.
        self.module = module.eval()
        self.adapters: Adapters | None = None
        self._adapted = True
        if lora is not None:
            _round(module, published_dtype)
            self.adapters = adapt(module, lora)
        trained = None if self.adapters is None else self.adapters.names
        self.manifest: Manifest = build_manifest(module, published_dtype, trained)
        module.to(self.device)  # pyright: ignore[reportArgumentType] - transformers wraps the method
        self.flat, self.grad = flatten(module, self.manifest, with_grad=with_grad)
        self.head = _find_head(module, DTYPES[compute.head_dtype])
        self.context_length: int = _context_length(module)
        text_config = module.config.get_text_config()
        self.num_layers: int = text_config.num_hidden_layers
        self.num_kv_heads: int = getattr(text_config, "num_key_value_heads", text_config.num_attention_heads)
        self.head_dim: int = head_dim_of(module.config)
        self.vocab_size: int = self.head.weight.shape[0]
        self._backbone: nn.Module = module.base_model
        self.attention = choose_attention(compute.attention, Place(self.device, self.dtype, self.head_dim))

    def context(self, row: Row) -> AttentionContext:
        """A learner's row attends over itself, along its prefix forest, by this policy's back-end."""
        return AttentionContext(None, attend=self.attention.bind(row, self.device))

    def backbone(self, token_ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Hidden states after the final norm.

        Args:
            token_ids: int64 [N]; positions: int64 [N], each token's position in its own sequence.
            context: what each token may see.

        Returns:
            fp32 [N, H].
        """
        plain = contextlib.nullcontext() if self._adapted or self.adapters is None else self.adapters.off()
        with (
            plain,
            torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not torch.float32),
        ):
            out = self._backbone(
                input_ids=token_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                context=context,
            )
        return out.last_hidden_state[0].float()

    def without_adapters(self) -> Policy:
        """This policy, frozen, as it was before it had adapters; it shares the module and all memory."""
        assert self.adapters is not None, "a policy without adapters has nothing to leave out"
        plain = copy.copy(self)
        plain._adapted, plain.grad = False, None
        return plain

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """The flat buffer in parts that are optimized alike, in order; none is empty."""
        end, decayed = self.manifest.num_elements, self.manifest.num_decayed
        if self.adapters is None:
            parts = Stretch(0, decayed, True), Stretch(decayed, end, False)
        else:
            first_b = self.manifest.tensors[self.adapters.num_a].offset
            parts = Stretch(0, first_b, True), Stretch(first_b, end, True, self.adapters.lora.scale)
        return tuple(part for part in parts if part.end > part.start)

    def serve_from(self, flat: Tensor) -> None:
        """Compute with the weights in `flat` (fp32 [num_elements]) from now on; nothing is copied.

        For policies without gradients: optimizer and gradient refer to the first buffer.
        """
        assert self.grad is None, "a policy that trains keeps its own buffer"
        rebind(self.module, self.manifest, flat)
        self.flat = flat

    def round_to_published(self) -> None:
        """Round the weights to the published dtype, so that both sides compute with the same values."""
        if self.manifest.dtype == "bfloat16":
            self.flat.copy_(self.flat.bfloat16())


@torch.no_grad()
def _round(module: nn.Module, published_dtype: str) -> None:
    if published_dtype == "bfloat16":
        for parameter in module.parameters():
            parameter.copy_(parameter.bfloat16())


def head_dim_of(config: PretrainedConfig) -> int:
    """D of a model's attention."""
    text_config = config.get_text_config()
    return (
        getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    )


def _find_head(module: PreTrainedModel, dtype: torch.dtype) -> Head:
    config = module.config.get_text_config()
    head = module.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"{type(module).__name__} has no linear vocabulary head; a causal language model is needed"
        )
    scale = getattr(config, "logit_scale", None)
    scaling = getattr(config, "logits_scaling", None)
    if scaling not in (None, 1.0):
        scale = 1.0 / scaling
    return Head(
        weight=head.weight,
        bias=head.bias,
        softcap=getattr(config, "final_logit_softcapping", None),
        scale=None if scale in (None, 1.0) else float(scale),
        dtype=dtype,
    )


def _context_length(module: PreTrainedModel) -> int:
    config = module.config.get_text_config()
    length = int(getattr(config, "max_position_embeddings", 0) or 2**31)
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ModelError(
            f"{type(module).__name__} soft-caps its attention logits, which headway's attention does not"
        )
    layers = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)
    odd = sorted({kind for kind in layers if kind not in ("full_attention", "sliding_attention")})
    if odd:
        raise ModelError(
            f"{type(module).__name__} has layers of kind {odd}; only full_attention is supported"
        )
    if window and ("sliding_attention" in layers or not layers):
        # Inside the window a sliding layer sees everything, so shorter sequences are exact. Without a list of
        # kinds (Mistral, Phi-3) every layer slides.
        length = min(length, int(window))
    return length
