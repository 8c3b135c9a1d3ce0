"""TRL's GRPOTrainer on a workload: generate with transformers, then one on-policy update, in one loop.

One process, or several under torchrun (gloo), which then share every batch:

    python -m headway_bench.rivals.trl_default --workload w1 --checkpoint DIR --report FILE
    torchrun --nproc_per_node 2 -m headway_bench.rivals.trl_default ...

The clock runs from the begin of training, where the first batch is asked for, to the end of the last update.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from headway_bench.rivals.stages import StageClock
from headway_bench.rivals.task import exact_match, make_prompts, spread_reward
from headway_bench.rivals.workload import (
    Report,
    RunnerOptions,
    Workload,
    mean_of_last,
    parse_runner_options,
)

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))


class Rewards:
    """The reward function, which also counts this process's samples and sampled tokens."""

    # TRL reads the reward function's name.
    __name__ = "sort"

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.counts: dict[str, int] = defaultdict(int)

    def __call__(
        self, prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        self.counts["samples"] += len(completions)
        self.counts["tokens"] += sum(map(len, completion_ids))
        if self.workload.forced_length:
            return [spread_reward(token_ids) for token_ids in completion_ids]
        return [exact_match(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]


class Stopwatch(TrainerCallback):
    """Times the training loop and keeps the logged reward of every update."""

    def __init__(self) -> None:
        self.began = self.wall_s = 0.0
        self.rewards: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()

    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        if logs and "reward" in logs:
            self.rewards.append(float(logs["reward"]))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.wall_s = time.perf_counter() - self.began


def trainer_config(options: RunnerOptions, output_dir: str) -> GRPOConfig:
    """GRPOConfig of a workload; what is not named here is TRL's default."""
    workload = options.workload
    forced = {"min_new_tokens": workload.max_tokens} if workload.forced_length else None
    return GRPOConfig(
        output_dir=output_dir,
        use_cpu=True,
        bf16=False,
        ddp_backend="gloo" if WORLD_SIZE > 1 else None,
        per_device_train_batch_size=workload.samples_per_step // WORLD_SIZE,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        num_generations=workload.completions,
        max_completion_length=workload.max_tokens,
        generation_kwargs=forced,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        learning_rate=workload.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=workload.lr_warmup_steps,
        weight_decay=0.0,
        adam_beta2=0.999,
        max_grad_norm=1.0,
        max_steps=workload.steps,
        seed=options.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
    )


def run(options: RunnerOptions, output_dir: str) -> Report:
    """Train on the workload and measure."""
    workload = options.workload
    prompts = make_prompts(workload.prompts * workload.steps + 8, workload.digits, options.seed)
    rewards, stopwatch, stages = Rewards(workload), Stopwatch(), StageClock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32),
        reward_funcs=rewards,
        args=trainer_config(options, output_dir),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(options.checkpoint),
        callbacks=[stopwatch],
    )
    stages.watch(trainer, "_generate_single_turn", "generate")
    stages.watch(trainer, "_generate_and_score_completions", "generate_and_score")
    stages.watch(trainer, "compute_loss", "forward")
    stages.watch(trainer.accelerator, "backward", "backward")
    trainer.train()
    samples, tokens = rewards.counts["samples"] * WORLD_SIZE, rewards.counts["tokens"] * WORLD_SIZE
    return Report(
        status="completed",
        updates=len(stopwatch.rewards),
        wall_s=stopwatch.wall_s,
        samples_per_s=samples / stopwatch.wall_s,
        reward_last_10=mean_of_last(stopwatch.rewards, 10),
        max_lag_seen=0,
        details={
            **stages.as_details(),
            "mean_completion_tokens": tokens / samples,
            "processes": float(WORLD_SIZE),
            "threads": float(torch.get_num_threads()),
            "trl": trl.__version__,
        },
    )


def main() -> int:
    options = parse_runner_options()
    torch.set_num_threads(options.threads)
    with TemporaryDirectory() as output_dir:
        report = run(options, output_dir)
    if RANK == 0:
        report.save(Path(options.report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
