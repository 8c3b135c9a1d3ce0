"""The frozen-policy check: with the same weights on both sides, every log-prob must be the same on both sides.

Nothing is trained. Generates with the recipe's model and prompts at several temperatures, scores the same tokens
as the learner would, in several packings, pushes weights around, and refuses what does not agree. What it finds
looks exactly like staleness in a run: a wrong temperature, a stale copy of the head, a shifted array.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from headway.buffer import Group
from headway.config import RunConfig, derived
from headway.config.agreement import DEFAULT_LIMITS
from headway.envs import EnvSpec, load_environment
from headway.errors import ConfigError
from headway.generate import GroupRequest, InferenceEngine, mix
from headway.generator import build_engine
from headway.learner.prompts import PromptSource
from headway.learner.setup import compute_of, recipe_of
from headway.learner.tickets import TicketMaker
from headway.model import Lora, Policy, Tokenizer, load_policy, load_tokenizer, resolve_model
from headway.trainer import prepare, score_row
from headway.types import PolicyVersion, Ticket, Trajectory, prompt_digest

TEMPERATURES = (0.3, 0.6, 1.0, 1.3)
NUM_PUSHES = 20
LIMIT = 1e-4  # where both sides compute in fp32, whatever dtype is published
PACKING_LIMIT = 1e-5
MAX_NEW_TOKENS = 32
MAX_PROMPTS, MAX_SAMPLES = 4, 4
ANY_LENGTH = 1 << 20  # tokens in a row
Share = Literal["none", "prompt", "tree"]


@dataclass(frozen=True)
class Finding:
    """One check: what was measured, and what is allowed.

    Attributes:
        passed: value <= limit, or >= limit where `at_least`.
    """

    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def passed(self) -> bool:
        """Whether the value is allowed; NaN never is."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def line(self) -> str:
        """For people."""
        sign = ">=" if self.at_least else "<="
        return (
            f"{'ok    ' if self.passed else 'WRONG '} {self.name}: {self.value:.2e} ({sign} {self.limit:.0e})"
        )


class SelfCheck:
    """Both sides of a recipe in one process, with frozen weights.

    Args:
        config: the recipe; lengths and counts are cut to what a check needs.

    Raises:
        HeadwayError: the model or the environment cannot be used.
    """

    def __init__(self, config: RunConfig) -> None:
        if not derived.sides_compare(config):
            fault = f"{config.sampling.kept_sets!r}: both sides score over different ids on purpose; nothing to check"
            raise ConfigError([("sampling.kept_sets", fault)])
        folder = resolve_model(config.model.path, lambda line: print(line, file=sys.stderr))
        self._config = _shortened(config)
        self._tokenizer: Tokenizer = load_tokenizer(folder)
        self._policy: Policy = load_policy(
            folder,
            published_dtype=config.push.dtype,
            with_grad=False,
            compute=compute_of(config),
            lora=Lora.of(config),
        )
        self._folder = folder
        limits = derived.agreement_limits(config)
        exact = limits == DEFAULT_LIMITS["float32"]
        self._limit = LIMIT if exact else limits.max_log_ratio
        self._packing_limit = PACKING_LIMIT if exact else limits.max_log_ratio
        self._shifted_limit = 10 * (LIMIT if exact else limits.mean_log_ratio)
        self._next_step = 0
        environment = load_environment(EnvSpec(config.env.name, config.env.args))
        self._prompts = PromptSource(environment, self._tokenizer, config.env, config.seed)

    def run(self) -> Iterable[Finding]:
        """Each check as it is done."""
        engine = self._fresh_engine()
        for temperature in TEMPERATURES:
            groups = self._generate(engine, temperature)
            yield from self._agreement(f"temperature {temperature}", groups)
            if temperature == 1.0:
                yield from self._packings(groups)
                yield self._alignment(groups)
        yield from self._pushes(engine)
        yield from self._there_and_back(engine)

    def _agreement(self, name: str, groups: list[Group]) -> Iterable[Finding]:
        difference = self._difference(groups)
        yield Finding(f"{name}: max |pi - mu|", float(np.abs(difference).max(initial=0.0)), self._limit)

    def _packings(self, groups: list[Group]) -> Iterable[Finding]:
        """The learner's log-probs must not depend on what else is in the row."""
        reference = self._learner_logp(groups, "none", ANY_LENGTH)
        longest = max(t.num_tokens for group in groups for t in group.trajectories)
        cases: list[tuple[Share, int]] = [
            ("prompt", ANY_LENGTH), ("tree", ANY_LENGTH), ("none", longest), ("tree", 2 * longest),
        ]  # fmt: skip
        for share, rows in cases:
            gap = np.abs(self._learner_logp(groups, share, rows) - reference).max(initial=0.0)
            yield Finding(
                f"share {share}{'' if rows == ANY_LENGTH else f', rows of {rows} tokens'}: max |difference|",
                float(gap),
                self._packing_limit,
            )

    def _alignment(self, groups: list[Group]) -> Finding:
        """Log-probs shifted by one must be noticed: else the agreement above says nothing."""
        behaviour, learner = _behaviour(groups), self._learner_logp(groups, "none", ANY_LENGTH)
        shifted = float(np.abs(learner[:-1] - behaviour[1:]).mean()) if len(learner) > 1 else 1.0
        return Finding("shifted by one: mean |pi - mu|", shifted, self._shifted_limit, at_least=True)

    def _pushes(self, engine: InferenceEngine) -> Iterable[Finding]:
        """The same weights pushed again and again with requests in flight must change nothing."""
        worst = []
        for _ in range(NUM_PUSHES):
            groups = self._generate(engine, 1.0, push_between=True)
            worst.append(float(np.abs(self._difference(groups)).max(initial=0.0)))
        yield Finding(f"{NUM_PUSHES} pushes of the same weights: max |pi - mu|", max(worst), self._limit)
        trend = float(np.mean(worst[-5:]) - np.mean(worst[:5]))
        yield Finding(f"{NUM_PUSHES} pushes: drift of max |pi - mu|", trend, self._limit / 10)

    def _there_and_back(self, engine: InferenceEngine) -> Iterable[Finding]:
        """Push A, then B, then A: the engine must be a fresh one, bit for bit."""
        original = self._policy.flat.clone()
        noise = torch.Generator().manual_seed(1)
        self._policy.flat.add_(torch.randn(original.shape, generator=noise) * original.std() * 0.1)
        self._policy.round_to_published()
        self._push(engine)
        changed = self._generate(engine, 1.0)
        yield from self._agreement("after A -> B", changed)
        self._policy.flat.copy_(original)
        self._push(engine)
        cursor = self._prompts.cursor
        back = self._generate(engine, 1.0, seed=5)
        self._prompts.cursor = cursor  # the same prompts again
        fresh = self._generate(self._fresh_engine(), 1.0, seed=5)
        same = [
            np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.logprobs, b.logprobs)
            for a, b in zip(_trajectories(back), _trajectories(fresh), strict=True)
        ]
        yield Finding(
            "after A -> B -> A: trajectories that differ from a fresh engine's", float(same.count(False)), 0.0
        )

    # ----------------------------------------------------------------------------------------------------------

    def _fresh_engine(self) -> InferenceEngine:
        engine = build_engine(self._config, self._folder, self._tokenizer)
        self._push(engine)
        return engine

    def _push(self, engine: InferenceEngine) -> None:
        version = PolicyVersion(0, self._next_step)
        self._next_step += 1
        engine.apply(lambda flat: (flat.copy_(self._policy.flat), version)[1])

    def _generate(
        self, engine: InferenceEngine, temperature: float, *, push_between: bool = False, seed: int = 0
    ) -> list[Group]:
        config = self._config.model_copy(
            update={"sampling": self._config.sampling.model_copy(update={"temperature": temperature})}
        )
        maker = TicketMaker(config, self._tokenizer.eos_ids)
        tickets: dict[int, Ticket] = {}
        for number in range(config.batch.prompts):
            prompt = self._prompts.next()
            assert prompt is not None
            ticket = maker.make(number, prompt, PolicyVersion(0, 0))
            tickets[number] = ticket
            members = ticket.num_members
            engine.add(
                GroupRequest(number, ticket.prompt_ids, members, ticket.sampling, mix(ticket.seed, seed))
            )
        made: dict[int, list[Trajectory]] = {number: [] for number in tickets}
        while engine.num_running or engine.num_waiting:
            for member in engine.step():
                ticket = tickets[member.request_id]
                prompt_ids = np.array(ticket.prompt_ids, np.int32)
                zeros = np.zeros(len(prompt_ids), np.float32)
                ids = np.concatenate([prompt_ids, member.token_ids])
                made[member.request_id].append(
                    Trajectory(
                        trajectory_id=f"check.{member.request_id}.{member.member}",
                        ticket_id=member.request_id,
                        member=member.member,
                        prompt_index=ticket.prompt_index,
                        prompt_hash=prompt_digest(ticket.prompt_ids),
                        prompt_length=len(prompt_ids),
                        token_ids=ids,
                        loss_mask=np.arange(len(ids)) >= len(prompt_ids),
                        logprobs=np.concatenate([zeros, member.logprobs]),
                        spans=member.spans,
                        temperature=temperature,
                        finish_reason=member.finish_reason,
                        reward=float(member.member),  # any that vary, so that every token carries loss
                        num_cached=0,
                        started_s=member.started_s,
                        finished_s=member.finished_s,
                        kept=member.kept,
                    )
                )
            if push_between:
                self._push(engine)
        return [
            Group(tickets[number], sorted(members, key=lambda t: t.member), [], 0.0)
            for number, members in made.items()
        ]

    def _learner_logp(self, groups: list[Group], share: Share, tokens_per_row: int) -> NDArray[np.float32]:
        """The learner's log-probs of all sampled tokens, by trajectory and position."""
        batch = self._config.batch.model_copy(
            update={"share_prefix": share, "tokens_per_row": tokens_per_row}
        )
        prepared = prepare(groups, batch, recipe_of(self._config.algo), self._config.sampling.max_new_tokens)
        keys, values = [], []
        for row in prepared.rows:
            keys.append(np.stack([row.row.sequence, row.row.token]))
            row = row.to(self._policy.device)
            scores = score_row(self._policy, row, self._config.learner.head_chunk_mib << 20)
            values.append(scores.float().cpu().numpy())
        order = np.lexsort(np.concatenate(keys, axis=1)[::-1])
        return np.concatenate(values)[order]

    def _difference(self, groups: list[Group]) -> NDArray[np.float32]:
        return self._learner_logp(groups, "none", ANY_LENGTH) - _behaviour(groups)


def _trajectories(groups: list[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def _behaviour(groups: list[Group]) -> NDArray[np.float32]:
    return np.concatenate([t.logprobs[t.loss_mask] for t in _trajectories(groups)])


def _shortened(config: RunConfig) -> RunConfig:
    """What a check needs: a few prompts, short completions."""
    batch, sampling = config.batch, config.sampling
    return config.model_copy(
        update={
            "batch": batch.model_copy(
                update={
                    "prompts": min(batch.prompts, MAX_PROMPTS),
                    "samples": max(2, min(batch.samples, MAX_SAMPLES)),
                }
            ),
            "sampling": sampling.model_copy(
                update={"max_new_tokens": min(sampling.max_new_tokens, MAX_NEW_TOKENS), "stop_strings": ()}
            ),
        }
    )


def selfcheck(config: RunConfig) -> int:
    """`headway selfcheck`: prints each finding; returns 0 when all passed, else 1.

    Raises:
        HeadwayError: the model or the environment cannot be used.
    """
    torch.set_num_threads(derived.threads(config, "learner", torch.get_num_threads()))
    wrong = 0
    for finding in SelfCheck(config).run():
        print(finding.line(), flush=True)
        wrong += not finding.passed
    print("the two sides agree" if not wrong else f"{wrong} checks failed: do not train with this set-up")
    return 1 if wrong else 0
