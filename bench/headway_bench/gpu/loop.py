"""The whole loop on a GPU, end to end: `python -m headway_bench.gpu --loop`.

Random models of two shapes are trained for a few updates by real processes: the learner in bf16 on the GPU, generators
with vLLM where it is installed (else the embedded engine, on the CPU), pushes in bf16, `max_lag` 2. One GPU is shared.

    checks   every update was made; no trained token beyond max_lag; every ticket accounted for; ESS at least 0.5;
             the learner's and the generators' log-probs agree at equal weights (the bounds of [agreement])
    figures  trained tokens/s; the generators' pause for a push; |pi - mu| at equal weights; ESS; shares of idle time
"""

from __future__ import annotations

import importlib.util
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway_bench.gpu.context import Context, OutOfTime

MAX_LAG = 2
LEAST_ESS = 0.5
WARMUP = 2  # updates that no figure counts


@dataclass(frozen=True)
class Shape:
    """A Qwen2 model with random weights, and what is trained on it.

    Attributes:
        hidden, layers, heads, kv_heads, ffn, vocab: of the model; tied head.
        prompts, samples, tokens: groups of an update, members, sampled tokens each; updates: of the run.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    prompts: int
    samples: int
    tokens: int
    updates: int


TINY = Shape("tiny", 128, 4, 4, 2, 384, 1_024, 8, 8, 64, 20)
HALF_B = Shape("0.5B", 896, 24, 14, 2, 4_864, 151_936, 16, 8, 512, 12)
REHEARSED = (
    Shape("tiny", 64, 2, 2, 1, 128, 64, 4, 4, 8, 4),
    Shape("0.5B", 64, 2, 2, 2, 128, 512, 4, 4, 8, 4),
)


def run(context: Context) -> None:
    """Both shapes, until the section's time is used up."""
    for shape in REHEARSED if context.is_small else (TINY, HALF_B):
        context.check_time(f"the loop with the {shape.name} model")
        with tempfile.TemporaryDirectory() as folder:
            play(context, shape, Path(folder))


def engine_name() -> str:
    """The generators' engine."""
    return "vllm" if importlib.util.find_spec("vllm") is not None else "torch"


def make_model(shape: Shape, folder: Path) -> Path:
    """A model folder with random weights and a character tokenizer, whose ids are the first of the vocabulary."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from headway.model.builtin import BOS, EOS, PAD, sort_tokenizer

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=2 * shape.tokens + 64,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    target = folder / "model"
    Qwen2ForCausalLM(config).save_pretrained(str(target))
    sort_tokenizer().save_pretrained(str(target))
    return target


def sections_of(shape: Shape, folder: Path, *, on_gpu: bool) -> dict[str, Any]:
    """The recipe."""
    dtype = "bfloat16" if on_gpu else "float32"
    engine = engine_name()
    generator: dict[str, Any] = {"engine": engine, "max_running": 3 * shape.prompts * shape.samples}
    if engine == "vllm" and on_gpu:
        generator["vllm"] = {"gpu_memory_utilization": 0.3}
    return {
        "steps": shape.updates,
        "run_dir": str(folder / "run"),
        "model": {"path": str(make_model(shape, folder))},
        "env": {"name": str(Path(__file__).with_name("coin_env.py"))},
        "batch": {
            "prompts": shape.prompts,
            "samples": shape.samples,
            "tokens_per_row": max(512, 8 * shape.tokens),
        },
        "sampling": {"max_new_tokens": shape.tokens, "ignore_eos": True},
        "learner": {"device": "cuda" if on_gpu else "cpu", "dtype": dtype, "lr": 1e-5},
        "push": {"dtype": dtype},
        "generator": generator,
        "staleness": {"max_lag": MAX_LAG},
        "checkpoint": {"interval": 0},
    }


def play(context: Context, shape: Shape, folder: Path) -> None:
    """One run; its checks and its figures.

    Raises:
        OutOfTime: the section's time ended before the run did.
    """
    from headway.engine import Engine

    sections = sections_of(shape, folder, on_gpu=context.is_cuda)
    records: list[Any] = []
    with Engine(None, **sections) as engine:
        for record in engine:
            records.append(record)
            if context.remaining_s() <= 0 and len(records) < shape.updates:
                raise OutOfTime(f"the loop with the {shape.name} model after {len(records)} updates")
    for fault in faults(records, shape):
        context.wrong.add(("loop", shape.name))
        context.report.note(f"WRONG: loop, {shape.name}: {fault}")
    report_figures(context, shape, records)


def faults(records: list[Any], shape: Shape) -> list[str]:
    """What must hold and does not."""
    found: list[str] = []
    if [record.step for record in records] != list(range(1, shape.updates + 1)):
        found.append(f"{len(records)} updates of {shape.updates} were made")
    for record in records:
        tickets = record.tickets
        if tickets["issued"] != sum(
            tickets[name] for name in ("trained", "dropped", "in_flight", "buffered")
        ):
            found.append(f"tickets of step {record.step} do not add up: {tickets}")
        if record.lag_max > MAX_LAG:
            found.append(f"a token of step {record.step} had lag {record.lag_max}")
        if record.skipped or not record.ess >= LEAST_ESS:
            found.append(f"step {record.step}: skipped {record.skipped}, ESS {record.ess:.3f}")
    if not records or records[0].start_check.get("tokens", 0) == 0:
        found.append("both sides' log-probs were not compared")
    return found


def report_figures(context: Context, shape: Shape, records: list[Any]) -> None:
    """Rows of the updates after the warm-up."""
    counted = records[WARMUP:]
    if not counted:
        return
    config = {
        "engine": engine_name(),
        "updates": shape.updates,
        "samples": shape.prompts * shape.samples,
        "tokens": shape.tokens,
        "max_lag": MAX_LAG,
    }
    start = records[0].start_check
    for what, unit, values in (
        ("trained", "tokens/s", [record.tokens_per_s for record in counted]),
        (
            "generators' pause for a push, mean",
            "ms",
            [1e3 * sum(r.generator.push for r in counted) / len(counted)],
        ),
        ("learner's push", "ms", [1e3 * record.push_s for record in counted]),
        ("update", "ms", [1e3 * record.learner.work for record in counted]),
        ("learner idle", "%", [100 * record.learner.shares().idle for record in counted]),
        ("generators idle", "%", [100 * record.generator.shares().idle for record in counted]),
        ("effective sample size", "of 1", [record.ess for record in counted]),
        ("mean lag", "updates", [record.lag_mean for record in counted]),
        ("mean |pi - mu| at lag 0", "nats", [start.get("mean_log_ratio", float("nan"))]),
        ("max |pi - mu| at lag 0", "nats", [start.get("max_log_ratio", float("nan"))]),
    ):
        context.report.add(f"loop/{shape.name}/{what}", unit, values, config=config)
