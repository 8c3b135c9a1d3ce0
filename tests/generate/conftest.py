"""A small model with decided opinions, engines over it, and the oracle: transformers' own forward, alone."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from headway.generate import FinishedMember, GroupRequest, TorchEngine
from headway.model import Lora, load_policy
from headway.types import PolicyVersion, Sampling

VOCAB_SIZE, CONTEXT = 48, 64
LETTERS = "_^$0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOP"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # vLLM's CPU attention takes no smaller one
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,  # far from uniform, so that a wrong key, position or version is not hidden
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    path = tmp_path_factory.mktemp("opinionated")
    AutoModelForCausalLM.from_config(config).save_pretrained(str(path))
    return path


def decode(ids: Sequence[int]) -> str:
    """As tokenizers do: a negative id is an error."""
    if min(ids, default=0) < 0:
        raise OverflowError(f"can't convert negative int to unsigned: {list(ids)}")
    return "".join(LETTERS[i] for i in ids)


class Versions:
    """Weights by version number; 0 is the folder's, the others are far from it and from each other."""

    decode = staticmethod(decode)

    def __init__(self, folder: Path, lora: Lora | None = None) -> None:
        self.folder = self._folder = folder
        self.lora = lora
        policy = load_policy(folder, with_grad=False, lora=lora)
        self.flat, self.manifest = {0: policy.flat.clone()}, policy.manifest
        size = 0.1 if lora is None else 0.3
        for number in range(1, 6):
            noise = torch.Generator().manual_seed(number)
            self.flat[number] = self.flat[0] + size * torch.randn(self.flat[0].shape, generator=noise)
        self._modules: dict[int, Any] = {}

    def engine(self, version: int | None = 0, **changes: Any) -> TorchEngine:
        options: dict[str, Any] = {"max_running": 64, "kv_tokens": 0, "prefill_tokens": 512, "kv": "keep"}
        options |= {"decode": decode}
        policy = load_policy(self._folder, with_grad=False, lora=self.lora)
        engine = TorchEngine(policy, **{**options, **changes})
        if version is not None:
            self.push(engine, version)
        return engine

    def push(self, engine: TorchEngine, version: int, step: int | None = None) -> None:
        named = PolicyVersion(0, version if step is None else step)
        engine.apply(lambda flat: (flat.copy_(self.flat[version]), named)[1])

    def module(self, version: int) -> Any:
        """transformers' module with these weights, eager attention, float64: only the engine rounds."""
        if version not in self._modules:
            module = AutoModelForCausalLM.from_pretrained(str(self._folder), attn_implementation="eager")
            if self.lora is None:
                policy = load_policy(self._folder, with_grad=False)
                policy.flat.copy_(self.flat[version])
                module.load_state_dict(policy.module.state_dict())
            self._modules[version] = module.double().eval()
            if self.lora is not None:
                self._merge(self._modules[version], self.flat[version])
        return self._modules[version]

    @torch.no_grad()
    def _merge(self, module: Any, flat: torch.Tensor) -> None:
        """Add each layer's B A, read from the flat buffer by the manifest, to its weight."""
        factors = {
            spec.name: flat[spec.offset : spec.offset + spec.size].view(spec.shape).double()
            for spec in self.manifest.tensors
        }
        for name, parameter in module.named_parameters():
            layer = name.removesuffix(".weight")
            if f"{layer}.lora_A.weight" in factors:
                parameter += factors[f"{layer}.lora_B.weight"] @ factors[f"{layer}.lora_A.weight"]


class Oracle:
    """Log-probs of one sequence's sampled tokens, in float64."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions

    @torch.no_grad()
    def fresh(
        self,
        prompt: Sequence[int],
        tokens: Sequence[int],
        temperature: float,
        version: int | Sequence[int] = 0,
    ) -> np.ndarray:
        """Each token from a whole forward of its prefix; `version`: of all, or of each."""
        numbers = [version] * len(tokens) if isinstance(version, int) else list(version)
        ids = torch.tensor([[*prompt, *tokens]])
        places = torch.arange(len(prompt), ids.shape[1])
        out = np.empty(len(tokens))
        for number in set(numbers):
            logits = self._versions.module(number)(input_ids=ids).logits[0] / temperature
            values = logits.log_softmax(-1)[places - 1, ids[0, places]].numpy()
            chosen = np.array(numbers) == number
            out[chosen] = values[chosen]
        return out

    @torch.no_grad()
    def cached(
        self, chunks: Sequence[tuple[Sequence[int], int]], tokens: Sequence[int], temperature: float,
        versions: Sequence[int],
    ) -> np.ndarray:  # fmt: skip
        """Keys and values stay as the version in force wrote them.

        Args:
            chunks: of the prompt, each with the version that forwarded it.
            versions: of each sampled token: in force when the token before it was forwarded.
        """
        cache = DynamicCache()
        logits = torch.zeros(0)
        for ids, version in chunks:
            logits = self._forward(ids, version, cache)
        out = [float((logits / temperature).log_softmax(-1)[tokens[0]])]
        for token, after, version in zip(tokens, tokens[1:], versions[1:], strict=False):
            logits = self._forward([token], version, cache)
            out.append(float((logits / temperature).log_softmax(-1)[after]))
        return np.array(out)

    def _forward(self, ids: Sequence[int], version: int, cache: DynamicCache) -> torch.Tensor:
        module = self._versions.module(version)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the argument's name changes between releases
            out = module(input_ids=torch.tensor([list(ids)]), past_key_values=cache, use_cache=True)
        return out.logits[0, -1]


@pytest.fixture(scope="session")
def versions(folder: Path) -> Versions:
    return Versions(folder)


@pytest.fixture(scope="session")
def oracle(versions: Versions) -> Oracle:
    return Oracle(versions)


@pytest.fixture(scope="session")
def adapted(folder: Path) -> Versions:
    """Versions of adapters over one base; 0 adds nothing."""
    return Versions(folder, Lora(rank=3, alpha=5.0, seed=8))


@pytest.fixture(scope="session")
def adapted_oracle(adapted: Versions) -> Oracle:
    return Oracle(adapted)


@pytest.fixture(scope="session")
def request_of() -> Callable[..., GroupRequest]:
    """A request; the prompt is drawn from its id unless given."""

    def make(
        request_id: int,
        *,
        prompt: Sequence[int] | int = 5,
        members: int = 1,
        budget: int = 8,
        temperature: float = 1.0,
        stop_ids: Sequence[int] = (),
        seed: int | None = None,
        **sampling: Any,
    ) -> GroupRequest:
        if isinstance(prompt, int):
            draw = random.Random(request_id)
            prompt = [draw.randrange(3, VOCAB_SIZE) for _ in range(prompt)]
        chosen = Sampling(temperature, budget, list(stop_ids), **sampling)
        return GroupRequest(
            request_id, list(prompt), members, chosen, 1000 + request_id if seed is None else seed
        )

    return make


@pytest.fixture(scope="session")
def finish() -> Callable[..., dict[tuple[int, int], FinishedMember]]:
    """Step an engine until it is idle; results by (request, member)."""

    def run(engine: TorchEngine, *, most: int = 2000) -> dict[tuple[int, int], FinishedMember]:
        done: dict[tuple[int, int], FinishedMember] = {}
        for _ in range(most):
            if not engine.num_running + engine.num_waiting:
                return done
            for member in engine.step():
                assert (member.request_id, member.member) not in done
                done[member.request_id, member.member] = member
        raise AssertionError(f"still {engine.num_running} running, {engine.num_waiting} waiting")

    return run
