"""Models: transformers modules over flat parameters, their attention, tokenizers, and tiny builtin ones."""

from headway.model.adapter_folder import write_adapter
from headway.model.attention import AttentionContext, KVPool
from headway.model.builtin import builtin_folder
from headway.model.compute import Compute
from headway.model.facts import kernel_facts
from headway.model.loading import Tokenizer, load_policy, load_tokenizer, save_policy
from headway.model.lora import Adapters, Lora
from headway.model.policy import Head, Policy
from headway.model.resolve import builtin_tokenizer, resolve_model

__all__ = [
    "Adapters",
    "AttentionContext",
    "Compute",
    "Head",
    "KVPool",
    "Lora",
    "Policy",
    "Tokenizer",
    "builtin_folder",
    "builtin_tokenizer",
    "kernel_facts",
    "load_policy",
    "load_tokenizer",
    "resolve_model",
    "save_policy",
    "write_adapter",
]
