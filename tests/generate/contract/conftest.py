"""What the push contract needs of any engine, and the harness that drives one: rollout, stager, in-memory channel.

Another engine joins by another entry of ENGINES: a function of (versions, options) that returns an UnderTest.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.generate.vllm_case import NEEDS_VLLM

from headway.envs import Completion, RewardResult
from headway.generate import InferenceEngine
from headway.generate.vllm.library import live_runner
from headway.generate.vllm.weights import live_tensors, targets_of
from headway.generator import Rollout
from headway.types import PolicyVersion, Sampling, Ticket, Trajectory
from headway.weights import DoubledServed, FlatServed, Served, Stager, WeightPublisher

CHAOS = Path(__file__).parents[2] / "weights" / "chaos.py"


@dataclass(frozen=True)
class UnderTest:
    """An engine without a version in force.

    Attributes:
        served: its weights; watch: from now on calls a function before every forward.
        extremes: the smallest and the largest of all served values.
    """

    engine: InferenceEngine
    served: Served
    watch: Callable[[Callable[[], None]], None]
    extremes: Callable[[], tuple[float, float]]


def torch_engine(versions: Any, *, doubled: bool = False, **options: Any) -> UnderTest:
    engine = versions.engine(version=None, **options)

    def watch(before: Callable[[], None]) -> None:
        backbone = engine.policy.backbone

        def watched(*arguments: Any) -> torch.Tensor:
            before()
            return backbone(*arguments)

        engine.policy.backbone = watched

    served = (DoubledServed if doubled else FlatServed)(engine, engine.manifest)
    return UnderTest(engine, served, watch, lambda: (float(engine.flat.min()), float(engine.flat.max())))


_alive: list[Any] = []
"""vLLM's engines share process groups, which the first one to be collected would take away from the others."""


def vllm_engine(versions: Any, *, parallel: int = 1, **options: Any) -> UnderTest:
    from headway.generate.vllm import open_vllm
    from headway.generate.vllm.start import Sizes

    kv = options.pop("kv", "keep")
    if kv not in ("keep", "recompute"):
        pytest.skip("vLLM's cache is kept or dropped as a whole; the recipe's check refuses a number")
    sizes = Sizes(options.pop("max_running", 64), 0, options.pop("prefill_tokens", 512))
    assert options == {}
    engine = open_vllm(
        versions.folder,
        published_dtype="float32",
        sizes=sizes,
        kv=kv,
        options={"tensor_parallel_size": parallel},
        decode=versions.decode,
    )
    _alive.append(engine)
    if parallel == 1:
        model = live_runner(engine._llm).model
        tensors = live_tensors(model, targets_of(model, engine.manifest))
    else:
        tensors = engine.served._tensors  # of every worker

    def watch(before: Callable[[], None]) -> None:
        step = engine._llm.step

        def watched() -> Any:
            before()
            return step()

        engine._llm.step = watched

    def extremes() -> tuple[float, float]:
        return min(float(t.min()) for t in tensors), max(float(t.max()) for t in tensors)

    return UnderTest(engine, engine.served, watch, extremes)


_parallel: dict[tuple[Any, ...], UnderTest] = {}


def parallel_vllm_engine(versions: Any, **options: Any) -> UnderTest:
    """Over two worker processes, whose start takes long: the tests share an engine for each value of `kv`."""
    if set(options) - {"kv"}:
        pytest.skip("sizes of an engine are tried with the model in one process")
    key = (versions.folder, *sorted(options.items()))
    if key not in _parallel:
        _parallel[key] = vllm_engine(versions, parallel=2, **options)
    engine: Any = _parallel[key].engine
    for name in [sequence.request.request_id for sequence in engine._running.values()]:
        engine.abort(name)
    engine._waiting.clear()
    engine._version, engine._torn, engine._held = None, False, False
    engine._llm.__dict__.pop("step", None)  # watched by the test before
    return _parallel[key]


ENGINES: dict[str, Callable[..., UnderTest]] = {
    "torch": torch_engine,
    "torch doubled": partial(torch_engine, doubled=True),
    "vllm": vllm_engine,
    "vllm, two workers": parallel_vllm_engine,
}


class Rewards:
    """Every completion is worth 1, at once."""

    def __init__(self) -> None:
        self._done: list[RewardResult] = []

    def submit(self, job_id: int, prompt_index: int, completions: Sequence[Completion]) -> None:
        self._done.append(RewardResult(job_id, [1.0] * len(completions), [""] * len(completions)))

    def poll(self) -> list[RewardResult]:
        done, self._done = self._done, []
        return done

    def check(self) -> None:
        pass


def chaos_channel() -> Any:
    spec = importlib.util.spec_from_file_location("contract_chaos", CHAOS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ChaosChannel(random.Random(0))


class Harness:
    """One generator as it runs, without its process: pushes go through publisher, channel and stager.

    Attributes:
        done: finished trajectories; acks: of versions in force, in order.
    """

    def __init__(self, under_test: UnderTest, *, mode: str = "in_flight") -> None:
        self.engine = under_test.engine
        channel = chaos_channel()
        self.publisher = WeightPublisher(channel, self.engine.manifest)
        self.stager = Stager(channel, under_test.served, self.engine.manifest)
        decode = lambda rows: ["" for _ in rows]  # noqa: E731
        rewards: Any = Rewards()
        self.rollout = Rollout("g0-c", self.engine, rewards, self.stager, decode, lambda: 0.0, mode=mode)
        self.done: list[Trajectory] = []
        self.acks: list[Any] = []
        self.digests: dict[PolicyVersion, str] = {}

    def push(self, flat: torch.Tensor, step: int) -> None:
        version = PolicyVersion(0, step)
        self.digests[version] = self.publisher.publish(flat, version).digest

    def turn(self, count: int = 1) -> None:
        """Decode steps as the generator's loop makes them."""
        for _ in range(count):
            while self.stager.turn():
                pass
            self.rollout.refresh()
            self.acks += self.rollout.take_acks()
            self.rollout.turn()
            message = self.rollout.take()
            if message is not None:
                assert message.failures == []
                self.done += message.trajectories

    def finish(self) -> list[Trajectory]:
        """Until every ticket has ended."""
        for _ in range(2000):
            if not self.rollout.num_tickets:
                return sorted(self.done, key=lambda t: (t.ticket_id, t.member))
            self.turn()
        raise AssertionError(f"{self.rollout.num_tickets} tickets are left")

    def grant(
        self, ticket_id: int, prompt: Sequence[int], members: int, budget: int, admitted: int = 0
    ) -> None:
        sampling = Sampling(1.0, budget, [])
        seed, version = 1000 + ticket_id, PolicyVersion(0, admitted)
        self.rollout.grant(
            [Ticket(ticket_id, ticket_id, list(prompt), members, sampling, seed, version, 600.0)]
        )


@pytest.fixture(
    params=[pytest.param(name, marks=NEEDS_VLLM if name.startswith("vllm") else []) for name in ENGINES]
)
def under_test(request: pytest.FixtureRequest, versions: Any) -> Callable[..., UnderTest]:
    """Makes an engine under test; options as TorchEngine's."""
    return lambda **options: ENGINES[request.param](versions, **options)


@pytest.fixture
def harness() -> Callable[..., Harness]:
    return Harness
