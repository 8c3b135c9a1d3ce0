"""What somebody else's vLLM refuses: the old version serves on, or the weights are said to be torn."""

from __future__ import annotations

import importlib
import re
import uuid
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.generate.vllm_case import LONG_PROMPT, NEEDS_VLLM, PROMPT, TOLERANCE

from headway.errors import DeadlineExceeded, HeadwayError, UnsupportedOption, WeightError
from headway.generate.vllm import transfer
from headway.model import load_policy
from headway.types import PolicyVersion
from headway.weights import Publication, WeightPublisher
from headway.weights.shm import ShmSender

pytestmark = NEEDS_VLLM


class Corrupting(ShmSender):
    """A byte of the shared buffer changes after the learner has digested it."""

    corrupts = False

    def publish(self, publication: Publication, deadline_s: float) -> None:
        if self.corrupts:
            assert self._begun is not None
            self._buffers[self._begun].view(torch.uint8)[1234] ^= 4
        super().publish(publication, deadline_s)


def test_keeping_the_cache_is_refused_where_new_prompts_would_read_it(outside: Any) -> None:
    with pytest.raises(UnsupportedOption, match="prefixes of older weights"):
        transfer.push_newest_sync(outside.llm, kv="keep")
    with pytest.raises(UnsupportedOption, match="allowed: 'recompute', 'keep'"):
        transfer.push_newest_sync(outside.llm, kv="drop")


def test_a_batch_on_its_way_is_not_relabelled(outside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU build schedules nothing ahead, so the queue is put there."""
    monkeypatch.setattr(outside.llm.engine_core.engine_core, "batch_queue", [object()])
    with pytest.raises(UnsupportedOption, match=r"async_scheduling = True: .* allowed: False"):
        transfer.push_newest_sync(outside.llm)


def test_a_corrupted_payload_is_refused_and_the_old_version_serves_on(
    read: Any, outside: Any, versions: Any, oracle: Any, folder: Path
) -> None:
    manifest = load_policy(folder, with_grad=False).manifest
    sender = Corrupting(f"headway-test-{uuid.uuid4().hex[:8]}", manifest)
    with closing(WeightPublisher(sender, manifest, merged=0)) as publisher:
        outside.join(publisher, "run")
        publisher.publish(versions.flat[1], PolicyVersion(0, 0))
        transfer.push_newest_sync(outside.llm)
        outside.add(LONG_PROMPT, 8)
        outside.step(3)
        sender.corrupts = True
        published = publisher.publish(versions.flat[2], PolicyVersion(0, 1))
        with pytest.raises(DeadlineExceeded, match=rf"0\.0 is in force.*refused.*{published.digest}"):
            transfer.push_newest_sync(outside.llm, deadline_s=1.0)
        (completion,) = outside.finish()
        read.check_greedy(oracle, versions, LONG_PROMPT, completion, 1)
        assert read.labels(completion) == ["0.0"] * 8
        sender.corrupts = False
        publisher.publish(versions.flat[3], PolicyVersion(0, 2))
        assert transfer.push_newest_sync(outside.llm) == PolicyVersion(0, 2)
        read.check_greedy(oracle, versions, LONG_PROMPT, outside.ask(LONG_PROMPT), 3)


def test_a_version_that_never_comes_ends_the_wait_with_words(
    read: Any, outside: Any, published: Any, versions: Any, oracle: Any
) -> None:
    publisher, run_id = published("tcp")
    outside.join(publisher, run_id)
    publisher.publish(versions.flat[1], PolicyVersion(0, 0))
    transfer.push_newest_sync(outside.llm, version="0.0")
    assert transfer.push_newest_sync(outside.llm, version="0.0") == PolicyVersion(0, 0)  # is in force
    where = re.escape(publisher.address)
    words = (
        rf"version 0\.3 was not staged within 0\.2 s: 0\.0 is in force, nothing newer is staged from {where}"
    )
    with pytest.raises(DeadlineExceeded, match=words):
        transfer.push_newest_sync(outside.llm, version="0.3", deadline_s=0.2)
    outside.rpc("start_weight_update")
    with pytest.raises(DeadlineExceeded, match=words):
        outside.rpc("update_weights", update_info={"version": "0.3", "deadline_s": 0.2})
    with pytest.raises(RuntimeError, match="finish_weight_update called without"):
        outside.rpc("finish_weight_update")
    read.check_greedy(oracle, versions, PROMPT, outside.ask(PROMPT), 1)
    assert transfer.staged(outside.llm) is None


def test_a_version_that_was_replaced_is_not_taken_for_another(
    outside: Any, published: Any, versions: Any
) -> None:
    publisher, run_id = published()
    publisher.publish(versions.flat[1], PolicyVersion(0, 4))
    publisher.publish(versions.flat[2], PolicyVersion(0, 5))
    outside.join(publisher, run_id)
    with pytest.raises(
        WeightError, match=r"0\.4 was asked for and has been replaced: no version is in force, 0\.5"
    ):
        transfer.push_newest_sync(outside.llm, version="0.4")
    assert not outside.llm.engine_core.engine_core.is_scheduler_paused()
    assert transfer.push_newest_sync(outside.llm, version="0.5") == PolicyVersion(0, 5)
    outside.rpc("start_weight_update")
    with pytest.raises(WeightError, match=r"0\.4 was asked for and has been replaced: 0\.5 is in force"):
        outside.rpc("update_weights", update_info={"version": "0.4"})


def test_other_weights_are_refused_by_name(outside: Any, published: Any, versions: Any) -> None:
    publisher, run_id = published()
    info = transfer.init_info(publisher, run_id)
    mine = publisher.manifest.digest
    for change, words in (
        ({"manifest_digest": "0" * 16}, rf"have manifest 0{{16}}, the model of this vLLM .* has {mine}"),
        ({"dtype": "bfloat16"}, r"publishes bfloat16, this vLLM computes in float32.*push\.dtype"),
        ({"address": "pigeon:7"}, r"'pigeon:7': begins with one of shm, tcp, store, collective"),
        ({"keys": "a.key"}, r"keys: given, but channel 'shm' does not read it; tcp would"),
        ({"address": "store:x"}, r"store: empty"),
    ):
        with pytest.raises(HeadwayError, match=words):
            outside.rpc("init_weight_transfer_engine", init_info={**info, **change})
    with pytest.raises(ValueError, match=r"Invalid init_info.*'adress'"):
        outside.rpc("init_weight_transfer_engine", init_info={**info, "adress": "x"})


def test_calls_out_of_order_are_refused(outside: Any, published: Any, versions: Any) -> None:
    outside.rpc("shutdown_weight_transfer_engine")
    with pytest.raises(WeightError, match="call init_weight_transfer_engine first"):
        outside.rpc("start_weight_update")
    with pytest.raises(WeightError, match="call init_weight_transfer_engine first"):
        transfer.push_newest_sync(outside.llm)
    publisher, run_id = published()
    outside.join(publisher, run_id)
    with pytest.raises(WeightError, match="update_weights before start_weight_update"):
        outside.transfer.update_weights({})
    outside.rpc("start_weight_update")
    with pytest.raises(WeightError, match="finish_weight_update before update_weights"):
        outside.rpc("finish_weight_update")
    for info, words in (({"version": "soon"}, "version = 'soon'"), ({"deadline_s": 0}, "deadline_s = 0")):
        with pytest.raises(UnsupportedOption, match=words):
            outside.rpc("update_weights", update_info=info)
        outside.rpc("start_weight_update")
    publisher.publish(versions.flat[1], PolicyVersion(0, 0))
    outside.rpc("update_weights", update_info={})
    outside.rpc("finish_weight_update")
    with pytest.raises(RuntimeError, match="does not support draft"):
        outside.rpc("start_draft_weight_update")


def test_torn_weights_are_told_and_stay_paused_until_a_whole_state_comes(
    read: Any, outside: Any, published: Any, versions: Any, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, run_id = published()
    outside.join(publisher, run_id)
    publisher.publish(versions.flat[1], PolicyVersion(0, 0))
    transfer.push_newest_sync(outside.llm)
    outside.add(PROMPT, 12)
    outside.step(4)
    publisher.publish(versions.flat[2], PolicyVersion(0, 1))
    write = outside.transfer._served._tensors
    with monkeypatch.context() as broken:
        broken.setattr(outside.transfer._served, "_tensors", write[:-1])
        with pytest.raises(WeightError, match=r"torn, of no version.*Keep generation paused"):
            transfer.push_newest_sync(outside.llm)
    assert outside.llm.engine_core.engine_core.is_scheduler_paused()
    assert outside.rpc(transfer.STATUS)["torn"]
    outside.join(publisher, run_id)
    assert transfer.push_newest_sync(outside.llm) == PolicyVersion(0, 1)
    outside.llm.engine_core.engine_core.resume_scheduler()
    (completion,) = outside.finish()
    numbers = [1 + int(label.partition(".")[2]) for label in read.labels(completion)]
    expected = oracle.fresh(PROMPT, list(completion.token_ids), 1.0, numbers)
    assert np.abs(read.logprobs(completion) - expected).max() <= TOLERANCE


def test_what_is_in_force_but_not_as_published_is_torn(
    read: Any, outside: Any, published: Any, versions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, run_id = published()
    outside.join(publisher, run_id)
    digest = publisher.publish(versions.flat[1], PolicyVersion(0, 0)).digest
    read = outside.transfer._served.read
    with monkeypatch.context() as broken:
        broken.setattr(outside.transfer._served, "read", lambda start, end: bytes(read(start, end))[::-1])
        with pytest.raises(WeightError, match=rf"torn.*published was {digest}"):
            transfer.push_newest_sync(outside.llm)
    outside.join(publisher, run_id)
    transfer.push_newest_sync(outside.llm)
    outside.llm.engine_core.engine_core.resume_scheduler()
    assert outside.rpc(transfer.STATUS)["digest"] == digest


def test_set_ups_that_pushes_cannot_follow_are_refused_by_name(outside: Any) -> None:
    engine = importlib.import_module("headway.generate.vllm.transfer_engine")
    config = outside.llm.vllm_config
    engine.check_servable(config, "float32")
    with pytest.raises(UnsupportedOption, match="dtype = 'float16'"):
        engine.check_servable(config, "float16")
    dummy = SimpleNamespace(load_format="dummy")
    changed = SimpleNamespace(**{**vars(config), "load_config": dummy})
    with pytest.raises(UnsupportedOption, match="load_format = 'dummy'"):
        engine.check_servable(changed, "float32")
    parallel = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1)
    with pytest.raises(UnsupportedOption, match=r"tensor_parallel_size = 2: .* allowed: 1"):
        engine.check_servable(SimpleNamespace(parallel_config=parallel), "float32")


def test_registering_again_changes_nothing(outside: Any) -> None:
    module = importlib.import_module("vllm.distributed.weight_transfer.factory")
    before = dict(module.WeightTransferEngineFactory._registry)
    transfer.register()
    assert module.WeightTransferEngineFactory._registry == before
    assert "headway" in before
