"""Digit sorting: prompts, rewards, the character vocabulary, and a tiny model warmed up to a reward of 0.13.

A prompt is `^s` + digits + `=`, its answer the sorted digits + `$`. The warm-up is supervised; a quarter
of its targets are sorted and the rest are copies, so RL has to choose sorting and to sharpen it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

VOCABULARY = "_^$0123456789+-=,srcabdefghijklm"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
DIGITS = "0123456789"

_ID_OF = {character: index for index, character in enumerate(VOCABULARY)}


def encode(text: str) -> list[int]:
    """Token ids of a text, one a character."""
    return [_ID_OF[character] for character in text]


def decode(token_ids: Sequence[int]) -> str:
    """Text of token ids, special characters included."""
    return "".join(VOCABULARY[token_id] for token_id in token_ids)


def make_prompts(count: int, digits: int, seed: int) -> list[str]:
    """`count` prompts of `digits` random digits; the same seed gives the same list."""
    source = random.Random(seed)
    return ["^s" + "".join(source.choice(DIGITS) for _ in range(digits)) + "=" for _ in range(count)]


def digits_of(prompt: str) -> str:
    """The digits of a prompt, in the order given."""
    return prompt[2:-1]


def sorted_digits(prompt: str) -> str:
    """The right answer to a prompt, without the end sign."""
    return "".join(sorted(digits_of(prompt)))


def exact_match(prompt: str, completion: str) -> float:
    """1.0 if the completion up to its end sign is the sorted digits, else 0.0."""
    return 1.0 if completion.split("$")[0] == sorted_digits(prompt) else 0.0


def spread_reward(token_ids: Sequence[int]) -> float:
    """A reward for throughput runs: cheap, and different within a group, so that every sample is trained."""
    return float(sum(token_ids) % 7)


def build_tokenizer() -> Any:
    """The transformers tokenizer of the character vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(vocab=dict(_ID_OF), unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="_",
        bos_token="^",
        eos_token="$",
        unk_token="_",
        padding_side="left",
        model_max_length=512,
    )


def build_model(seed: int) -> Any:
    """A fresh Qwen2 of 4 layers, hidden 128, 792,704 parameters, fp32."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(VOCABULARY),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
            pad_token_id=PAD_ID,
        )
    )


def warm_up(
    model: Any,
    steps: int,
    digits: int,
    *,
    batch: int = 128,
    lr: float = 1e-3,
    sorted_share: float = 0.25,
    seed: int = 7,
) -> list[float]:
    """Train the model on targets of which `sorted_share` are sorted and the others plain copies.

    Returns:
        The loss of every step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    prompts = make_prompts(steps * batch, digits, seed)
    chooser = random.Random(seed + 1)
    losses: list[float] = []
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20)
        texts: list[str] = []
        for prompt in prompts[step * batch : (step + 1) * batch]:
            target = sorted_digits(prompt) if chooser.random() < sorted_share else digits_of(prompt)
            texts.append(prompt + target + "$")
        input_ids = torch.tensor([encode(text) for text in texts])
        labels = input_ids.clone()
        labels[:, : digits + 3] = -100
        loss = model(input_ids=input_ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.item()))
    return losses


@torch.no_grad()
def sampled_reward(model: Any, digits: int, *, count: int = 256, seed: int = 999) -> float:
    """Mean exact match of one sampled completion for each of `count` held-out prompts, at temperature 1."""
    model.eval()
    torch.manual_seed(seed)
    prompts = make_prompts(count, digits, seed)
    input_ids = torch.tensor([encode(prompt) for prompt in prompts])
    sequences = model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=digits + 4,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=PAD_ID,
    )
    completions = [decode(row[input_ids.shape[1] :].tolist()) for row in sequences]
    rewards = [exact_match(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
    return sum(rewards) / count


def make_checkpoint(folder: Path, *, digits: int = 5, steps: int = 240, seed: int = 0) -> float:
    """Warm a fresh model up and save it with its tokenizer. About a minute on one core.

    Returns:
        The mean sampled reward of the saved model.
    """
    model = build_model(seed)
    warm_up(model, steps, digits)
    reward = sampled_reward(model, digits)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return reward
