"""A request that never returns, before and after a resume: it costs its slot for a while and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headway.learner.desk import Desk
from headway.learner.recovery import Recovery
from headway.learner.setup import staleness_policy
from headway.learner.tickets import TicketMaker
from headway.staleness import Gate
from headway.types import PolicyVersion
from headway.wire.messages import Welcome

MakeOffice = Callable[..., Any]
DEADLINE_S = 60.0
HANGS = 1  # the ticket for which no member ever comes, whoever holds it


def work(office: Any, generator: Any, version: PolicyVersion) -> PolicyVersion:
    """Everybody but the hanging request goes on for as long as there is something to do."""
    while True:
        office.tick()
        generator.beat()
        granted = generator.granted()
        for ticket in granted:
            if ticket.ticket_id != HANGS:
                generator.finish(ticket)
        groups = office.desk.take().groups
        if groups:
            assert HANGS not in {group.ticket_id for group in groups}
            version = PolicyVersion(version.epoch, version.step + 1)
            office.desk.trained(groups, version)
            office.publish(version)
            generator.ack(version)
        elif not granted:
            return version


def resume(office: Any, version: PolicyVersion) -> None:
    """The desk of the next attempt, from the state of this one."""
    before, config = office.desk, office.config
    gate = Gate(staleness_policy(config), version=PolicyVersion(1, version.step), lineage=[version])
    gate.restore(before.gate.state())
    tickets = TicketMaker(config, (2,))
    desk = Desk(
        config, "run", gate, office.prompts, tickets,
        lambda version: Welcome(manifest_digest="m", weight_channel="c", version=version, heartbeat_s=2.0),
        lambda index, _pid, why: office.lost.append((index, why)),
        lambda: office.now,
    )  # fmt: skip
    desk.restore(before.state())
    desk.buffer.restore(before.buffer.held())
    Recovery(config, desk.buffer, office.prompts, tickets, desk.arrivals.receipts, 0).run([])
    office.desk = desk
    office.publish(gate.version)


def test_the_learner_is_not_blocked_by_one_request_nor_again_by_the_same_after_a_resume(
    office: MakeOffice,
) -> None:
    made = office(12, passes=1, staleness={"max_lag": 4}, stream={"rollout_deadline_s": DEADLINE_S})
    generator = made.generator().join()
    version = work(made, generator, PolicyVersion(0, 0))
    assert version.step >= 1  # batches of other groups are trained past it
    stuck_at = version.step
    assert made.check()["in_flight"] >= 1

    resume(made, version)
    generator = made.generator(life=1).join(made.desk.gate.version)
    version = work(made, generator, made.desk.gate.version)
    assert HANGS in generator.tickets  # the same request goes out again, and hangs again
    assert made.check()["dropped"] == 0
    assert version.step >= stuck_at

    for _ in range(int(2 * DEADLINE_S)):
        made.tick(0.5)
        generator.beat()
    assert made.desk.gate.counts().dropped == {"deadline": 1}
    version = work(made, generator, version)
    assert made.desk.drained  # its slot is free: the rest of the prompts is trained
    counts = made.check()
    assert (counts["issued"], counts["trained"], counts["in_flight"]) == (12, 11, 0)
