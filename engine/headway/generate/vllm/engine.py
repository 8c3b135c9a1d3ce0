"""vLLM's engine, stepped by the rollout loop: one call is one forward, and weights change only between two calls.

vLLM runs in this process without asynchronous scheduling, so the tokens that a step returns were sampled by the
weights in force when it was called: that is their version, recorded token by token. Prompts are salted with the
version in force at their admission, so no prefix of older weights is ever read for a new request.

Called by headway.generator and headway.serial; never waits.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.errors import EngineEnded, UnsupportedOption, WeightError
from headway.generate.protocol import FinishedMember, GroupRequest
from headway.generate.seeds import mix
from headway.generate.servable import check_servable
from headway.generate.stops import ends_in_stop
from headway.generate.vllm.kept import SamplerTap
from headway.generate.vllm.sharded import Workers
from headway.types import FinishReason, KeptSets, Manifest, PolicyVersion, Sampling, VersionSpan
from headway.weights.served import Served, published_dtype
from headway_kernels.weight_delta import whole

ENDS = {None: None, "stop": FinishReason.STOP, "length": FinishReason.LENGTH}


@dataclass(frozen=True)
class Limits:
    """What a request must fit.

    Attributes:
        context_length, vocab_size: of the model; pool_tokens: of the KV cache; max_running: sequences at once.
    """

    context_length: int
    vocab_size: int
    pool_tokens: int
    max_running: int


@dataclass
class _Sequence:
    """One member inside vLLM."""

    request: GroupRequest
    member: int
    started_s: float
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    kept: list[NDArray[np.int32]] = field(default_factory=list[NDArray[np.int32]])

    @property
    def name(self) -> str:
        return f"{self.request.request_id}.{self.member}"

    def add(self, tokens: Sequence[int], logprobs: Sequence[float], version: PolicyVersion) -> None:
        start = len(self.request.prompt_ids) + len(self.token_ids)
        end = start + len(tokens)
        self.token_ids += tokens
        self.logprobs += logprobs
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(start, end, version))


class VLLMEngine:
    """InferenceEngine over an in-process vLLM LLMEngine.

    Args:
        vllm: the module; llm: the engine, without requests.
        manifest: of the published weights; limits: of requests.
        kv: when weights change, "keep" the cache of running sequences, or "recompute" it.
        decode: ids to text, for stop strings. clock: Unix time.
        tap: where kept sets are read; None: they come with vLLM's outputs, or are not asked for.
        workers: that the model is split over; None: it is in this process.
    """

    def __init__(
        self,
        vllm: Any,
        llm: Any,
        *,
        manifest: Manifest,
        limits: Limits,
        kv: str,
        decode: Callable[[Sequence[int]], str],
        clock: Callable[[], float] = time.time,
        tap: SamplerTap | None = None,
        workers: Workers | None = None,
    ) -> None:
        self._vllm, self._llm = vllm, llm
        self._tap, self._workers = tap, workers
        self._manifest, self._limits = manifest, limits
        self._kv, self._decode, self._clock = kv, decode, clock
        self._served: Served | None = None
        self._adapter: Any = None
        self._waiting: deque[GroupRequest] = deque()
        self._running: dict[str, _Sequence] = {}
        self._version: PolicyVersion | None = None
        self._num_sampled, self._held, self._torn = 0, False, False

    @property
    def manifest(self) -> Manifest:
        """Of the weights it serves."""
        return self._manifest

    @property
    def served(self) -> Served:
        """Its weights, for a stager."""
        assert self._served is not None, "open_vllm says how its weights are written"
        return self._served

    def serve(self, served: Served, adapter: Any = None) -> None:
        """Say how its weights are written, and the LoRARequest of what is pushed; once, before the first push."""
        self._served, self._adapter = served, adapter

    @property
    def version(self) -> PolicyVersion | None:
        """In force; None before the first push."""
        return self._version

    @property
    def num_running(self) -> int:
        """Sequences inside vLLM."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences not yet handed to it."""
        return sum(len(request.members) for request in self._waiting)

    @property
    def num_sampled(self) -> int:
        """Tokens sampled since the start, of all sequences, aborted ones included."""
        return self._num_sampled

    def add(self, request: GroupRequest) -> None:
        """Queue a group.

        Raises:
            Unservable: empty prompt, no budget, prompt and budget beyond the context, or beyond the KV cache.
            ValueError: a group of this id is in the engine.
        """
        name, limits = request.request_id, self._limits
        known = {sequence.request.request_id for sequence in self._running.values()}
        if name in known or any(other.request_id == name for other in self._waiting):
            raise ValueError(f"request {name} is in the engine already; each group needs an id of its own")
        check_servable(
            request,
            context_length=limits.context_length,
            vocab_size=limits.vocab_size,
            pool_tokens=limits.pool_tokens,
            max_running=limits.max_running,
        )
        self._waiting.append(request)

    def abort(self, request_id: int) -> int:
        """Forget a group; returns the sampled tokens that die with it."""
        self._waiting = deque(request for request in self._waiting if request.request_id != request_id)
        mine = [s for s in self._running.values() if s.request.request_id == request_id]
        self._forget(mine)
        return sum(len(sequence.token_ids) for sequence in mine)

    def _forget(self, sequences: Sequence[_Sequence]) -> None:
        if sequences:
            self._llm.abort_request([sequence.name for sequence in sequences])
            for sequence in sequences:
                del self._running[sequence.name]

    def hold(self, held: bool) -> None:
        """While held, waiting groups are not admitted; running ones go on."""
        self._held = held

    # Weights --------------------------------------------------------------------------------------------------

    def tear(self) -> None:
        """The weights are of no version from now on, until `put`."""
        self._torn = True

    def put(self, version: PolicyVersion) -> None:
        """The weights are this version's, whole."""
        self._version = version
        self._torn = False
        if self._kv == "recompute":
            self.restart()
        else:
            self._salt_again()

    def apply(self, copy: Callable[[Tensor], PolicyVersion]) -> None:
        """Put a version in force: `copy` fills a flat fp32 [num_elements] with all of it; for one process."""
        flat = torch.zeros(self._manifest.num_elements)
        version = copy(flat)
        self.served.write(version, [whole(flat.to(published_dtype(self._manifest)))])

    def restart(self) -> None:
        """Drop the cache of every running sequence; each goes on from its own prefix, forwarded again."""
        self._salt_again()
        if self._running and not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise WeightError("vLLM did not give its KV cache up; what it holds is of older weights")

    def _salt_again(self) -> None:
        """Sequences that sampled nothing yet begin anew, so that their prompt is forwarded by these weights alone."""
        fresh = [sequence for sequence in self._running.values() if not sequence.token_ids]
        self._forget(fresh)
        for sequence in fresh:
            self._start(sequence)

    # Steps ----------------------------------------------------------------------------------------------------

    def step(self) -> list[FinishedMember]:
        """One forward over all running sequences; members that ended, in the order of admission.

        Raises:
            EngineEnded: a process of vLLM's is gone. WeightError: the weights are of no version.
        """
        assert self._version is not None, "no weights applied yet"
        if self._torn:
            raise WeightError(
                "an apply failed half-way: these weights are of no version; apply again, or end"
            )
        self._admit()
        if not self._running:
            return []
        ended: dict[str, FinishReason] = {}
        for output in self._step():
            sequence = self._running.get(output.request_id)
            if sequence is not None:
                reason = self._take(sequence, output.outputs[0])
                if reason is not None:
                    ended[sequence.name] = reason
        return self._finish(ended)

    def _step(self) -> Any:
        try:
            return self._llm.step()
        except (RuntimeError, TimeoutError) as error:
            if fault := self._workers.fault() if self._workers is not None else "":
                raise EngineEnded(fault) from error
            raise

    def _admit(self) -> None:
        while self._waiting and not self._held:
            request = self._waiting[0]
            if len(self._running) + len(request.members) > self._limits.max_running:
                return
            self._waiting.popleft()
            now = self._clock()
            for member in request.members:
                self._start(_Sequence(request, member, now))

    def _start(self, sequence: _Sequence) -> None:
        request = sequence.request
        assert self._version is not None
        salt = f"{self._version.epoch}.{self._version.step}"
        prompt = self._vllm.TokensPrompt(prompt_token_ids=list(request.prompt_ids), cache_salt=salt)
        self._running[sequence.name] = sequence
        parameters = self._parameters(request, sequence.member)
        self._llm.add_request(sequence.name, prompt, parameters, lora_request=self._adapter)

    def _parameters(self, request: GroupRequest, member: int) -> Any:
        sampling = request.sampling
        known = (
            [] if sampling.ignore_eos else [s for s in sampling.stop_ids if 0 <= s < self._limits.vocab_size]
        )
        return self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k or 0,
            top_p=sampling.top_p if sampling.top_p is not None else 1.0,
            min_p=sampling.min_p or 0.0,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=known,  # vLLM refuses others, which cannot be sampled
            ignore_eos=True,  # stop_ids are all of them
            seed=mix(request.seed, member),
            logprobs=0,
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
        )

    def _take(self, sequence: _Sequence, completion: Any) -> FinishReason | None:
        """New tokens of a sequence; why it ended, if it did."""
        tokens = [int(token) for token in completion.token_ids]
        logprobs = [
            float(at[token].logprob) for token, at in zip(tokens, completion.logprobs or [], strict=True)
        ]
        assert self._version is not None
        if tokens:
            sequence.add(tokens, logprobs, self._version)
            if sequence.request.sampling.keep_sets:
                sequence.kept += self._kept_sets(sequence, completion, len(tokens))
            self._num_sampled += len(tokens)
        reason = ENDS.get(completion.finish_reason, FinishReason.ERROR)
        if not all(math.isfinite(value) for value in logprobs):
            reason = FinishReason.ERROR
        elif completion.finish_reason is None and self._says_stop(sequence):
            reason = FinishReason.STOP
        if reason is not None and completion.finish_reason is None:
            self._llm.abort_request([sequence.name])  # vLLM would go on
        return reason

    def _kept_sets(self, sequence: _Sequence, completion: Any, num_tokens: int) -> list[NDArray[np.int32]]:
        mask = getattr(completion, "sampling_mask", None)
        if mask is not None:
            sets = [np.sort(np.asarray(ids, np.int32)) for ids in mask.token_ids]
        else:
            sets = [] if self._tap is None else [self._tap.kept(sequence.name)]
        if len(sets) != num_tokens:
            raise UnsupportedOption(
                f"sampling.kept_sets = 'carry': vllm {self._vllm.__version__} gave {len(sets)} kept sets for "
                f"{num_tokens} tokens of request {sequence.name}"
            )
        return sets

    def _says_stop(self, sequence: _Sequence) -> bool:
        sampling: Sampling = sequence.request.sampling
        if sampling.ignore_eos or not sampling.stop_strings or not sequence.token_ids:
            return False
        return ends_in_stop(self._decode, sequence.token_ids, sampling.stop_strings)

    def _finish(self, ended: dict[str, FinishReason]) -> list[FinishedMember]:
        if not ended:
            return []
        now = self._clock()
        members = [self._member(self._running.pop(name), reason, now) for name, reason in ended.items()]
        return sorted(members, key=lambda member: (member.started_s, member.request_id, member.member))

    @staticmethod
    def _member(sequence: _Sequence, reason: FinishReason, now: float) -> FinishedMember:
        return FinishedMember(
            request_id=sequence.request.request_id,
            member=sequence.member,
            token_ids=np.array(sequence.token_ids, np.int32),
            logprobs=np.array(sequence.logprobs, np.float32),
            spans=sequence.spans,
            finish_reason=reason,
            started_s=sequence.started_s,
            finished_s=now,
            kept=KeptSets.of(sequence.kept) if sequence.kept else None,
        )
