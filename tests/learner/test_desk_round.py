"""The desk's synchronous round: all generators share it, and nothing follows while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from headway.config import RunConfig
from headway.learner.desk import Desk
from headway.learner.prompts import PromptSource, TokenisedPrompt
from headway.learner.setup import make_gate
from headway.learner.tickets import TicketMaker
from headway.types import PolicyVersion
from headway.wire.messages import SCHEMA, Grant, Hello, WeightAck, Welcome


class Prompts:
    """Endless prompts of one token."""

    exhausted = False

    def next(self) -> TokenisedPrompt:
        return TokenisedPrompt(0, [1])


@pytest.mark.parametrize("max_lag", [0, 4])
def test_every_generator_gets_its_share_of_the_first_grant(
    tiny_config: Callable[..., RunConfig], max_lag: int
) -> None:
    config = tiny_config(staleness={"max_lag": max_lag}, generator={"replicas": 2})
    version = PolicyVersion(0, 0)
    gate = make_gate(config)
    desk = Desk(
        config,
        "run",
        gate,
        cast("PromptSource", Prompts()),
        TicketMaker(config, (2,)),
        welcome=lambda version: Welcome(
            manifest_digest="", weight_channel="", version=version, heartbeat_s=2.0
        ),
        on_lost=lambda index, pid, why: None,
        clock=lambda: 0.0,
    )
    for index in range(2):
        address, incarnation = b"%d" % index, f"g{index}"
        hello = Hello(
            run_id="run",
            schema=SCHEMA,
            generator=index,
            incarnation=incarnation,
            pid=1,
            host="here",
            max_running=8,
            serving=None,
        )
        desk.on_message(address, hello)
        desk.on_message(address, WeightAck(incarnation=incarnation, version=version, digest="", pause_s=0.0))
    desk.tick()
    grants = {address: message.tickets for address, message in desk.outbox if isinstance(message, Grant)}
    slots = gate.policy.slots
    assert [len(grants[address]) for address in (b"0", b"1")] == [slots // 2, slots // 2]
    assert sorted(t.ticket_id for tickets in grants.values() for t in tickets) == [*range(slots)]
    desk.outbox.clear()
    desk.tick()
    assert not desk.outbox
