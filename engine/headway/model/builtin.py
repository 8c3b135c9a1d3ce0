"""Tiny models made on the spot, so that the whole loop runs without a download.

`builtin:sort5`: a Qwen2-architecture model of 0.8 M parameters over a character vocabulary of 32, warmed up by
supervision on "sort five digits" prompts whose targets are sorted in a quarter of the cases and copied in the
rest. It therefore starts with a reward near 0.15 and reinforcement learning has to choose and to sharpen.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from headway.errors import ModelError

ALPHABET = ("_", "^", "$", *"0123456789", *"+-=,src", *"abdefghijklm")
PAD, BOS, EOS = 0, 1, 2


@dataclass(frozen=True)
class Warmup:
    """How a builtin sort model is made; part of its cache key."""

    digits: int
    steps: int
    batch: int = 128
    lr: float = 2e-3
    sorted_share: float = 0.25
    seed: int = 0


BUILTIN = {"sort3": Warmup(digits=3, steps=60), "sort5": Warmup(digits=5, steps=160)}


def check_builtin(name: str) -> None:
    """
    Raises:
        ModelError: no such builtin.
    """
    if name not in BUILTIN:
        raise ModelError(f"model.path: no builtin model {name!r}; there are: {', '.join(sorted(BUILTIN))}")


def builtin_folder(name: str, note: Callable[[str], None] = lambda line: None) -> Path:
    """The folder of a builtin model; made on first use, then cached under HEADWAY_CACHE or ~/.cache/headway.

    Args:
        name: "sort3" or "sort5"; note: told what is going on, for people.

    Raises:
        ModelError: no such builtin.
    """
    check_builtin(name)
    warmup = BUILTIN[name]
    cache = Path(os.environ.get("HEADWAY_CACHE") or Path.home() / ".cache" / "headway")
    folder = cache / f"{name}-{warmup.steps}x{warmup.batch}-{warmup.lr:g}-{warmup.seed}"
    if (folder / "config.json").is_file():
        return folder
    note(f"making the model builtin:{name} ({warmup.steps} supervised steps, once; kept in {folder})")
    started = time.monotonic()
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}")
    module = _with_all_cores(lambda: _warm_up(warmup))
    module.save_pretrained(str(temporary))
    sort_tokenizer().save_pretrained(str(temporary))
    try:
        temporary.rename(folder)
    except OSError:  # another process finished first
        shutil.rmtree(temporary)
    note(f"builtin:{name} made in {time.monotonic() - started:.0f} s")
    return folder


def tiny_sort_model(seed: int) -> Qwen2ForCausalLM:
    """The architecture of the sort models with random weights."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(ALPHABET),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return Qwen2ForCausalLM(config)


def sort_tokenizer() -> PreTrainedTokenizerFast:
    """The character tokenizer of the sort models: one id a character, nothing added."""
    inner = Tokenizer(models.WordLevel(vocab={c: i for i, c in enumerate(ALPHABET)}, unk_token="_"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    inner.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="_",
        bos_token="^",
        eos_token="$",
        unk_token="_",
        padding_side="left",
        model_max_length=512,
    )


def _with_all_cores(work: Callable[[], Qwen2ForCausalLM]) -> Qwen2ForCausalLM:
    """Nothing else runs yet: the generators start when the model is made."""
    threads = torch.get_num_threads()
    torch.set_num_threads(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        return work()
    finally:
        torch.set_num_threads(threads)


def _warm_up(warmup: Warmup) -> Qwen2ForCausalLM:
    """Supervised steps on prompt + target + EOS; loss on the target only; lr warmed up over 20 steps."""
    module = tiny_sort_model(warmup.seed).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=warmup.lr, weight_decay=0.0, fused=True)
    draw = random.Random(warmup.seed + 7)
    index = {c: i for i, c in enumerate(ALPHABET)}
    for step in range(warmup.steps):
        rows: list[list[int]] = []
        for _ in range(warmup.batch):
            digits = [draw.choice("0123456789") for _ in range(warmup.digits)]
            target = sorted(digits) if draw.random() < warmup.sorted_share else digits
            rows.append([index[c] for c in ("^", "s", *digits, "=", *target)] + [EOS])
        ids = torch.tensor(rows)
        labels = ids.clone()
        labels[:, : warmup.digits + 3] = -100
        optimizer.param_groups[0]["lr"] = warmup.lr * min(1.0, (step + 1) / 20)
        optimizer.zero_grad()
        module(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    return module.eval()
