"""The rollout loop's state: tickets in, trajectories out. No sockets, no waiting, one thread.

headway.generator.main pumps messages between this and the learner; headway.serial calls it directly. One turn:

    messages from the learner -> newest weights in force -> one decode step -> rewards -> messages to the learner
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headway.envs import Completion, RewardPool, RewardResult
from headway.generate import FinishedMember, GroupRequest, InferenceEngine, Unservable
from headway.generator.outbox import MAX_KEPT_IDS, Outbox, how_many_fit
from headway.types import (
    DropReason,
    FinishReason,
    MemberFailure,
    PolicyVersion,
    Ticket,
    Trajectory,
    prompt_digest,
)
from headway.weights import Proof
from headway.wire.messages import Trajectories, WeightAck


class WeightSource(Protocol):
    """Where new weights come from: a stager over this rollout's engine."""

    def staged(self) -> PolicyVersion | None:
        """The version that a commit would put in force now, None if there is none."""
        ...

    def commit(self) -> PolicyVersion | None:
        """Put it in force in the engine; None if there is none any more."""
        ...

    def relieve(self) -> bool:
        """Copy what the engine serves out of memory that the learner needs; True if that was so."""
        ...

    def proofs(self) -> list[Proof]:
        """Versions in force, each with the digest of what is served, since the last call."""
        ...

    @property
    def unproved(self) -> bool:
        """Whether a version is in force whose proof is still to come."""
        ...


@dataclass
class _Held:
    """A ticket held here: what it still owes the learner."""

    ticket: Ticket
    prompt_hash: int
    expires_s: float
    open_members: set[int]


class Rollout:
    """Tickets through an engine and a reward pool.

    Args:
        incarnation: of this generator; part of every trajectory id.
        engine, rewards, weights: what it drives; decode: many id sequences to texts.
        mode: what a push does to sequences in flight: "in_flight", they go on; "drain", they end first, and nothing
            new starts meanwhile; "resume", they are aborted and go on from their prefix, forwarded again.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        incarnation: str,
        engine: InferenceEngine,
        rewards: RewardPool,
        weights: WeightSource,
        decode: Callable[[Sequence[Sequence[int]]], list[str]],
        clock: Callable[[], float] = time.monotonic,
        *,
        mode: str = "in_flight",
    ) -> None:
        self.incarnation = incarnation
        self._mode = mode
        self._pauses: dict[PolicyVersion, float] = {}
        self.engine = engine
        self.rewards = rewards
        self._num_sent = 0
        self._weights = weights
        self._decode = decode
        self._clock = clock
        self._held: dict[int, _Held] = {}
        self._waiting: list[Ticket] = []
        self._scoring: dict[int, list[FinishedMember]] = {}
        self._next_job = 0
        self._next_seq = 1
        self._outbox = Outbox()

    @property
    def num_unsent(self) -> int:
        """Sampled tokens that no message has carried yet, those of running sequences included."""
        return self.engine.num_sampled - self._num_sent

    @property
    def num_tickets(self) -> int:
        """Tickets held."""
        return len(self._held)

    @property
    def tickets(self) -> Collection[int]:
        """Ids of the tickets held. A live view."""
        return self._held.keys()

    @property
    def has_work(self) -> bool:
        """Whether a decode step would do anything."""
        return self.engine.num_running + self.engine.num_waiting > 0

    @property
    def num_scoring(self) -> int:
        """Reward jobs out."""
        return len(self._scoring)

    def grant(self, tickets: Sequence[Ticket]) -> None:
        """New tickets; they join the decode batch together, in this order, once their version is in force.

        One that is held already came twice: its first Grant was thought lost.
        """
        now = self._clock()
        tickets = [ticket for ticket in tickets if ticket.ticket_id not in self._held]
        for ticket in tickets:
            digest = prompt_digest(ticket.prompt_ids)
            members = set(range(ticket.num_members)) - {*ticket.held}
            self._held[ticket.ticket_id] = _Held(ticket, digest, now + ticket.deadline_s, members)
        self._waiting.extend(tickets)

    def cancel(self, ticket_ids: Sequence[int]) -> None:
        """Give tickets up: nothing more is sent for them."""
        for ticket_id in ticket_ids:
            if ticket_id in self._held:
                self._drop(ticket_id, DropReason.TICKET_CLOSED, "cancelled by the learner")

    def attach(self, weights: WeightSource) -> None:
        """Take new versions from another source; what is in force stays until it has one."""
        self._weights = weights
        self._pauses.clear()

    def refresh(self) -> bool:
        """Put what is staged in force, as `mode` says; True if it did. Proofs that came in become acks."""
        self._acknowledge()
        self._weights.relieve()
        version = self._weights.staged()
        if version is None or (self.engine.version is not None and version <= self.engine.version):
            return False
        if self._mode == "drain" and self.engine.num_running:
            self.engine.hold(True)
            return False
        started = time.perf_counter()
        committed = self._weights.commit()
        if committed is None:
            return False
        if self._mode == "resume":
            self.engine.restart()
        self._pauses[committed] = time.perf_counter() - started
        self.engine.hold(False)
        self._acknowledge()
        return True

    def _acknowledge(self) -> None:
        for proof in self._weights.proofs():
            pause_s = self._pauses.pop(proof.version, 0.0)
            self._outbox.acks.append(
                WeightAck(
                    incarnation=self.incarnation, version=proof.version, digest=proof.digest, pause_s=pause_s
                )
            )

    def turn(self) -> None:
        """Admit what may start, decode one step, hand completions to the reward workers, take rewards in."""
        self._admit()
        self._expire()
        if self.engine.version is not None and self.has_work:
            self._score(self.engine.step())
        self.collect(self.rewards.poll())
        self.rewards.check()

    def take(self) -> Trajectories | None:
        """What has finished or failed; what is left afterwards does not fit one message.

        While the version in force is unproved nothing that it may have sampled leaves.
        """
        out = self._outbox
        if self._weights.unproved or not (out.finished or out.failures):
            return None
        fit = how_many_fit(out.finished)
        message = Trajectories(
            incarnation=self.incarnation,
            seq=self._next_seq,
            trajectories=out.finished[:fit],
            failures=out.failures,
            generated=self.engine.num_sampled,
        )
        out.finished, out.failures = out.finished[fit:], []
        self._next_seq += 1
        self._num_sent += sum(t.num_tokens - t.prompt_length for t in message.trajectories)
        self._num_sent += sum(failure.num_tokens for failure in message.failures)
        return message

    def take_acks(self) -> list[WeightAck]:
        """Of `refresh`. To be sent before the decode step: the learner's next tickets wait for them."""
        acks, self._outbox.acks = self._outbox.acks, []
        return acks

    def collect(self, results: Sequence[RewardResult]) -> None:
        """Rewards are in: their members are finished, or failed where there is no reward."""
        for result in results:
            for member, reward, error in zip(
                self._scoring.pop(result.job_id), result.rewards, result.errors, strict=True
            ):
                self._settle(member, reward, error)

    # ----------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        version = self.engine.version
        ready = [ticket for ticket in self._waiting if version is not None and ticket.admitted <= version]
        if not ready:
            return
        self._waiting = [ticket for ticket in self._waiting if version is None or ticket.admitted > version]
        for ticket in ready:
            request = GroupRequest(
                ticket.ticket_id,
                ticket.prompt_ids,
                ticket.num_members,
                ticket.sampling,
                ticket.seed,
                frozenset(ticket.held),
            )
            try:
                self.engine.add(request)
            except Unservable as error:
                self._drop(ticket.ticket_id, error.reason, str(error))

    def _expire(self) -> None:
        now = self._clock()
        for ticket_id in [key for key, held in self._held.items() if held.expires_s <= now]:
            self._drop(ticket_id, DropReason.DEADLINE, "the rollout deadline passed")

    def _drop(self, ticket_id: int, reason: DropReason, detail: str) -> None:
        """Every member still open ends with `reason`; the tokens of running ones are booked on the first.

        Tokens of members whose reward is out are booked when it comes.
        """
        self._waiting = [ticket for ticket in self._waiting if ticket.ticket_id != ticket_id]
        num_tokens = self.engine.abort(ticket_id)
        for member in sorted(self._held.pop(ticket_id).open_members):
            self._outbox.failures.append(MemberFailure(ticket_id, member, reason, detail, num_tokens))
            num_tokens = 0

    def _score(self, finished: list[FinishedMember]) -> None:
        by_ticket: dict[int, list[FinishedMember]] = {}
        for member in finished:
            if member.request_id in self._held:
                if member.finish_reason is FinishReason.ERROR:
                    self._fail(member, DropReason.GENERATION_FAILED, "the logits are not finite")
                else:
                    by_ticket.setdefault(member.request_id, []).append(member)
        for ticket_id, members in by_ticket.items():
            texts = self._decode([self._text_ids(ticket_id, member) for member in members])
            completions = [
                Completion(text, member.token_ids.tolist(), member.finish_reason)
                for text, member in zip(texts, members, strict=True)
            ]
            job = self._next_job
            self._next_job += 1
            self._scoring[job] = members
            self.rewards.submit(job, self._held[ticket_id].ticket.prompt_index, completions)

    def _text_ids(self, ticket_id: int, member: FinishedMember) -> list[int]:
        """The ids that make the text: without the stop token that ended it."""
        ids: list[int] = member.token_ids.tolist()
        sampling = self._held[ticket_id].ticket.sampling
        stopped = member.finish_reason is FinishReason.STOP and ids[-1] in sampling.stop_ids
        return ids[:-1] if stopped else ids

    def _settle(self, member: FinishedMember, reward: float | None, error: str) -> None:
        held = self._held.get(member.request_id)
        if (
            held is None
        ):  # cancelled or expired while its reward was out: only its tokens are still to be booked
            self._outbox.failures.append(
                MemberFailure(
                    member.request_id, member.member, DropReason.TICKET_CLOSED, error, len(member.token_ids)
                )
            )
            return
        if reward is None:
            self._fail(member, DropReason.REWARD_FAILED, error)
            return
        num_kept = 0 if member.kept is None else len(member.kept.ids)
        if num_kept > MAX_KEPT_IDS:
            fault = f"its kept sets hold {num_kept} ids, at most {MAX_KEPT_IDS} travel; set sampling.top_k"
            self._fail(member, DropReason.GENERATION_FAILED, fault)
            return
        ticket = held.ticket
        prompt_length, count = len(ticket.prompt_ids), len(member.token_ids)
        mask = np.zeros(prompt_length + count, np.bool_)
        mask[prompt_length:] = True
        logprobs = np.zeros(prompt_length + count, np.float32)
        logprobs[prompt_length:] = member.logprobs
        self._outbox.finished.append(
            Trajectory(
                trajectory_id=f"{self.incarnation}.{ticket.ticket_id}.{member.member}",
                ticket_id=ticket.ticket_id,
                member=member.member,
                prompt_index=ticket.prompt_index,
                prompt_hash=held.prompt_hash,
                prompt_length=prompt_length,
                token_ids=np.concatenate([np.array(ticket.prompt_ids, np.int32), member.token_ids]),
                loss_mask=mask,
                logprobs=logprobs,
                spans=member.spans,
                temperature=ticket.sampling.temperature,
                finish_reason=member.finish_reason,
                reward=reward,
                num_cached=0,
                started_s=member.started_s,
                finished_s=member.finished_s,
                kept=member.kept,
            )
        )
        self._close(member)

    def _fail(self, member: FinishedMember, reason: DropReason, detail: str) -> None:
        failure = MemberFailure(member.request_id, member.member, reason, detail, len(member.token_ids))
        self._outbox.failures.append(failure)
        self._close(member)

    def _close(self, member: FinishedMember) -> None:
        held = self._held[member.request_id]
        held.open_members.discard(member.member)
        if not held.open_members:
            del self._held[member.request_id]
