"""Guarantee 5: with max_lag = 0 a run is a plain synchronous loop, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import headway
from headway.buffer import Group
from headway.config import RunConfig
from headway.envs import Completion, EnvSpec, load_environment
from headway.generate import FinishedMember, GroupRequest, mix
from headway.generator import build_engine
from headway.learner.prompts import TokenisedPrompt
from headway.learner.setup import recipe_of
from headway.learner.tickets import TicketMaker
from headway.model import load_policy, load_tokenizer
from headway.serial import run_serial
from headway.trainer import Trainer
from headway.types import PolicyVersion, Ticket, Trajectory, prompt_digest
from headway_kernels.sampling import sample_tokens

NUM_STEPS = 20


@pytest.fixture
def config(tiny_config: Callable[..., RunConfig]) -> RunConfig:
    return tiny_config(steps=NUM_STEPS, staleness={"max_lag": 0})


def plain_loop(config: RunConfig) -> dict[str, torch.Tensor]:
    """Generate, score, train, copy the weights: the engine's decode and the trainer's step, and nothing else."""
    folder = Path(config.model.path)
    tokenizer, environment = (
        load_tokenizer(folder),
        load_environment(EnvSpec(config.env.name, config.env.args)),
    )
    policy = load_policy(folder, with_grad=True)
    trainer = Trainer(policy, config, recipe_of(config.algo), None)
    engine = build_engine(config, folder, tokenizer)
    tickets = TicketMaker(config, tokenizer.eos_ids)
    next_ticket = next_prompt = 0
    for step in range(config.steps):
        version = PolicyVersion(0, step)
        engine.apply(lambda flat, version=version: (flat.copy_(policy.flat), version)[1])
        groups: list[Group] = []
        while len(groups) < config.batch.prompts:  # groups whose rewards are all equal are replaced in rounds
            round_ = []
            for _ in range(config.batch.prompts - len(groups)):
                ids = tokenizer.encode_prompt(environment.prompt(next_prompt))
                round_.append(tickets.make(next_ticket, TokenisedPrompt(next_prompt, ids), version))
                next_ticket, next_prompt = next_ticket + 1, next_prompt + 1
            for ticket in round_:
                engine.add(
                    GroupRequest(
                        ticket.ticket_id, ticket.prompt_ids, ticket.num_members, ticket.sampling, ticket.seed
                    )
                )
            finished: list[FinishedMember] = []
            while engine.num_running or engine.num_waiting:
                finished += engine.step()
            made = [group_of(ticket, finished, environment) for ticket in round_]
            groups += [group for group in made if len({t.reward for t in group.trajectories}) > 1]
        trainer.step(groups, step + 1)
    return {name: tensor.detach().clone() for name, tensor in policy.module.state_dict().items()}


def group_of(ticket: Ticket, finished: list[FinishedMember], environment: Any) -> Group:
    members = sorted((m for m in finished if m.request_id == ticket.ticket_id), key=lambda m: m.member)
    trajectories = []
    for member in members:
        prompt = torch.tensor(ticket.prompt_ids, dtype=torch.int32)
        ids = torch.cat([prompt, torch.from_numpy(member.token_ids)]).numpy()
        mask = torch.arange(len(ids)).ge(len(prompt)).numpy()
        logprobs = torch.cat([torch.zeros(len(prompt)), torch.from_numpy(member.logprobs)]).numpy()
        completion = Completion("", member.token_ids.tolist(), member.finish_reason)
        reward = environment.reward(ticket.prompt_index, completion)
        trajectories.append(
            Trajectory(
                f"plain.{ticket.ticket_id}.{member.member}", ticket.ticket_id, member.member, ticket.prompt_index,
                prompt_digest(ticket.prompt_ids), len(prompt), ids, mask, logprobs, member.spans, 1.0,
                member.finish_reason, reward, 0, 0.0, 0.0,
            )
        )  # fmt: skip
    return Group(ticket, trajectories, [], time.monotonic())


def test_max_lag_0_is_bit_identical_to_a_plain_loop_in_processes_and_in_serial(
    config: RunConfig, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    expected = plain_loop(config)
    records = []
    (tmp_path / "serial").mkdir()
    status = run_serial(config, tmp_path / "serial", records.append)
    assert status.status == "finished"
    assert [record.step for record in records] == list(range(1, NUM_STEPS + 1))
    with headway.Engine(config) as engine:
        rows = list(engine)
    assert len(rows) == NUM_STEPS
    assert max(row.lag_max for row in rows) == 0
    for folder in (tmp_path / "serial" / "policy", Path(config.run_dir) / "policy"):
        saved = load_file(folder / "model.safetensors")
        for name, tensor in saved.items():
            assert torch.equal(tensor, expected[name]), f"{folder}: {name} differs"
    # the start must have been left behind, else equality says nothing
    start = load_file(Path(config.model.path) / "model.safetensors")
    assert max((expected[name] - start[name]).abs().max().item() for name in start) > 1e-3


def test_max_lag_0_agrees_with_a_loop_over_transformers_forward_alone(
    tiny_config: Callable[..., RunConfig],
) -> None:
    torch.set_num_threads(1)
    # AdamW's first steps are of size lr whatever the gradient's, so rounding is amplified to a share of lr
    config = tiny_config(steps=NUM_STEPS, staleness={"max_lag": 0}, learner={"lr": 1e-4})
    expected = plain_loop(config)
    module = AutoModelForCausalLM.from_pretrained(config.model.path, attn_implementation="eager")
    optimizer = torch.optim.AdamW(module.parameters(), lr=config.learner.lr, weight_decay=0.0)
    tokenizer = load_tokenizer(Path(config.model.path))
    environment = load_environment(EnvSpec(config.env.name, config.env.args))
    index = 0
    for _ in range(config.steps):
        groups: list[tuple[list[list[int]], list[float], int]] = []
        while len(groups) < config.batch.prompts:
            for _ in range(config.batch.prompts - len(groups)):
                prompt = tokenizer.encode_prompt(environment.prompt(index))
                seed = mix(config.seed, index)
                samples = [sample(module, prompt, mix(seed, m), config, tokenizer.eos_ids) for m in range(4)]
                rewards = [
                    environment.reward(index, Completion("", s[len(prompt) :], "stop")) for s in samples
                ]
                index += 1
                if len(set(rewards)) > 1:
                    groups.append((samples, rewards, len(prompt)))
        update(module, optimizer, groups)
    for name, tensor in module.state_dict().items():
        assert (tensor - expected[name]).abs().max() <= 1e-5, name


@torch.no_grad()
def sample(module: Any, prompt: list[int], seed: int, config: RunConfig, eos: tuple[int, ...]) -> list[int]:
    """One sequence, a full forward for every token."""
    ids = list(prompt)
    for position in range(config.sampling.max_new_tokens):
        logits = module(input_ids=torch.tensor([ids])).logits[0, -1:].float()
        draw = [torch.tensor([value]) for value in (seed, position)]
        token, _ = sample_tokens(logits, torch.ones(1), *draw)
        ids.append(int(token))
        if ids[-1] in eos:
            break
    return ids


def update(
    module: Any, optimizer: torch.optim.Optimizer, groups: list[tuple[list[list[int]], list[float], int]]
) -> None:
    """On-policy policy gradient: group mean baseline, batch std, mean over tokens, norm clipped at 1."""
    centred = [torch.tensor(rewards, dtype=torch.float64) for _, rewards, _ in groups]
    centred = [reward - reward.mean() for reward in centred]
    std = torch.cat(centred).pow(2).mean().sqrt() + 1e-6
    losses, count = [], 0
    for (samples, _, prompt_length), advantages in zip(groups, centred, strict=True):
        for ids, advantage in zip(samples, advantages, strict=True):
            logits = module(input_ids=torch.tensor([ids])).logits[0, :-1].float()
            logp = torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
            losses.append(-(logp[prompt_length - 1 :] * (advantage / std).float()).sum())
            count += len(ids) - prompt_length
    optimizer.zero_grad()
    (torch.stack(losses).sum() / count).backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
