"""TRL's AsyncGRPOTrainer on a workload, made to run on a CPU: one trainer process and one rollout process.

As shipped it needs a GPU three times over: attention is the FlashAttention-3 kernel from the Hub, weights
travel by NCCL to a vLLM server, and the peak of the device is asked of CUDA. The stand-ins are
varlen_attention, SharedWeights with RolloutWorker, and a constant. What TRL ships and what decides its
speed here stays as it is: the prefix trees, the fused head, the trainer's loop and the staleness bound.

The clock runs from the worker's first generate call, its imports and model loading done, to the last update.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import trl
import trl.experimental.async_grpo.async_grpo_trainer as trainer_module
import trl.experimental.async_grpo.packing as packing_module
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from headway_bench.rivals.task import make_prompts
from headway_bench.rivals.tree_attention import varlen_attention
from headway_bench.rivals.trl_async_worker import RolloutWorker, SharedWeights
from headway_bench.rivals.workload import Report, RunnerOptions, mean_of_last, parse_runner_options

MAX_LAG = 4
LOGGED_SECONDS = ("perf/rollout_wait_s", "perf/fwd_bwd_s", "perf/optimizer_s", "perf/weight_sync_s")


class FlashAttentionStandIn:
    """What packing_module expects the Hub kernel to be."""

    flash_attn_varlen_func = staticmethod(varlen_attention)


class Stopwatch(TrainerCallback):
    """Keeps what the trainer logs at each update, and when the first batch came and the last update ended."""

    def __init__(self) -> None:
        self.first_batch = self.ended = 0.0
        self.logs: list[dict[str, float]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.first_batch = self.first_batch or time.perf_counter()

    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        if logs and "reward" in logs:
            self.logs.append({key: value for key, value in logs.items() if isinstance(value, int | float)})

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.ended = time.perf_counter()

    def values(self, key: str) -> list[float]:
        """The logged values of one metric, an update each."""
        return [float(log[key]) for log in self.logs if key in log]


def trainer_config(options: RunnerOptions, output_dir: str) -> AsyncGRPOConfig:
    """AsyncGRPOConfig of a workload; what is not named here is TRL's default."""
    workload = options.workload
    return AsyncGRPOConfig(
        output_dir=output_dir,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=workload.samples_per_step,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        token_budget=-1,
        num_generations=workload.completions,
        max_completion_length=workload.max_tokens,
        weight_sync_steps=1,
        max_staleness=MAX_LAG,
        learning_rate=workload.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=workload.lr_warmup_steps,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=workload.steps,
        seed=options.seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def patch_for_cpu() -> None:
    """Put the stand-ins where TRL looks for a GPU's."""
    packing_module._flash_attn = lambda: FlashAttentionStandIn
    trainer_module.get_peak_flops_per_device = lambda *_: None


def run(options: RunnerOptions, output_dir: str) -> Report:
    """Train on the workload and measure."""
    patch_for_cpu()
    workload = options.workload
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32)
    weights = SharedWeights(sum(parameter.numel() for parameter in model.parameters()))
    worker, stopwatch = RolloutWorker(options, weights), Stopwatch()
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    unused_prompts = [
        [{"role": "user", "content": prompt}] for prompt in make_prompts(64, workload.digits, 1)
    ]
    trainer = AsyncGRPOTrainer(
        model=str(options.checkpoint),
        reward_funcs=lambda **_: 0,  # the worker scores
        args=trainer_config(options, output_dir),
        train_dataset=Dataset.from_dict({"prompt": unused_prompts}),
        processing_class=tokenizer,
        rollout_worker=worker,
        weight_transfer=weights,
        callbacks=[stopwatch],
    )
    trainer.train()
    return make_report(options, worker, weights, stopwatch)


def make_report(
    options: RunnerOptions, worker: RolloutWorker, weights: SharedWeights, stopwatch: Stopwatch
) -> Report:
    """Turn what was seen into the report."""
    links = worker.links
    wall_s = stopwatch.ended - links.first_ticket.value
    samples = options.workload.samples_per_step * len(stopwatch.logs)
    lags = stopwatch.values("sample/staleness_mean")
    details: dict[str, float | str] = {
        key.removeprefix("perf/"): sum(stopwatch.values(key)) for key in LOGGED_SECONDS
    }
    return Report(
        status="completed",
        updates=len(stopwatch.logs),
        wall_s=wall_s,
        samples_per_s=samples / wall_s,
        reward_last_10=mean_of_last(stopwatch.values("reward"), 10),
        max_lag_seen=int(max(stopwatch.values("sample/staleness_max"), default=0)),
        details={
            **details,
            "generate_s": links.generate_s.value,
            "generated_tokens_per_s": links.generated_tokens.value / max(links.generate_s.value, 1e-9),
            "send_weights_s": weights.send_s,
            "mean_lag": mean_of_last(lags, len(lags)),
            "forwarded_tokens_per_step": mean_of_last(
                stopwatch.values("batch/forwarded_tokens_per_step"), 100
            ),
            # A laxer clock, begun when the first batch lies ready: what a loop that never stops would see.
            "samples_per_s_after_first_batch": samples / (stopwatch.ended - stopwatch.first_batch),
            "processes": 2.0,
            "threads": float(options.threads),
            "trl": trl.__version__,
        },
    )


def main() -> int:
    options = parse_runner_options()
    torch.set_num_threads(options.threads)
    with TemporaryDirectory() as output_dir:
        report = run(options, output_dir)
    report.save(Path(options.report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
