"""How much of a bf16-published model changes per update, and what a push then weighs: `headway bench changed MODEL`.

AdamW over fp32 masters on a real loss (next token of fixed arithmetic text), the published copy rounded to bf16 as in
a run. Prints one JSON row per learning rate: the share of elements that changed (median, first and last update) and the
bytes per parameter of the delta, plain and compressed, beside the 2 of a whole state.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headway.model.flat import build_manifest, flatten
from headway.types import PolicyVersion
from headway.weights.payload import encode_delta
from headway_bench.machine import installed_versions, this_commit, this_hardware
from headway_kernels.weight_delta import cast_and_diff

SENTENCES = 8


@dataclass(frozen=True)
class Row:
    """One learning rate's medians over the updates."""

    model: str
    parameters: int
    lr: float
    updates: int
    changed_share: float
    changed_first: float
    changed_last: float
    bytes_per_parameter: float
    bytes_per_parameter_zstd: float


def measure(folder: Path, lr: float, updates: int) -> Row:
    """Train a few updates and measure every push."""
    module: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    manifest = build_manifest(module, "bfloat16")
    flat, grad = flatten(module, manifest, with_grad=True)
    assert grad is not None
    published = flat.bfloat16()
    flat.copy_(published)
    master = flat.clone().requires_grad_(True)
    master.grad = grad
    optimizer = torch.optim.AdamW([master], lr=lr, weight_decay=0.0, fused=True)
    ids = _text(folder)
    shares, plain, packed = [], [], []
    for step in range(updates):
        module(input_ids=ids[step % len(ids)], labels=ids[step % len(ids)]).loss.backward()
        grad.mul_(1.0 / max(1.0, float(torch.linalg.vector_norm(grad))))
        optimizer.step()
        grad.zero_()
        delta = cast_and_diff(master.detach(), published)
        flat.copy_(published)
        shares.append(delta.num_changed / sum(spec.size for spec in manifest.tensors))
        version = PolicyVersion(0, step + 1)
        for sizes, compression in ((plain, "none"), (packed, "zstd")):
            payload = encode_delta(delta, version, "0" * 16, "0" * 16, compression)
            sizes.append(payload.header.num_bytes / manifest.num_elements)
    return Row(
        folder.name,
        manifest.num_elements,
        lr,
        updates,
        statistics.median(shares),
        shares[0],
        shares[-1],
        statistics.median(plain),
        statistics.median(packed),
    )


def _text(folder: Path) -> list[torch.Tensor]:
    """Batches of token ids [SENTENCES, 24]."""
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    lines = [f"{a} + {b} = {a + b}. {b} + {a} = {a + b}." for a in range(3, 19) for b in range(2, 14)]
    ids: list[int] = tokenizer(" ".join(lines)).input_ids
    size = SENTENCES * 24
    return [torch.tensor(ids[at : at + size]).view(SENTENCES, 24) for at in range(0, len(ids) - size, size)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry."""
    parser = argparse.ArgumentParser(prog="headway bench changed", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--updates", type=int, default=8)
    options = parser.parse_args(arguments)
    for lr in options.lr:
        row = measure(options.model, lr, options.updates)
        where = {"commit": this_commit(), "hardware": asdict(this_hardware())}
        print(json.dumps({**vars(row), **where, "versions": installed_versions()}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
