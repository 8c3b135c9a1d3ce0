"""A push into somebody else's vLLM: weights, label and digest change together, and agree with the oracle."""

from __future__ import annotations

import asyncio
import gc
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.generate.vllm_case import LONG_PROMPT, NEEDS_VLLM, PROMPT, TOLERANCE

import headway
from headway.errors import DeadlineExceeded, WeightError
from headway.generate.vllm import transfer
from headway.generate.vllm import weights as vllm_weights
from headway.model import builtin_folder, load_policy
from headway.types import PolicyVersion
from headway.weights import publish_through

pytestmark = NEEDS_VLLM


@pytest.mark.parametrize("channel", ["shm", "tcp"])
def test_there_and_back_equals_the_oracle_each_time(
    read: Any, outside: Any, published: Any, versions: Any, oracle: Any, channel: str
) -> None:
    publisher, run_id = published(channel)
    outside.join(publisher, run_id)
    seen: list[Any] = []
    for step, number in enumerate((1, 2, 1)):
        digest = publisher.publish(versions.flat[number], PolicyVersion(0, step)).digest
        assert transfer.push_newest_sync(outside.llm) == PolicyVersion(0, step)
        status = outside.rpc(transfer.STATUS)
        assert (status["version"], status["digest"], status["torn"]) == (f"0.{step}", digest, False)
        assert outside.llm.get_weight_version() == f"0.{step}"
        for prompt in (
            LONG_PROMPT,
            LONG_PROMPT,
            PROMPT,
        ):  # the second reads the prefix that the first left
            completion = outside.ask(prompt)
            read.check_greedy(oracle, versions, prompt, completion, number)
            assert read.labels(completion) == [f"0.{step}"] * 8
        seen.append(completion)
    assert list(seen[0].token_ids) == list(seen[2].token_ids) != list(seen[1].token_ids)
    assert np.array_equal(read.logprobs(seen[0]), read.logprobs(seen[2]))


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_requests_in_flight_go_on_with_the_new_weights_and_say_so(
    read: Any, outside: Any, published: Any, versions: Any, oracle: Any, kv: str
) -> None:
    publisher, run_id = published()
    outside.join(publisher, run_id)
    publisher.publish(versions.flat[1], PolicyVersion(0, 0))
    transfer.push_newest_sync(outside.llm)
    for token in range(3, 7):
        outside.add([*PROMPT, token], 12, salt="0.0")
    outside.step(5)
    publisher.publish(versions.flat[2], PolicyVersion(0, 1))
    transfer.push_newest_sync(outside.llm, kv=kv, salted=True)
    done = outside.finish()
    assert len(done) == 4
    for token, completion in enumerate(done, 3):
        numbers = [1 + int(label.partition(".")[2]) for label in read.labels(completion)]
        assert numbers == sorted(numbers)
        assert set(numbers) == {1, 2}
        tokens, prompt = list(completion.token_ids), [*PROMPT, token]
        if kv == "keep":
            expected = oracle.cached([(prompt, 1)], tokens, 1.0, numbers)
        else:
            expected = oracle.fresh(prompt, tokens, 1.0, numbers)
        assert np.abs(read.logprobs(completion) - expected).max() <= TOLERANCE


def test_a_model_without_a_table_is_reloaded_layer_by_layer_and_says_so(
    open_outside: Any,
    read: Any,
    folder: Path,
    published: Any,
    versions: Any,
    oracle: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def uncovered(*_: Any) -> None:
        raise WeightError("nothing published goes to model.odd.weight")

    monkeypatch.setattr(vllm_weights, "build_table", uncovered)
    outside = open_outside(folder)
    assert "layerwise reload" in caplog.text
    publisher, run_id = published()
    outside.join(publisher, run_id)
    for step, number in enumerate((1, 2)):
        publisher.publish(versions.flat[number], PolicyVersion(0, step))
        transfer.push_newest_sync(outside.llm)
        read.check_greedy(oracle, versions, LONG_PROMPT, outside.ask(LONG_PROMPT), number)


def test_the_trainer_of_the_documentation_pushes_bfloat16(
    open_outside: Any, folder: Path, versions: Any
) -> None:
    manifest = load_policy(folder, published_dtype="bfloat16", with_grad=False).manifest
    outside = open_outside(folder, dtype="bfloat16")
    flat = torch.zeros(manifest.num_elements)
    with closing(publish_through("shm", manifest, uuid.uuid4().hex[:8])) as publisher:
        outside.join(publisher, "run")
        for step, number in enumerate((1, 2)):
            state = dict(versions.module(number).named_parameters(remove_duplicate=False))
            for spec in manifest.tensors:
                flat[spec.offset : spec.offset + spec.size] = state[spec.name].detach().reshape(-1)
            digest = publisher.publish(flat, PolicyVersion(0, step)).digest
            assert transfer.push_newest_sync(outside.llm) == PolicyVersion(0, step)
            assert outside.rpc(transfer.STATUS)["digest"] == digest
            served = dict(outside.transfer.model.named_parameters())["model.layers.1.mlp.gate_up_proj.weight"]
            parts = [
                state[f"model.layers.1.mlp.{name}_proj.weight"].to(torch.bfloat16) for name in ("gate", "up")
            ]
            assert torch.equal(served, torch.cat(parts))
        outside.rpc("shutdown_weight_transfer_engine")


def test_an_engine_attaches_to_a_run_that_is_going_on(open_outside: Any, read: Any, tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "model": {"path": "builtin:sort5"},
        "env": {"name": "sort", "args": {"digits": 5, "seed": 42}},
        "batch": {"prompts": 2, "samples": 4},
        "sampling": {"max_new_tokens": 8},
        "learner": {"lr": 1e-4, "threads": 1},
        "generator": {"threads": 1},
    }
    outside = open_outside(builtin_folder("sort5"))
    with headway.Engine(None, run_dir=str(tmp_path / "run"), steps=100_000, **sections) as engine:
        record = next(iter(engine))
        outside.rpc("init_weight_transfer_engine", init_info=transfer.init_info_of_run(engine.run_dir))
        first = transfer.push_newest_sync(outside.llm)
        second = transfer.push_newest_sync(outside.llm)
        assert record.step <= first.step < second.step
        assert read.labels(outside.ask([1, 7, 5, 9])) == [str(second)] * 8
        outside.rpc("shutdown_weight_transfer_engine")
        engine.stop()
        last = list(engine)[-1]
        assert second.step <= last.step


@pytest.mark.timeout(240)
def test_an_async_engine_in_another_process_switches_weights_and_label_together(
    open_async: Any, read: Any, published: Any, versions: Any, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are in flight across each push: tokens, log-probs and labels agree with a two-model reference."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
    publisher, run_id = published("tcp")
    rounds = (("recompute", 1, 2), ("keep", 2, 3))

    async def scenario() -> list[list[tuple[list[int], Any]]]:
        llm = open_async(versions.folder)
        try:
            await llm.join(transfer.init_info(publisher, run_id))
            publisher.publish(versions.flat[1], PolicyVersion(0, 1))
            assert await transfer.push_newest(llm.llm) == PolicyVersion(0, 1)
            found = [await llm.round(publisher, versions, kv, after) for kv, _, after in rounds]
            with pytest.raises(
                DeadlineExceeded, match=r"newest was not staged within 0\.1 s: 0\.3 is in force"
            ):
                await transfer.push_newest(llm.llm, deadline_s=0.1)
            publisher.publish(versions.flat[1], PolicyVersion(0, 4))
            await llm.cancel_in_the_pause()
            assert not await llm.llm.is_paused()
            return found
        finally:
            llm.llm.shutdown()

    results = asyncio.run(scenario())
    gc.collect()  # the engine, which ends badly in an interpreter that ends
    for (kv, before, after), found in zip(rounds, results, strict=True):
        assert len(found) == 4
        for prompt, completion in found:
            numbers = [int(label.partition(".")[2]) for label in read.labels(completion)]
            assert numbers == sorted(numbers)
            assert set(numbers) == {before, after}
            tokens = list(completion.token_ids)
            if kv == "keep":
                expected = oracle.cached([(prompt, before)], tokens, 1.0, numbers)
            else:
                expected = oracle.fresh(prompt, tokens, 1.0, numbers)
            assert np.abs(read.logprobs(completion) - expected).max() <= TOLERANCE
