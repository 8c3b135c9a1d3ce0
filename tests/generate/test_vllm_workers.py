"""vLLM over two worker processes: the share of each, exact versions, and what deaths leave behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tests.generate.vllm_case import NEEDS_VLLM, PROMPT
from tests.live import wait_for
from transformers import AutoModelForCausalLM, LlamaConfig

from headway.errors import EngineEnded, ModelError, UnsupportedOption, WeightError
from headway.generate import FinishedMember
from headway.generate.vllm import open_vllm, sharded
from headway.generate.vllm.start import Sizes
from headway.generate.vllm.worker import Slot, Split, WorkerModel
from headway.model.flat import build_manifest
from headway.types import FinishReason, PolicyVersion
from headway.weights.served import SlicedServed
from headway_kernels.weight_delta import apply_slices, whole


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def shared_files(*pids: int) -> set[Path]:
    """Files of shared memory that processes have mapped and that still have a name."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]
    return {path for path in map(Path, re.findall(r"(/dev/shm/\S+)$", "".join(maps), re.M)) if path.exists()}


# The table, without vLLM ------------------------------------------------------------------------------------------

RANKS, HIDDEN, HEAD = 4, 8, 2


class Published(torch.nn.Module):
    """4 heads, 2 key-value heads; a vocabulary of 10."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, HIDDEN)
        sizes = {"q_proj": 4 * HEAD, "k_proj": 2 * HEAD, "v_proj": 2 * HEAD, "o_proj": HIDDEN}
        self.layer = torch.nn.ModuleDict(
            {part: torch.nn.Linear(HIDDEN, size) for part, size in sizes.items()}
        )
        self.norm = torch.nn.LayerNorm(HIDDEN)


def rank_model(rank: int, *, vocabulary: int = 10) -> WorkerModel:
    """As four ranks of vLLM hold it: 16 padded rows of the vocabulary, each key-value head twice."""
    rows = min(4, max(0, vocabulary - 4 * rank))
    heads = Split(0, (HEAD, HEAD, HEAD))
    slots = [
        Slot("embed.weight", (rows, HIDDEN), 4 * HIDDEN * 4, False, Split(0, padded=16)),
        Slot("layer.qkv_proj.weight", (3 * HEAD, HIDDEN), 3 * HEAD * HIDDEN * 4, True, heads),
        Slot("layer.qkv_proj.bias", (3 * HEAD,), 3 * HEAD * 4, False, heads),
        Slot("layer.o_proj.weight", (HIDDEN, HEAD), HIDDEN * HEAD * 4, True, Split(1)),
        Slot("layer.o_proj.bias", (HIDDEN,), HIDDEN * 4, False, Split()),
        Slot("norm.weight", (HIDDEN,), HIDDEN * 4, False, Split()),
        Slot("norm.bias", (HIDDEN,), HIDDEN * 4, False, Split()),
    ]
    return WorkerModel(("Published", ""), {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}, slots)


def expected_share(state: dict[str, torch.Tensor], name: str, rank: int) -> torch.Tensor:
    if name == "embed.weight":
        return state[name][4 * rank : 4 * rank + 4]
    if "qkv_proj" in name:
        kind = name.rpartition(".")[2]
        parts = [state[f"layer.q_proj.{kind}"].chunk(4)[rank]]
        parts += [state[f"layer.{part}_proj.{kind}"].chunk(2)[rank // 2] for part in "kv"]
        return torch.cat(parts)
    return state[name].chunk(4, 1)[rank] if name == "layer.o_proj.weight" else state[name]


@pytest.fixture
def published() -> Any:
    torch.manual_seed(3)
    model = Published()
    manifest = build_manifest(model, "float32")
    flat = torch.zeros(manifest.num_elements)
    state = dict(model.named_parameters())
    for spec in manifest.tensors:
        flat[spec.offset : spec.offset + spec.size] = state[spec.name].detach().reshape(-1)
    return manifest, flat, {name: tensor.detach() for name, tensor in state.items()}


def test_each_rank_gets_its_share_of_heads_columns_and_a_padded_vocabulary(published: Any) -> None:
    manifest, flat, state = published
    models = [rank_model(rank) for rank in range(RANKS)]
    table = sharded.sharded_table(models, manifest)
    targets = [
        (slot.name, rank) for rank in range(RANKS) for slot in models[rank].slots if 0 not in slot.shape
    ]
    assert ("embed.weight", 3) not in targets, "all of its rows only pad"
    tensors = [torch.full_like(expected_share(state, *target), float("nan")) for target in targets]
    apply_slices(whole(flat), table, tensors)
    for target, tensor in zip(targets, tensors, strict=True):
        assert torch.equal(tensor, expected_share(state, *target)), target
    served = SlicedServed(table, tensors, manifest, lambda version: None)
    assert bytes(served.read(0, manifest.num_elements)) == flat.numpy().tobytes()


def test_a_table_apart_by_device_writes_what_the_whole_one_does(published: Any) -> None:
    manifest, flat, _ = published
    models = [rank_model(rank) for rank in range(RANKS)]
    table = sharded.sharded_table(models, manifest)
    slots = [(rank, slot) for rank in range(RANKS) for slot in models[rank].slots if 0 not in slot.shape]
    one, parted = ([torch.zeros(slot.shape) for _, slot in slots] for _ in range(2))
    apply_slices(whole(flat), table, one)
    parts = sharded.apart(table, [rank for rank, _ in slots])
    assert len(parts) == RANKS
    for chosen, part in parts:
        apply_slices(whole(flat), part, [parted[index] for index in chosen])
    assert all(torch.equal(*pair) for pair in zip(one, parted, strict=True))


@pytest.mark.parametrize(
    ("slot", "changed", "says"),
    [
        (3, {"shape": (HIDDEN, 3)}, r"o_proj\.weight \[8, 8\] cannot be cut into shares of .*o_proj\.weight \[8, 3\]"),
        (1, {"split": Split(0, (HEAD, HEAD))}, r"q_proj\.weight .* cannot be cut into shares of .*qkv_proj\.weight"),
        (0, {"split": Split(0, padded=8)}, r"embed\.weight of shape .* is larger than its padded 8"),
        (5, {"split": Split(0), "shape": (2,)}, ""),
    ],
)  # fmt: skip
def test_shares_that_do_not_fit_are_refused_by_name(
    published: Any, slot: int, changed: dict[str, Any], says: str
) -> None:
    models = [rank_model(rank) for rank in range(RANKS)]
    for model in models:
        model.slots[slot] = Slot(**{**vars(model.slots[slot]), **changed})
    if says:
        with pytest.raises(WeightError, match=says):
            sharded.sharded_table(models, published[0])
    else:
        sharded.sharded_table(models, published[0])  # a norm over sharded channels is cut like any other


# vLLM's own workers -----------------------------------------------------------------------------------------------


def open_engine(folder: Path, decode: Any, **options: Any) -> Any:
    kept_sets = options.pop("kept_sets", False)
    return open_vllm(
        folder, published_dtype="float32", sizes=Sizes(64, 0, 512), kv="keep", kept_sets=kept_sets,
        options={"tensor_parallel_size": 2, **options}, decode=decode,
    )  # fmt: skip


def push(engine: Any, flat: torch.Tensor, step: int) -> None:
    engine.apply(lambda into: (into.copy_(flat), PolicyVersion(0, step))[1])


def tokens_of(member: FinishedMember) -> list[int]:
    return member.token_ids.tolist()


class TestWorkers:
    """One engine for all of them, in this order: the last ones end it."""

    pytestmark = NEEDS_VLLM

    @pytest.fixture(scope="class")
    def weights(self, versions: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
        """Two key-value heads, biases everywhere, tied embeddings: versions of it."""
        torch.manual_seed(8)
        config = LlamaConfig(
            vocab_size=48, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=64, initializer_range=0.15,
            attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
            bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        path = tmp_path_factory.mktemp("biased")
        AutoModelForCausalLM.from_config(config).save_pretrained(str(path))
        return type(versions)(path)

    @pytest.fixture(scope="class")
    def truth(self, weights: Any, oracle: Any) -> Any:
        return type(oracle)(weights)

    @pytest.fixture(scope="class")
    def started(self, weights: Any) -> Iterator[Any]:
        engine = open_engine(weights.folder, weights.decode)
        yield engine
        engine._llm.engine_core.shutdown()

    @pytest.fixture
    def engine(self, started: Any) -> Any:
        assert not started.num_running
        started._llm.reset_prefix_cache()
        started._kv = "keep"
        return started

    def test_what_cannot_be_served_is_refused_before_a_worker_starts(self, folder: Path) -> None:
        with pytest.raises(UnsupportedOption, match=r"kept_sets = 'carry' with .*tensor_parallel_size = 2"):
            open_engine(folder, str, kept_sets=True)
        with pytest.raises(ModelError, match=r"attention heads .* must be divisible by tensor parallel size"):
            open_engine(folder, str, tensor_parallel_size=3)

    def test_logprobs_are_those_of_the_whole_model(
        self, engine: Any, weights: Any, truth: Any, request_of: Any, finish: Any
    ) -> None:
        push(engine, weights.flat[1], 0)  # biases too are far from zero
        for number, temperature in enumerate((0.5, 1.0, 1.3)):
            engine.add(request_of(number, members=4, budget=12, temperature=temperature))
        done = finish(engine)
        assert len(done) == 12
        for (number, _), member in done.items():
            prompt = request_of(number).prompt_ids
            expected = truth.fresh(prompt, tokens_of(member), (0.5, 1.0, 1.3)[number], 1)
            assert np.abs(member.logprobs - expected).max() <= 1e-4
            assert member.finish_reason is FinishReason.LENGTH

    @pytest.mark.parametrize("kv", ["keep", "recompute"])
    def test_every_token_is_of_the_version_in_force_when_it_was_sampled(
        self, engine: Any, weights: Any, truth: Any, request_of: Any, finish: Any, kv: str
    ) -> None:
        engine._kv = kv
        push(engine, weights.flat[0], 0)
        engine.add(request_of(0, prompt=PROMPT, members=3, budget=16))
        for version, count in ((1, 5), (2, 4)):
            for _ in range(count):
                assert engine.step() == []
            push(engine, weights.flat[version], version)
        for member in finish(engine).values():
            numbers = [span.version.step for span in member.spans for _ in range(span.start, span.end)]
            assert numbers == [0] * 5 + [1] * 4 + [2] * 7
            if kv == "keep":
                expected = truth.cached([(PROMPT, 0)], tokens_of(member), 1.0, numbers)
            else:
                expected = truth.fresh(PROMPT, tokens_of(member), 1.0, numbers)
            assert np.abs(member.logprobs - expected).max() <= 1e-4

    def test_there_and_back_is_bit_for_bit_what_it_was(
        self, engine: Any, weights: Any, request_of: Any, finish: Any
    ) -> None:
        results: list[list[FinishedMember]] = []
        for step, number in enumerate((0, 1, 0)):
            push(engine, weights.flat[number], step)
            published = memoryview(weights.flat[number].numpy()).cast("B")
            assert bytes(engine.served.read(0, engine.manifest.num_elements)) == bytes(published)
            engine.add(request_of(step, prompt=PROMPT, members=3, budget=10, seed=4))
            results.append([*finish(engine).values()])
        first, between, last = results
        for mine, other, theirs in zip(first, between, last, strict=True):
            assert tokens_of(mine) == tokens_of(theirs)
            assert np.array_equal(mine.logprobs, theirs.logprobs)
            assert not np.array_equal(mine.logprobs, other.logprobs)

    def test_a_model_without_a_table_is_reloaded_in_every_worker_and_a_death_is_noticed(
        self, weights: Any, truth: Any, request_of: Any, finish: Any,
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    ) -> None:  # fmt: skip
        def uncovered(*_: Any) -> None:
            raise WeightError("nothing published goes to model.odd.weight")

        monkeypatch.setattr(sharded, "build_table", uncovered)
        engine = open_engine(weights.folder, weights.decode)
        assert "layerwise reload" in caplog.text
        for number in (2, 3):
            push(engine, weights.flat[number], number)
            engine.add(request_of(number, prompt=PROMPT, members=2, budget=8))
            for member in finish(engine).values():
                expected = truth.fresh(PROMPT, tokens_of(member), 1.0, number)
                assert np.abs(member.logprobs - expected).max() <= 1e-4
        os.kill(engine._workers.pids[0], signal.SIGKILL)
        with pytest.raises(WeightError, match=r"headway_reload: .*worker 0 \(process \d+\) has ended"):
            push(engine, weights.flat[1], 4)
        with pytest.raises(WeightError, match="of no version"):
            engine.step()

    def test_nothing_of_headways_is_left_in_shared_memory_once_it_is_mapped(self, engine: Any) -> None:
        names = [path.name for path in shared_files(os.getpid(), *engine._workers.pids)]
        assert names, "vLLM's queues"
        assert [name for name in names if not name.startswith(("psm_", "sem."))] == []

    def test_a_worker_that_dies_in_mid_request_ends_the_next_step_at_once(
        self, engine: Any, weights: Any, request_of: Any
    ) -> None:
        push(engine, weights.flat[0], 0)
        engine.add(request_of(0, prompt=PROMPT, members=3, budget=40))
        for _ in range(4):
            engine.step()
        pids = engine._workers.pids
        os.kill(pids[1], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(EngineEnded, match=rf"worker 1 \(process {pids[1]}\) has ended"):
            engine.step()
        assert time.monotonic() - started < 10.0, "vLLM alone would wait for its own time-outs"
        wait_for("the other worker's end", lambda: all(map(is_gone, pids)) or None)

    def test_a_killed_generator_takes_its_workers_along_and_leaves_no_shared_memory(
        self, folder: Path, tmp_path: Path
    ) -> None:
        program = Path(__file__).with_name("held_workers.py")
        with (tmp_path / "log").open("w") as log:
            held = subprocess.Popen(
                [sys.executable, str(program), str(folder)], stdout=subprocess.PIPE, stderr=log, text=True
            )
        try:
            assert held.stdout is not None
            line = held.stdout.readline()  # bounded by the test's own deadline
            pids = [int(word) for word in line.split()]
            assert len(pids) == 2, (tmp_path / "log").read_text()
            files = shared_files(held.pid, *pids)
            assert files
            os.kill(pids[1], signal.SIGSTOP)  # the other one soon waits for it, deep in a collective
            held.kill()
            wait_for("the workers' end", lambda: all(map(is_gone, pids)) or None, 10.0)
            wait_for("the end of shared memory", lambda: not any(path.exists() for path in files) or None)
        finally:
            held.kill()
            held.wait(10)
            held.stdout.close()
