"""The rollout loop over the real engine and real reward workers: what reaches the learner, and the accounts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as BpeTokenizer
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from headway.config import RunConfig
from headway.generate import FinishedMember
from headway.generator import Rollout, build_engine, build_rewards
from headway.learner.prompts import TokenisedPrompt
from headway.learner.tickets import TicketMaker
from headway.model import load_policy, load_tokenizer
from headway.serial import DirectSource, DirectWeights, SerialRun
from headway.types import DropReason, PolicyVersion, Ticket, Trajectory
from headway.wire.codec import decode, encode
from headway.wire.messages import Trajectories


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A rollout over the tiny model with its parts at hand."""

    def __init__(self, config: RunConfig) -> None:
        folder = Path(config.model.path)
        tokenizer = load_tokenizer(folder)
        self.clock = Clock()
        self.weights = DirectWeights(load_policy(folder, with_grad=False))
        self.engine = build_engine(config, folder, tokenizer)
        self.rewards = build_rewards(config)
        self.rollout = Rollout(
            "g0-test",
            self.engine,
            self.rewards,
            DirectSource(self.weights, self.engine),
            tokenizer.decode_many,
            self.clock,
        )
        self._maker = TicketMaker(config, tokenizer.eos_ids)

    def ticket(self, ticket_id: int, admitted: int = 0) -> Ticket:
        return self._maker.make(
            ticket_id, TokenisedPrompt(ticket_id, [1, 17, 3, 4, 15]), PolicyVersion(0, admitted)
        )

    def until_idle(self) -> list[Trajectories]:
        """Turn until nothing is held; the messages that came out."""
        messages: list[Trajectories] = []
        for _ in range(500):
            self.rollout.refresh()
            self.rollout.turn()
            if self.rollout.num_scoring:
                self.rollout.collect(self.rewards.wait(10.0))
            message = self.rollout.take()
            messages += [message] if message is not None else []
            if not self.rollout.num_tickets:
                return messages
        raise AssertionError("the rollout does not become idle")


@pytest.fixture
def bench(tiny_config: Callable[..., RunConfig]) -> Iterator[Bench]:
    torch.set_num_threads(1)
    made = Bench(
        tiny_config(sampling={"max_new_tokens": 12, "ignore_eos": True}, stream={"rollout_deadline_s": 50.0})
    )
    yield made
    made.rewards.close()


def test_a_ticket_waits_for_the_version_it_was_admitted_with(bench: Bench) -> None:
    bench.weights.publish(PolicyVersion(0, 0))
    bench.rollout.grant([bench.ticket(0, admitted=1)])
    for _ in range(3):
        bench.rollout.refresh()
        bench.rollout.turn()
    assert bench.engine.num_sampled == 0
    bench.weights.publish(PolicyVersion(0, 1))
    trajectories = [t for message in bench.until_idle() for t in message.trajectories]
    assert len(trajectories) == 4
    assert {t.oldest for t in trajectories} == {PolicyVersion(0, 1)}


def test_members_that_the_learner_has_are_not_sampled_again(bench: Bench) -> None:
    bench.weights.publish(PolicyVersion(0, 0))
    bench.rollout.grant([msgspec.structs.replace(bench.ticket(0), held=[1, 2])])
    members = [t.member for message in bench.until_idle() for t in message.trajectories]
    assert sorted(members) == [0, 3]
    assert bench.rollout.num_tickets == 0


def test_nothing_is_sampled_before_the_first_weights(bench: Bench) -> None:
    bench.rollout.grant([bench.ticket(0)])
    assert not bench.rollout.refresh()
    bench.rollout.turn()
    assert bench.engine.num_sampled == 0
    assert (bench.rollout.take_acks(), bench.rollout.take()) == ([], None)


def test_each_version_in_force_is_acked_with_the_digest_of_what_is_served(bench: Bench) -> None:
    for step in range(2):
        bench.weights.publish(PolicyVersion(0, step))
    assert bench.rollout.refresh()
    assert not bench.rollout.refresh()
    acks = bench.rollout.take_acks()  # before a decode step
    assert [(ack.version, ack.digest) for ack in acks] == [(PolicyVersion(0, 1), bench.weights.digest)]
    assert (bench.rollout.take_acks(), bench.rollout.take()) == ([], None)


def test_a_ticket_past_its_deadline_fails_with_every_token_accounted_for(bench: Bench) -> None:
    bench.weights.publish(PolicyVersion(0, 0))
    bench.rollout.grant([bench.ticket(0)])
    for _ in range(3):
        bench.rollout.refresh()
        bench.rollout.turn()
    assert bench.rollout.num_unsent == bench.engine.num_sampled == 12
    bench.clock.now += 51.0
    messages = bench.until_idle()
    failures = [failure for message in messages for failure in message.failures]
    assert [failure.member for failure in failures] == [0, 1, 2, 3]
    assert {failure.reason for failure in failures} == {DropReason.DEADLINE}
    assert sum(failure.num_tokens for failure in failures) == bench.engine.num_sampled
    assert bench.rollout.num_unsent == 0
    assert not bench.rollout.has_work


def test_a_cancelled_ticket_sends_no_trajectory_and_accounts_for_its_tokens(bench: Bench) -> None:
    bench.weights.publish(PolicyVersion(0, 0))
    bench.rollout.grant([bench.ticket(0), bench.ticket(1)])
    for _ in range(3):
        bench.rollout.refresh()
        bench.rollout.turn()
    bench.rollout.cancel([0, 99])
    messages = bench.until_idle()
    assert {t.ticket_id for message in messages for t in message.trajectories} == {1}
    lost = [failure for message in messages for failure in message.failures]
    assert {(failure.ticket_id, failure.reason) for failure in lost} == {(0, DropReason.TICKET_CLOSED)}
    sent = sum(t.num_sampled for message in messages for t in message.trajectories)
    assert sent + sum(failure.num_tokens for failure in lost) == bench.engine.num_sampled
    assert bench.rollout.num_unsent == 0


def test_unservable_tickets_fail_with_their_reason_and_the_others_go_on(
    tiny_config: Callable[..., RunConfig],
) -> None:
    bench = Bench(tiny_config())
    bench.weights.publish(PolicyVersion(0, 0))
    too_long = bench.ticket(0)
    prompts = {0: [3] * 600, 1: [], 2: too_long.prompt_ids}
    tickets = [
        Ticket(i, i, ids, 4, too_long.sampling, 1, PolicyVersion(0, 0), 50.0) for i, ids in prompts.items()
    ]
    bench.rollout.grant(tickets)
    messages = bench.until_idle()
    bench.rewards.close()
    reasons = {failure.ticket_id: failure.reason for message in messages for failure in message.failures}
    assert reasons == {0: DropReason.PROMPT_TOO_LONG, 1: DropReason.PROMPT_EMPTY}
    assert {t.ticket_id for message in messages for t in message.trajectories} == {2}


def bpe_folder(tiny_model: Path, target: Path) -> Path:
    """The tiny model with a tokenizer under which ids do not survive text: ids 3 and 4 spell what id 5 is alone."""
    shutil.copytree(tiny_model, target)
    pieces = ["<pad>", "<s>", "</s>", "he", "llo", "hello", *(f"<{i}>" for i in range(6, 32))]
    characters = ["h", "e", "l", "o"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)} | {c: 32 + i for i, c in enumerate(characters)}
    vocabulary |= {"ll": 36}
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    inner = BpeTokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<pad>"))
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(str(target))
    return target


def test_sampled_ids_reach_the_learner_though_their_text_means_other_ids(
    tiny_config: Callable[..., RunConfig], tiny_model: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    folder = bpe_folder(tiny_model, tmp_path / "bpe")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode_prompt(tokenizer.decode([3, 4])) == [5]
    environment = tmp_path / "spell.py"
    environment.write_text(
        "class Spell:\n"
        "    num_prompts = None\n"
        "    def prompt(self, index):\n        return 'hello'\n"
        "    def reward(self, index, completion):\n        return float(sum(completion.token_ids) % 5)\n"
    )
    config = tiny_config(
        steps=2, model={"path": str(folder)}, env={"name": str(environment), "args": {}},
        sampling={"max_new_tokens": 16, "ignore_eos": True},
    )  # fmt: skip
    run = SerialRun(config)
    engine: Any = run.rollouts[0].engine
    sampled: dict[tuple[int, int], FinishedMember] = {}
    step = engine.step
    engine.step = lambda: [sampled.setdefault((m.request_id, m.member), m) for m in step()]
    received: list[Trajectory] = []
    on_message = run.desk.on_message

    def over_the_wire(address: bytes, message: Any) -> None:
        if isinstance(message, Trajectories):
            message = decode([bytes(frame) for frame in encode(message)])
            received.extend(message.trajectories)
        on_message(address, message)

    run.desk.on_message = over_the_wire
    records = list(run.steps())
    run.close()
    assert len(records) == 2
    changed_by_text = 0
    for trajectory in received:
        member = sampled[trajectory.ticket_id, trajectory.member]
        completion = trajectory.token_ids[trajectory.prompt_length :]
        assert np.array_equal(completion, member.token_ids)
        assert np.array_equal(trajectory.logprobs[trajectory.prompt_length :], member.logprobs)
        ids = completion.tolist()
        changed_by_text += tokenizer.encode_prompt(tokenizer.decode(ids)) != ids
    assert changed_by_text > 0
