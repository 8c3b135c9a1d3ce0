"""A vLLM that somebody else runs, and a learner's publishers for it.

The engine is vLLM's own, made and stepped by its own calls; publisher and channel are the learner's. The oracle is
transformers' forward in float64 (tests/generate/conftest.py).
"""

from __future__ import annotations

import asyncio
import importlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.generate.vllm_case import PROMPT, TOLERANCE

from headway.generate.vllm import library, transfer
from headway.model import load_policy
from headway.types import PolicyVersion
from headway.weights import WeightPublisher, publish_through

_alive: list[Any] = []  # process groups are shared, and go with the first engine that is collected


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": str(folder),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 64,
        "block_size": 32,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 16 << 20,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": False,
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "distributed_executor_backend": "uni",
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": "headway"},
        **changes,
    }


class Outside:
    """Somebody's LLMEngine."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.vllm = library.load_vllm()
        self.llm = self.vllm.LLMEngine.from_engine_args(self.vllm.EngineArgs(**arguments(folder, **changes)))
        _alive.append(self.llm)
        self._count = 0

    def rpc(self, method: str, **given: Any) -> Any:
        return self.llm.collective_rpc(method, kwargs=given)[0]

    def join(self, publisher: WeightPublisher, run_id: str, **here: Any) -> None:
        self.rpc("init_weight_transfer_engine", init_info=transfer.init_info(publisher, run_id, **here))

    @property
    def transfer(self) -> Any:
        return self.llm.engine_core.engine_core.model_executor.driver_worker.worker.weight_transfer_engine

    def add(self, prompt: Sequence[int], budget: int, salt: str | None = None) -> None:
        self._count += 1
        tokens = self.vllm.TokensPrompt(
            prompt_token_ids=list(prompt), **({"cache_salt": salt} if salt else {})
        )
        sampling = self.vllm.SamplingParams(
            temperature=0.0, max_tokens=budget, ignore_eos=True, logprobs=0, detokenize=False
        )
        self.llm.add_request(str(self._count), tokens, sampling)

    def step(self, count: int) -> None:
        for _ in range(count):
            assert not any(output.finished for output in self.llm.step())

    def finish(self) -> list[Any]:
        """The completions of all requests, in order of admission."""
        done: dict[int, Any] = {}
        while self.llm.has_unfinished_requests():
            for output in self.llm.step():
                if output.finished:
                    done[int(output.request_id)] = output.outputs[0]
        return [done[number] for number in sorted(done)]

    def ask(self, prompt: Sequence[int], budget: int = 8) -> Any:
        self.add(prompt, budget)
        (completion,) = self.finish()
        return completion


class AsyncEngine:
    """Somebody's AsyncLLM: the engine core and its worker are another process."""

    def __init__(self, folder: Path) -> None:
        self.vllm = library.load_vllm()
        engine = importlib.import_module("vllm.v1.engine.async_llm")
        self.llm = engine.AsyncLLM.from_engine_args(self.vllm.AsyncEngineArgs(**arguments(folder)))

    async def join(self, info: dict[str, Any]) -> None:
        base = importlib.import_module("vllm.distributed.weight_transfer.base")
        await self.llm.init_weight_transfer_engine(base.WeightTransferInitRequest(init_info=info))

    async def generate(self, prompt: list[int], label: str, started: asyncio.Event) -> Any:
        tokens = self.vllm.TokensPrompt(prompt_token_ids=prompt, cache_salt=label)
        sampling = self.vllm.SamplingParams(
            temperature=0.0, max_tokens=50, ignore_eos=True, logprobs=0, detokenize=False
        )
        last: Any = None
        async for last in self.llm.generate(tokens, sampling, uuid.uuid4().hex):
            if len(last.outputs[0].token_ids) >= 5:
                started.set()
        return last.outputs[0]

    async def round(self, publisher: WeightPublisher, versions: Any, kv: str, number: int) -> list[Any]:
        """Four requests, and a push of version 0.`number` once each has some tokens; prompts and completions."""
        publisher.publish(versions.flat[number], PolicyVersion(0, number))
        prompts = [[*PROMPT, token] for token in range(3, 7)]
        while not (await self.llm.collective_rpc(transfer.STATUS))[0]["staged"]:
            await asyncio.sleep(0.01)
        started = [asyncio.Event() for _ in prompts]
        running = [
            asyncio.create_task(self.generate(prompt, f"0.{number - 1}", event))
            for prompt, event in zip(prompts, started, strict=True)
        ]
        for event in started:
            await event.wait()
        put = await transfer.push_newest(self.llm, kv=kv, salted=True)
        assert put == PolicyVersion(0, number)
        assert await self.llm.get_weight_version() == str(put)
        return list(zip(prompts, await asyncio.gather(*running), strict=True))

    async def cancel_in_the_pause(self) -> None:
        """A push whose caller goes away once the engine is paused is made all the same, label included."""
        paused, pause = asyncio.Event(), self.llm.pause_generation

        async def pause_and_tell(**options: Any) -> None:
            await pause(**options)
            paused.set()

        self.llm.pause_generation = pause_and_tell
        push = asyncio.create_task(transfer.push_newest(self.llm))
        await paused.wait()
        push.cancel()
        with pytest.raises(asyncio.CancelledError):
            await push
        async with asyncio.timeout(20.0):
            while await self.llm.get_weight_version() != "0.4" or await self.llm.is_paused():
                await asyncio.sleep(0.01)


class Read:
    """Of vLLM's completions."""

    @staticmethod
    def logprobs(completion: Any) -> np.ndarray:
        found = zip(completion.token_ids, completion.logprobs, strict=True)
        return np.array([at[token].logprob for token, at in found])

    @staticmethod
    def labels(completion: Any) -> list[str]:
        return [span.version for span in completion.weight_versions for _ in range(span.start, span.end)]

    @staticmethod
    def check_greedy(oracle: Any, versions: Any, prompt: Sequence[int], completion: Any, number: int) -> None:
        """Log-probs are the oracle's, and each token is its most likely one."""
        tokens = list(completion.token_ids)
        assert (
            np.abs(Read.logprobs(completion) - oracle.fresh(prompt, tokens, 1.0, number)).max() <= TOLERANCE
        )
        with torch.no_grad():
            logits = versions.module(number)(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0]
        assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.fixture(scope="session")
def outside(folder: Path) -> Outside:
    return Outside(folder)


@pytest.fixture
def open_outside() -> type[Outside]:
    """Opens an engine of another kind."""
    return Outside


@pytest.fixture
def open_async() -> type[AsyncEngine]:
    return AsyncEngine


@pytest.fixture
def read() -> type[Read]:
    return Read


@pytest.fixture
def published(folder: Path, tmp_path: Path) -> Iterator[Callable[..., tuple[WeightPublisher, str]]]:
    """Opens a publisher on a channel; its run id."""
    manifest = load_policy(folder, with_grad=False).manifest
    opened: list[WeightPublisher] = []

    def make(channel: str = "shm", **options: Any) -> tuple[WeightPublisher, str]:
        run_id = uuid.uuid4().hex[:8]
        opened.append(publish_through(channel, manifest, run_id, **options))
        return opened[-1], run_id

    yield make
    for publisher in opened:
        publisher.close()
