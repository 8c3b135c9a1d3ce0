"""What TRL's asynchronous trainer needs on a CPU: a rollout process, and weights through shared memory.

As shipped, rollouts come from a vLLM server and weights reach it over NCCL. Here one process samples with
transformers.generate, scores, and fills the trainer's queue; the queue's bound is its only brake.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM

# Imported here, not where it is used: the first batch is already on the clock.
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from headway_bench.rivals.task import (
    EOS_ID,
    PAD_ID,
    decode,
    encode,
    exact_match,
    make_prompts,
    spread_reward,
)
from headway_bench.rivals.workload import RunnerOptions

SPAWN: Any = mp.get_context("spawn")
# Batches the worker may sample beyond what the trainer needs, so that it is never the one that ends the run.
SPARE_BATCHES = 8


class SharedWeights:
    """The newest weights, flat and fp32, with their version. The trainer writes, the worker copies.

    It is TRL's WeightTransferProtocol. A version counts the sends, as the trainer's own `model_version` does.
    """

    def __init__(self, num_parameters: int) -> None:
        self.flat = torch.zeros(num_parameters).share_memory_()
        self.version = SPAWN.Value("i", 0)  # its lock also guards `flat`: no half-written weights are read
        self.send_s = 0.0

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Copy every parameter in and raise the version."""
        began = time.perf_counter()
        offset = 0
        with self.version.get_lock(), torch.no_grad():
            for _, tensor in iterator:
                self.flat[offset : offset + tensor.numel()] = tensor.detach().view(-1)
                offset += tensor.numel()
            self.version.value += 1
        self.send_s += time.perf_counter() - began

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...

    def copy_into(self, parameters: list[torch.nn.Parameter]) -> int:
        """Copy the newest weights into the worker's model; returns their version."""
        offset = 0
        with self.version.get_lock(), torch.no_grad():
            for parameter in parameters:
                parameter.view(-1).copy_(self.flat[offset : offset + parameter.numel()])
                offset += parameter.numel()
            return int(self.version.value)

    def __getstate__(self) -> dict[str, Any]:
        return {"flat": self.flat, "version": self.version}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.send_s = 0.0


@dataclass
class Links:
    """What the trainer's process and the rollout process share."""

    samples: Any
    stop: Any
    first_ticket: (
        Any  # time.perf_counter (one clock for all processes of a machine) of the first generate call
    )
    generate_s: Any
    generated_tokens: Any


class RolloutWorker:
    """TRL's RolloutWorkerProtocol over one spawned process."""

    def __init__(self, options: RunnerOptions, weights: SharedWeights) -> None:
        self.rollout_buffer = SPAWN.Queue(options.workload.samples_per_step)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.links = Links(
            samples=self.rollout_buffer,
            stop=SPAWN.Event(),
            first_ticket=SPAWN.Value("d", 0.0),
            generate_s=SPAWN.Value("d", 0.0),
            generated_tokens=SPAWN.Value("q", 0),
        )
        self.process = SPAWN.Process(target=sample_forever, args=(options, self.links, weights), daemon=True)

    def start(self) -> None:
        self.process.start()

    def stop(self) -> None:
        self.links.stop.set()
        self.process.join(5)

    def update_model_version(self, model_version: int) -> None: ...

    def check_health(self, stale_after_s: float) -> None:
        if not self.process.is_alive():
            raise RuntimeError(f"the rollout process ended with exit code {self.process.exitcode}")


def sample_forever(options: RunnerOptions, links: Links, weights: SharedWeights) -> None:
    """The rollout process: newest weights, one batch, score, enqueue; until told to stop."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed + 1)
    workload = options.workload
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32).eval()
    parameters = list(model.parameters())
    version = 0
    batches = workload.steps + SPARE_BATCHES
    prompts = make_prompts(workload.prompts * batches, workload.digits, options.seed)
    links.first_ticket.value = time.perf_counter()
    for first in range(0, len(prompts), workload.prompts):
        if links.stop.is_set():
            break
        if weights.version.value != version:
            version = weights.copy_into(parameters)
        began = time.perf_counter()
        completions, log_probs = generate(model, options, prompts[first : first + workload.prompts])
        links.generate_s.value += time.perf_counter() - began
        links.generated_tokens.value += sum(map(len, completions))
        for sample in scored(options, prompts, first, completions, log_probs, version):
            put_until_stopped(links, sample)
    links.samples.cancel_join_thread()


def generate(
    model: Any, options: RunnerOptions, prompts: list[str]
) -> tuple[list[list[int]], list[list[float]]]:
    """Sample the completions; returns the token ids and log-probs of each, cut after the end sign."""
    workload = options.workload
    input_ids = torch.tensor([encode(prompt) for prompt in prompts]).repeat_interleave(
        workload.completions, 0
    )
    forced = {"min_new_tokens": workload.max_tokens} if workload.forced_length else {}
    with torch.no_grad():
        output = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=workload.max_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=PAD_ID,
            return_dict_in_generate=True,
            output_logits=True,
            **forced,
        )
    sampled_BN = output.sequences[:, input_ids.shape[1] :]
    log_probs_BNV = torch.log_softmax(torch.stack(output.logits, 1), -1)
    log_probs_BN = log_probs_BNV.gather(-1, sampled_BN[..., None])[..., 0]
    completions: list[list[int]] = []
    log_probs: list[list[float]] = []
    for token_ids, values in zip(sampled_BN.tolist(), log_probs_BN.tolist(), strict=True):
        length = token_ids.index(EOS_ID) + 1 if EOS_ID in token_ids else len(token_ids)
        completions.append(token_ids[:length])
        log_probs.append(values[:length])
    return completions, log_probs


def scored(
    options: RunnerOptions,
    prompts: list[str],
    first: int,
    completions: list[list[int]],
    log_probs: list[list[float]],
    version: int,
) -> Iterator[Any]:
    """The RolloutSamples of a batch, advantages normalised by group; `first` is its first prompt."""
    workload = options.workload
    group_of = [first + index // workload.completions for index in range(len(completions))]
    if workload.forced_length:
        rewards = np.array([spread_reward(token_ids) for token_ids in completions])
    else:
        rewards = np.array(
            [
                exact_match(prompts[group], decode(ids))
                for group, ids in zip(group_of, completions, strict=True)
            ]
        )
    grouped = rewards.reshape(-1, workload.completions)
    centred = grouped - grouped.mean(1, keepdims=True)
    advantages = (centred / (grouped.std(1, ddof=1, keepdims=True) + 1e-4)).reshape(-1)
    for index, token_ids in enumerate(completions):
        prompt = prompts[group_of[index]]
        prompt_ids = encode(prompt)
        yield RolloutSample(
            prompt=[{"role": "user", "content": prompt}],
            completion=[{"role": "assistant", "content": decode(token_ids)}],
            input_ids=np.array(prompt_ids + token_ids),
            completion_mask=np.array([0] * len(prompt_ids) + [1] * len(token_ids)),
            old_log_probs=np.array([0.0] * len(prompt_ids) + log_probs[index], dtype=np.float32),
            advantage=float(advantages[index]),
            model_version=version,
            group_id=group_of[index],
            metrics={"reward": float(rewards[index])},
            enqueued_at=time.time(),
        )


def put_until_stopped(links: Links, sample: Any) -> None:
    """Wait for room in the trainer's queue; unblocked by the trainer's reads or by the stop event."""
    while not links.stop.is_set():
        try:
            links.samples.put(sample, timeout=0.5)
            return
        except queue.Full:
            continue
