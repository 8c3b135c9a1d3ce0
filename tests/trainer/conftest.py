"""A small decided model, batches of trajectories over it, and the oracle: transformers' forward in float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from headway.buffer import Group
from headway.config import RunConfig
from headway.learner.setup import compute_of, recipe_of
from headway.model import Lora, Policy, load_policy
from headway.trainer import Trainer, prepare, score_row
from headway.types import (
    FinishReason,
    PolicyVersion,
    Sampling,
    Ticket,
    Trajectory,
    VersionSpan,
    prompt_digest,
)

VOCAB_SIZE = 40
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("decided")
    AutoModelForCausalLM.from_config(config).save_pretrained(str(path))
    return path


@pytest.fixture
def config_of(folder: Path) -> Callable[..., RunConfig]:
    def make(**changes: Any) -> RunConfig:
        sections: dict[str, Any] = {
            "steps": 10,
            "model": {"path": str(folder)},
            "env": {"name": "sort"},
            "batch": {"prompts": 4, "samples": 4},
            "sampling": {"max_new_tokens": 40},
            "learner": {"lr": 1e-3, "max_grad_norm": 1e9},
        }
        for name, value in changes.items():
            sections[name] = {**sections.get(name, {}), **value} if isinstance(value, dict) else value
        return RunConfig.model_validate(sections)

    return make


class Bench:
    """A trainer whose gradient can be looked at."""

    def __init__(self, folder: Path, config: RunConfig, reference: Policy | None = None) -> None:
        self.config = config
        self.recipe = recipe_of(config.algo)
        self.policy = load_policy(
            folder,
            published_dtype=config.push.dtype,
            with_grad=True,
            compute=compute_of(config),
            lora=Lora.of(config),
        )
        self.trainer = Trainer(self.policy, config, self.recipe, reference)

    @property
    def optimizer(self) -> Any:
        return self.trainer._optimizer

    def gradient(self, groups: Sequence[Group], monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Any]:
        """The flat gradient that the update would see, and the step's statistics; nothing is updated."""
        taken: list[Tensor] = []
        update = self.optimizer.update

        def keep(lr: float) -> Any:
            assert self.policy.grad is not None
            taken.append(self.policy.grad.clone())
            self.policy.grad.zero_()
            return update(0.0)

        monkeypatch.setattr(self.optimizer, "update", keep)
        stats = self.trainer.step(groups, 1)
        monkeypatch.setattr(self.optimizer, "update", update)
        return taken[0], stats

    def logprobs(self, groups: Sequence[Group]) -> list[np.ndarray]:
        """The learner's log-probs of every trajectory's sampled tokens, by ticket, then member."""
        prepared = prepare(groups, self.config.batch, self.recipe, self.config.sampling.max_new_tokens)
        out = [np.full(t.num_tokens, np.nan) for t in prepared.trajectories]
        for row in prepared.rows:
            scores = score_row(self.policy, row, 1 << 20).numpy()
            for sequence, token, score in zip(row.row.sequence, row.row.token, scores, strict=True):
                assert np.isnan(out[sequence][token]), "a token is scored twice"
                out[sequence][token] = score
        return [values[t.loss_mask] for values, t in zip(out, prepared.trajectories, strict=True)]


@pytest.fixture
def bench(folder: Path, config_of: Callable[..., RunConfig]) -> Callable[..., Bench]:
    def make(reference: Policy | None = None, **changes: Any) -> Bench:
        return Bench(folder, config_of(**changes), reference)

    return make


@pytest.fixture(scope="session")
def plain(folder: Path) -> Any:
    """transformers' module, eager attention, float64."""
    return AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager").double().eval()


@pytest.fixture(scope="session")
def alone() -> Callable[[Any, Trajectory], Tensor]:
    """Log-probs of one trajectory's sampled tokens by a plain module, at its temperature; differentiable."""

    def score(module: Any, trajectory: Trajectory) -> Tensor:
        ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))
        logits = module(input_ids=ids[None], use_cache=False).logits[0, :-1] / trajectory.temperature
        logp = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
        return logp[torch.from_numpy(trajectory.loss_mask[1:])]

    return score


@pytest.fixture(scope="session")
def groups_of(plain: Any, alone: Callable[[Any, Trajectory], Tensor]) -> Callable[..., list[Group]]:
    """Groups of random completions; behaviour log-probs are the starting policy's plus `drift` of noise."""

    def make(
        lengths: Sequence[Sequence[int]],
        *,
        prompt: int = 5,
        seed: int = 0,
        temperatures: Sequence[float] = (1.0,),
        drift: float = 0.0,
        rewards: Callable[[random.Random], float | None] = lambda draw: draw.random(),
        alphabet: int = VOCAB_SIZE - 3,
    ) -> list[Group]:
        draw = random.Random(seed)
        groups: list[Group] = []
        for ticket_id, members in enumerate(lengths):
            prompt_ids = [draw.randrange(3, VOCAB_SIZE) for _ in range(prompt)]
            temperature = temperatures[ticket_id % len(temperatures)]
            made = []
            for member, length in enumerate(members):
                completion = [draw.randrange(3, 3 + alphabet) for _ in range(length)]
                made.append(
                    _trajectory(ticket_id, member, prompt_ids, completion, temperature, rewards(draw))
                )
            ticket = Ticket(
                ticket_id, ticket_id, prompt_ids, len(members), Sampling(temperature, 40, [2]), ticket_id,
                PolicyVersion(0, 0), 60.0,
            )  # fmt: skip
            groups.append(
                Group(ticket, [_with_logprobs(t, plain, alone, drift, draw) for t in made], [], 0.0)
            )
        return groups

    return make


def _trajectory(
    ticket_id: int,
    member: int,
    prompt: list[int],
    completion: list[int],
    temperature: float,
    reward: float | None,
) -> Trajectory:
    ids = np.array(prompt + completion, np.int32)
    return Trajectory(
        trajectory_id=f"g0.{ticket_id}.{member}",
        ticket_id=ticket_id,
        member=member,
        prompt_index=ticket_id,
        prompt_hash=prompt_digest(prompt),
        prompt_length=len(prompt),
        token_ids=ids,
        loss_mask=np.arange(len(ids)) >= len(prompt),
        logprobs=np.zeros(len(ids), np.float32),
        spans=[VersionSpan(len(prompt), len(ids), PolicyVersion(0, 0))],
        temperature=temperature,
        finish_reason=FinishReason.STOP,
        reward=reward,
        num_cached=0,
        started_s=0.0,
        finished_s=0.0,
    )


def _with_logprobs(
    trajectory: Trajectory,
    plain: Any,
    alone: Callable[[Any, Trajectory], Tensor],
    drift: float,
    draw: random.Random,
) -> Trajectory:
    with torch.no_grad():
        values = alone(plain, trajectory).numpy()
    noise = np.array([draw.gauss(0.0, drift) for _ in values])
    trajectory.logprobs[trajectory.loss_mask] = np.minimum(values + noise, -1e-4)
    return trajectory
