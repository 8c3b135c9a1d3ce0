"""Models and tokenizers from folders: what is loaded, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from headway.errors import ModelError
from headway.model.adapter_folder import merged_state, write_own_adapter
from headway.model.attention import ATTENTION_NAME
from headway.model.compute import Compute
from headway.model.lora import Lora
from headway.model.policy import Policy
from headway.model.probe import probe

transformers_logging.disable_progress_bar()


def load_policy(
    folder: Path,
    *,
    published_dtype: str = "float32",
    with_grad: bool,
    compute: Compute | None = None,
    lora: Lora | None = None,
) -> Policy:
    """A folder in transformers format as a Policy in fp32, rounded to the published dtype.

    Args:
        compute: device, precision and attention; None: fp32 on the CPU.
        lora: the adapters that it gets; None: none.

    Raises:
        ModelError: no such folder, no config, unreadable weights, missing or unexpected tensors, or an
            architecture that headway cannot run. UnsupportedOption: what `compute` asks for is not here.
    """
    module = _load_module(folder)
    policy = Policy(module, published_dtype=published_dtype, with_grad=with_grad, compute=compute, lora=lora)
    bad = [name for name, tensor in module.named_parameters() if not torch.isfinite(tensor).all()]
    if bad:
        raise ModelError(f"model folder {folder}: weights that are not finite: {', '.join(bad[:5])}")
    probe(policy)
    if not with_grad:
        policy.round_to_published()
    return policy


def _load_module(folder: Path) -> PreTrainedModel:
    if not (folder / "config.json").is_file():
        raise ModelError(f"model folder {folder} has no config.json; give a folder in transformers format")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=torch.float32,
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, and refused below by name
        )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        if error.args == (ATTENTION_NAME,):
            error = ValueError("its architecture does not take its attention from transformers' registry")
        raise ModelError(f"model folder {folder} cannot be loaded: {error}") from error
    module: PreTrainedModel = loaded[0]
    report: dict[str, Any] = loaded[1]
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(item[0] if isinstance(item, tuple) else item) for item in report.get(kind, ()))
        if names:
            raise ModelError(
                f"model folder {folder}: {kind.replace('_', ' ')}: {', '.join(names[:5])}"
                f"{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
            )
    return module


def save_policy(policy: Policy, source: Path, target: Path) -> None:
    """Write the current weights as a transformers folder, with the tokenizer of `source`.

    Adapters are added into the weights; the folder "adapter" in it holds them alone, as PEFT writes them.
    Written beside the target and renamed, so a folder at `target` is always whole.
    """
    temporary = target.with_name(target.name + ".partial")
    if temporary.exists():  # of an end that was cut short
        shutil.rmtree(temporary)
    if policy.adapters is None:
        policy.module.save_pretrained(str(temporary))
    else:
        state = merged_state(policy.module.state_dict(), policy.adapters)
        policy.module.save_pretrained(str(temporary), state_dict=state)
        write_own_adapter(temporary / "adapter", policy.adapters, str(source))
    config = json.loads((temporary / "config.json").read_text())
    config.pop("_attn_implementation", None)
    (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja", ".txt", ".model") and not (temporary / path.name).exists():
            (temporary / path.name).write_bytes(path.read_bytes())
    if target.exists():  # of an earlier end of the run
        shutil.rmtree(target)
    temporary.rename(target)


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a model folder: prompts in, text out. Sampled ids are never made from text.

    Attributes:
        eos_ids: every id that ends a completion: tokenizer's, generation_config's and config's.
    """

    inner: Any
    eos_ids: tuple[int, ...]

    def encode_prompt(self, prompt: str | Sequence[Any]) -> list[int]:
        """Token ids of a prompt: text as it stands, or messages through the chat template.

        Raises:
            ModelError: messages, but the tokenizer has no chat template.
        """
        if isinstance(prompt, str):
            return list(self.inner.encode(prompt, add_special_tokens=False))
        if not self.inner.chat_template:
            raise ModelError("the environment gives chat messages, but the tokenizer has no chat template")
        ids = self.inner.apply_chat_template(
            list(prompt), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return list(ids)

    def unknown_share(self, token_ids: Sequence[int]) -> float:
        """Share of these ids that stand for text outside the vocabulary; 0 for tokenizers without such an id."""
        unknown = self.inner.unk_token_id
        if unknown is None or not token_ids:
            return 0.0
        return sum(token_id == unknown for token_id in token_ids) / len(token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled ids, special tokens included: what environments score."""
        return str(self.inner.decode(token_ids, skip_special_tokens=False))

    def decode_many(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """decode of each; one call into the tokenizer."""
        return [str(text) for text in self.inner.batch_decode(sequences, skip_special_tokens=False)]


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder with all its EOS ids.

    Raises:
        ModelError: it cannot be loaded.
    """
    try:
        inner = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model folder {folder}: its tokenizer cannot be loaded: {error}") from error
    ids: set[int] = set()
    if inner.eos_token_id is not None:
        ids.add(int(inner.eos_token_id))
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    values: list[Any] = [getattr(config, "eos_token_id", None)]
    generation = folder / "generation_config.json"
    if generation.is_file():
        values.append(json.loads(generation.read_text()).get("eos_token_id"))
    for value in values:
        ids.update(int(item) for item in (value if isinstance(value, list) else [value]) if item is not None)
    return Tokenizer(inner, tuple(sorted(ids)))
