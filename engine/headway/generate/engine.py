"""The embedded engine: continuous batching over a transformers module, on one thread.

Each step forwards a ragged mixture of prompt chunks and one token per running sequence. A group's prompt is
prefilled once; its members read it from the pool. Weights are swapped between two steps.

Nothing in the pool outlives its group, and no group reads another's: there is no prefix cache between requests, so
a prompt asked again after a push is forwarded again, and there is nothing that could be salted by version.

Called by headway.generator and headway.serial; never waits.

Legend: N tokens of a step, S sequences that sample in it, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.errors import WeightError
from headway.generate.batch import DecodeBatch, RunningGroup
from headway.generate.filters import filter_groups
from headway.generate.plan import Ints, Runs
from headway.generate.prefill import Prefill, PrefillQueue
from headway.generate.protocol import FinishedMember, GroupRequest
from headway.generate.rebuild import chunked, stale_tokens, too_old
from headway.generate.servable import check_servable
from headway.generate.slots import RegionAllocator, make_pool
from headway.generate.stops import StopTable
from headway.model import AttentionContext, Policy
from headway.types import FinishReason, KeptSets, Manifest, PolicyVersion
from headway.weights.served import FlatServed, Served
from headway_kernels.sampling import sample_tokens


class TorchEngine:
    """InferenceEngine over a Policy.

    Args:
        policy: without gradients; its flat weights are overwritten by apply, replaced by swap.
        max_running: sequences in the batch at once; kv_tokens: of the pool (0: what max_running sequences of
            the full context need, at most MAX_POOL_BYTES).
        prefill_tokens: prompt tokens forwarded in one step at most.
        kv: when weights change, "keep" the cache of running sequences, "recompute" it, or recompute what was
            written more than so many optimizer steps before.
        decode: ids to text, for stop strings.
        clock: Unix time.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_running: int,
        kv_tokens: int,
        prefill_tokens: int,
        kv: str | int,
        decode: Callable[[Sequence[int]], str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.policy = policy
        self.max_running = max_running
        self.prefill_tokens = prefill_tokens
        self._kv = kv
        self._clock = clock
        self._pool = make_pool(policy, max_running, kv_tokens)
        self._regions = RegionAllocator(self._pool.keys.shape[1])
        self._stops = StopTable(policy.vocab_size, decode)
        self._batch = DecodeBatch()
        self._groups: dict[int, RunningGroup] = {}
        self._prefilling = PrefillQueue()
        self._waiting: deque[GroupRequest] = deque()
        self._num_waiting = 0
        self._versions: list[PolicyVersion] = []
        self._num_sampled = 0
        self._held = self._torn = False

    @property
    def manifest(self) -> Manifest:
        """Of the weights it serves."""
        return self.policy.manifest

    @property
    def flat(self) -> Tensor:
        """The weights it serves, fp32 [num_elements]."""
        return self.policy.flat

    @property
    def served(self) -> Served:
        """Its weights, written in place or swapped."""
        return FlatServed(self, self.manifest)

    @property
    def version(self) -> PolicyVersion | None:
        """In force; None before the first apply."""
        return self._versions[-1] if self._versions else None

    @property
    def num_running(self) -> int:
        """Sequences in the decode batch."""
        return self._batch.size

    @property
    def num_waiting(self) -> int:
        """Sequences not yet admitted to it."""
        return self._num_waiting

    @property
    def num_sampled(self) -> int:
        """Tokens sampled since the start, of all sequences, aborted ones included."""
        return self._num_sampled

    def add(self, request: GroupRequest) -> None:
        """Queue a group.

        Raises:
            Unservable: empty prompt, no budget, prompt and budget beyond the context, or beyond the pool.
            ValueError: a group of this id is in the engine.
        """
        name = request.request_id
        if name in self._groups or any(other.request_id == name for other in self._waiting):
            raise ValueError(f"request {name} is in the engine already; each group needs an id of its own")
        check_servable(
            request,
            context_length=self.policy.context_length,
            vocab_size=self.policy.vocab_size,
            pool_tokens=self._regions.num_tokens,
            max_running=self.max_running,
        )
        self._waiting.append(request)
        self._num_waiting += len(request.members)

    def abort(self, request_id: int) -> int:
        """Forget a group; returns the sampled tokens that die with it."""
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                self._num_waiting -= len(request.members)
                return 0
        group = self._groups.get(request_id)
        if group is None:
            return 0
        mine = self._batch.group[: self._batch.size] == request_id
        lost = int(self._batch.count[: self._batch.size][mine].sum())
        self._release(np.flatnonzero(mine))
        self._prefilling.discard(group)
        self._batch.keep(~mine)
        return lost

    def apply(self, copy: Callable[[Tensor], PolicyVersion]) -> None:
        """Put a version in force: `copy` fills the flat weights [num_elements]; requests in flight go on.

        If `copy` raises, the weights may be of no version: steps are refused until an apply succeeds.
        """
        self._torn = True
        self._versions.append(copy(self.policy.flat))
        self._torn = False
        self._rebuild_cache()

    def swap(self, flat: Tensor, version: PolicyVersion) -> None:
        """Put a version in force by serving from `flat` (fp32 [num_elements]); requests in flight go on."""
        self._torn = True
        self.policy.serve_from(flat)
        self._versions.append(version)
        self._torn = False
        self._rebuild_cache()

    def hold(self, held: bool) -> None:
        """While held, waiting groups are not admitted; running ones go on."""
        self._held = held

    def restart(self) -> None:
        """Drop the cache of every running sequence; each is forwarded again, prompt and own tokens, chunk by chunk."""
        self._prefilling.restart(list(self._groups.values()))
        self._batch.restart()

    @torch.inference_mode()
    def step(self) -> list[FinishedMember]:
        """One forward over all running sequences: one new token each; members that ended, by row."""
        assert self._versions, "no weights applied yet"
        if self._torn:
            raise WeightError(
                "an apply failed half-way: these weights are of no version; apply again, or end"
            )
        self._admit()
        if self._batch.size == 0:
            return []
        decode_rows = np.flatnonzero(self._batch.ready[: self._batch.size])
        prefill = self._prefilling.take(self._batch, self.prefill_tokens, len(self._versions) - 1)
        hidden = self._forward(prefill, decode_rows)
        rows, sources = self._sampling_rows(prefill, decode_rows)
        if len(rows) == 0:
            return []
        self._sample(hidden, rows, sources)
        return self._finish(rows)

    # Admission ------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and not self._held:
            request = self._waiting[0]
            if self._batch.size + len(request.members) > self.max_running:
                return
            starts = self._take_regions(request)
            if starts is None:
                return
            self._waiting.popleft()
            self._num_waiting -= len(request.members)
            self._start(request, starts)

    def _take_regions(self, request: GroupRequest) -> list[int] | None:
        """Starts of the prompt's region and of each member's; None, with nothing taken, if one does not fit."""
        own = request.sampling.max_new_tokens
        return self._regions.take_all([len(request.prompt_ids)] + [own] * len(request.members))

    def _start(self, request: GroupRequest, starts: list[int]) -> None:
        stop_row = self._stops.row(request.sampling)
        group = RunningGroup(request, starts[0], self._clock(), stop_row)
        group.open_members.update(request.members)
        self._groups[request.request_id] = group
        self._prefilling.add(group)
        self._batch.admit(group, starts[1:])

    # Forward --------------------------------------------------------------------------------------------------

    def _decode_runs(self, rows: Ints) -> Runs:
        batch = self._batch
        return Runs(
            np.ones(len(rows), np.int64),
            batch.own_start[rows],
            batch.count[rows] - 1,
            batch.prompt_start[rows],
            batch.prompt_length[rows],
        )

    def _forward(self, prefill: Prefill, decode_rows: Ints) -> Tensor:
        batch = self._batch
        decode_ids = batch.tokens[decode_rows, batch.count[decode_rows] - 1].astype(np.int64)
        decode_positions = batch.prompt_length[decode_rows] + batch.count[decode_rows] - 1
        runs = Runs.concatenate([prefill.runs, self._decode_runs(decode_rows)])
        batch.forwarded(decode_rows, len(self._versions) - 1)
        ids = np.concatenate([prefill.ids, decode_ids])
        return self._run(runs, ids, np.concatenate([prefill.positions, decode_positions]))

    def _run(self, runs: Runs, ids: Ints, positions: Ints) -> Tensor:
        """Forward tokens [N] through the backbone, writing their KV; hidden states [N, H]."""
        plan = runs.plan(self._regions.num_tokens)
        context = AttentionContext(plan, self._pool, torch.from_numpy(runs.pool_positions()))
        return self.policy.backbone(torch.from_numpy(ids), torch.from_numpy(positions), context)

    @torch.inference_mode()
    def _rebuild_cache(self) -> None:
        """Forward what `kv` says of the pool again, prompts before members, under the weights in force."""
        old = too_old(self._versions, self._kv)
        if old is None:
            return
        for chunk in chunked(stale_tokens(self._groups.values(), self._batch, old), self.prefill_tokens):
            ids = np.concatenate([np.array(part.token_ids, np.int64) for part in chunk])
            positions = np.concatenate([part.positions() for part in chunk])
            self._run(Runs.concatenate([part.run for part in chunk]), ids, positions)
            for part in chunk:
                part.written[:] = len(self._versions) - 1

    # Sampling and ends ----------------------------------------------------------------------------------------

    def _sampling_rows(self, prefill: Prefill, decode_rows: Ints) -> tuple[Ints, Ints]:
        """Rows [S] that sample, and for each the token [S] of this step whose hidden state it samples from."""
        rows, sources = [], []
        for group, end in zip(prefill.completed, np.cumsum(prefill.runs.length).tolist(), strict=True):
            if group is not None:
                mine = self._batch.prompt_cached(group.request.request_id)
                rows.append(mine)
                sources.append(np.full(len(mine), end - 1))
        rows.append(decode_rows)
        sources.append(prefill.num_tokens + np.arange(len(decode_rows)))
        return np.concatenate(rows), np.concatenate(sources)

    def _sample(self, hidden: Tensor, rows: Ints, sources: Ints) -> None:
        batch = self._batch
        unique, inverse = np.unique(sources, return_inverse=True)
        logits = self.policy.head.logits(hidden[torch.from_numpy(unique)])
        if len(unique) < len(sources):
            logits = logits[torch.from_numpy(inverse)]
        filter_groups(logits, self._groups.values(), batch.group[rows], batch.member[rows])
        tokens, logprobs = sample_tokens(
            logits,
            torch.from_numpy(batch.inv_temperature[rows]),
            torch.from_numpy(batch.seed[rows]),
            torch.from_numpy(batch.count[rows]),
        )
        self._num_sampled += len(rows)
        batch.record(rows, tokens.numpy(), logprobs.numpy(), len(self._versions) - 1)

    def _finish(self, rows: Ints) -> list[FinishedMember]:
        batch = self._batch
        last = batch.tokens[rows, batch.count[rows] - 1]
        broken = last < 0
        stopped = self._stops.stopped(batch, rows, last)
        ended = broken | stopped | (batch.count[rows] >= batch.budget[rows])
        if not ended.any():
            return []
        now = self._clock()
        finished = [
            self._member(int(row), self._reason(bool(broken[i]), bool(stopped[i])), now)
            for i, row in enumerate(rows.tolist())
            if ended[i]
        ]
        self._release(rows[ended])
        keep: NDArray[np.bool_] = np.ones(batch.size, np.bool_)
        keep[rows[ended]] = False
        batch.keep(keep)
        return finished

    @staticmethod
    def _reason(broken: bool, stopped: bool) -> FinishReason:
        if broken:
            return FinishReason.ERROR
        return FinishReason.STOP if stopped else FinishReason.LENGTH

    def _member(self, row: int, reason: FinishReason, now: float) -> FinishedMember:
        batch = self._batch
        count, request_id, member = int(batch.count[row]), int(batch.group[row]), int(batch.member[row])
        kept = self._groups[request_id].kept.pop(member, None)
        return FinishedMember(
            request_id=request_id,
            member=member,
            token_ids=batch.tokens[row, :count].copy(),
            logprobs=batch.logprobs[row, :count].copy(),
            spans=batch.spans(row, self._versions),
            finish_reason=reason,
            started_s=self._groups[request_id].started_s,
            finished_s=now,
            kept=KeptSets.of(kept) if kept else None,
        )

    def _release(self, rows: Ints) -> None:
        batch = self._batch
        for row in rows.tolist():
            self._regions.release(int(batch.own_start[row]), int(batch.budget[row]))
            group = self._groups[int(batch.group[row])]
            group.open_members.discard(int(batch.member[row]))
            if not group.open_members:
                self._regions.release(group.prompt_start, group.prompt_length)
                del self._groups[group.request.request_id]
