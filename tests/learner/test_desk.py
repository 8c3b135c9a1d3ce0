"""The desk: who may join, who gets tickets, what counts, who is given up, and what ends a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headway.errors import TrainingStopped, WeightError
from headway.learner.versions import AckLap
from headway.types import DropReason, FinishReason, MemberFailure, PolicyVersion, Ticket, Trajectory
from headway.wire.messages import Bye, Cancel, Grant, Received, Refused, VersionNotice, Welcome

MakeOffice = Callable[..., Any]
MakeTrajectory = Callable[..., Trajectory]
FIRST = PolicyVersion(0, 0)


def fail(
    ticket: Ticket, member: int, reason: str = "generation_failed", num_tokens: int = 0
) -> MemberFailure:
    return MemberFailure(
        ticket.ticket_id, member, reason, f"what went wrong with {ticket.ticket_id}", num_tokens
    )


# Joining -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [({"run_id": "another"}, "this is run run, you belong to another"), ({"schema": 99}, "wire schema 99")],
)
def test_a_generator_of_another_run_or_schema_is_refused(
    office: MakeOffice, change: dict[str, Any], says: str
) -> None:
    place = office()
    stranger = place.generator()
    stranger.hello(**change)
    (refused,) = stranger.heard(Refused)
    assert says in refused.reason
    assert place.desk.peers == []
    stranger.ack(FIRST)
    place.tick()
    assert not place.desk.outbox
    assert place.check()["issued"] == 0


def test_tickets_come_only_after_the_weights_are_acknowledged(office: MakeOffice) -> None:
    place = office()
    generator = place.generator()
    generator.hello()
    (welcome,) = generator.heard(Welcome)
    assert welcome.version == FIRST
    place.tick()
    assert generator.granted() == []
    assert place.desk.first_ticket_s is None
    generator.ack(FIRST)
    place.tick(0.1)
    tickets = generator.granted()
    assert [t.ticket_id for t in tickets] == list(range(place.desk.gate.policy.slots))
    assert all(t.admitted == FIRST for t in tickets)
    assert place.desk.first_ticket_s == place.now
    assert len({t.seed for t in tickets}) == len(tickets)


def test_a_returned_slot_goes_only_to_a_generator_that_holds_the_steps_weights(office: MakeOffice) -> None:
    place = office(staleness={"max_lag": 0})
    generator = place.generator().join()
    place.tick()
    for ticket in generator.granted():
        generator.finish(ticket)
    assert len(place.train()) == 2
    place.tick()
    assert generator.granted() == []  # version 0.1 is out, the generator has 0.0
    assert generator.heard(VersionNotice)[-1].version == PolicyVersion(0, 1)
    generator.ack(PolicyVersion(0, 1))
    place.tick()
    assert [t.admitted for t in generator.granted()] == [PolicyVersion(0, 1)] * 2


def test_notices_are_numbered_and_go_to_everybody(office: MakeOffice) -> None:
    place = office()
    generators = [place.generator(index).join() for index in range(2)]
    for _ in range(3):
        place.desk.gate.trained([], PolicyVersion(0, place.desk.gate.step + 1))
        place.publish(place.desk.gate.version)
    for generator in generators:
        notices = generator.heard(VersionNotice)
        assert [notice.version.step for notice in notices] == [1, 2, 3]
        assert np.diff([notice.seq for notice in notices]).tolist() == [1, 1]
    with pytest.raises(WeightError, match=r"trained is 0\.3"):
        place.desk.published(PolicyVersion(0, 5), "x")


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("prompts", [2, 4, 8])
def test_grants_are_fair(office: MakeOffice, replicas: int, prompts: int) -> None:
    place = office(
        generator={"replicas": replicas},
        batch={"prompts": prompts, "samples": 2},
        staleness={"max_lag": 1, "window": 1},
    )
    generators = [place.generator(index).join() for index in range(replicas)]
    place.tick()
    shares = [len(generator.granted()) for generator in generators]
    assert sum(shares) == place.desk.gate.policy.slots == 2 * prompts
    assert max(shares) - min(shares) <= 1
    # The first one is fast: it never gets more than its share, and the others' work is not starved of slots.
    for _ in range(6):
        for ticket in list(generators[0].tickets.values()):
            generators[0].finish(ticket)
            del generators[0].tickets[ticket.ticket_id]
        place.train()
        for generator in generators:
            generator.ack(place.desk.gate.version)
        place.tick()
        for generator in generators:
            generator.granted()
        held = [len(generator.tickets) for generator in generators]
        assert max(held) <= -(-2 * prompts // replicas)


def test_a_generator_that_is_still_loading_holds_no_share(office: MakeOffice) -> None:
    place = office(generator={"replicas": 2}, staleness={"max_lag": 1, "window": 1})
    ready = place.generator(0).join()
    place.generator(1).hello()  # no ack yet: it may take long, and a batch needs every slot
    place.tick()
    assert len(ready.granted()) == place.desk.gate.policy.slots


# Messages ----------------------------------------------------------------------------------------------------


def test_a_message_that_comes_twice_is_acknowledged_twice_and_counted_once(
    office: MakeOffice, make_trajectory: MakeTrajectory
) -> None:
    place = office()
    generator = place.generator().join()
    place.tick()
    ticket = generator.granted()[0]
    trajectory = make_trajectory(ticket, 0, incarnation=generator.incarnation)
    generator.send([trajectory])
    generator.send([trajectory], seq=1)
    assert [received.seq for received in generator.heard(Received)] == [1, 1]
    assert place.desk.gate.counts().trajectories["received"] == 1
    generator.send([trajectory])  # the same trajectory in a new message
    counts = place.desk.gate.counts().trajectories
    assert (counts["received"], counts["dropped.duplicate"]) == (2, 1)
    place.check()


def test_what_a_stranger_sends_is_counted_and_refused(
    office: MakeOffice, make_trajectory: MakeTrajectory
) -> None:
    place = office()
    generator = place.generator().join()
    place.tick()
    ticket = generator.granted()[0]
    stranger = place.generator(5)
    stranger.send([make_trajectory(ticket, 0)], [fail(ticket, 1, num_tokens=4)])
    assert stranger.heard(Refused)
    assert stranger.heard(Received) == []
    counts = place.desk.gate.counts()
    assert counts.trajectories["dropped.unknown_ticket"] == 1
    assert counts.tokens["dropped.unknown_ticket"] == 3 + 4
    stranger.incarnation = generator.incarnation  # and under somebody else's name
    stranger.send([make_trajectory(ticket, 0)])
    assert place.desk.gate.counts().trajectories["buffered"] == 0
    stranger.beat()
    stranger.say(Bye(incarnation="x", unsent=0))
    assert [peer.index for peer in place.desk.peers] == [0]
    generator.finish(ticket)
    assert place.check()["buffered"] == 1


def test_tickets_of_another_generator_are_not_taken(
    office: MakeOffice, make_trajectory: MakeTrajectory
) -> None:
    place = office(generator={"replicas": 2})
    mine, other = place.generator(0).join(), place.generator(1).join()
    place.tick()
    ticket = mine.granted()[0]
    other.send([make_trajectory(ticket, 0), make_trajectory(ticket, 1)])
    assert place.desk.gate.counts().trajectories["dropped.unknown_ticket"] == 2
    mine.finish(ticket)
    assert place.check()["buffered"] == 1


INVALID: list[tuple[str, dict[str, Any]]] = [
    ("logprob_nan", {"logprobs": np.array([0, -1, np.nan, -1], np.float32)}),
    ("logprob_inf", {"logprobs": np.array([0, -1, -np.inf, -1], np.float32)}),
    ("logprob_floor", {"logprobs": np.array([0, -1, -9999.0, -1], np.float32)}),
    ("logprob_positive", {"logprobs": np.array([0, -1, 0.3, -1], np.float32)}),
    ("logprob_missing", {"logprobs": None}),
    ("lengths", {"logprobs": np.array([0, -1, -1], np.float32)}),  # one short: never padded
    ("temperature", {"temperature": 0.5}),
    ("prompt_hash", {"prompt_hash": 1}),
    ("finish_abort", {"finish_reason": FinishReason.ABORT}),
    ("finish_error", {"finish_reason": FinishReason.ERROR}),
]


@pytest.mark.parametrize(("reason", "change"), INVALID, ids=[reason for reason, _ in INVALID])
def test_a_trajectory_that_fails_the_checks_is_rejected_with_its_reason(
    office: MakeOffice, make_trajectory: MakeTrajectory, reason: str, change: dict[str, Any]
) -> None:
    place = office(batch={"prompts": 2, "samples": 3})
    generator = place.generator().join()
    place.tick()
    ticket = next(t for t in generator.granted() if len(t.prompt_ids) == 1)
    members = [make_trajectory(ticket, k, reward=k, incarnation=generator.incarnation) for k in range(2)]
    generator.send([*members, make_trajectory(ticket, 2, incarnation=generator.incarnation, **change)])
    assert place.desk.invalid == {reason: 1}
    counts = place.desk.gate.counts()
    assert counts.trajectories["dropped.invalid"] == 1
    assert counts.tickets["buffered"] == 1  # the other two have a baseline
    (group,) = place.desk.buffer.groups
    assert [t.member for t in group.trajectories] == [0, 1]
    place.check()


def test_padding_with_zeros_is_suspicious_and_trained(
    office: MakeOffice, caplog: pytest.LogCaptureFixture
) -> None:
    place = office(sampling={"max_new_tokens": 12})
    generator = place.generator().join()
    place.tick()
    ticket = next(t for t in generator.granted() if len(t.prompt_ids) == 1)
    padded = np.concatenate([np.zeros(1), -np.ones(3), np.zeros(9)]).astype(np.float32)
    generator.finish(ticket, tokens=list(range(3, 15)), logprobs=padded)
    assert caplog.text.count("padding looks like this") == 1
    assert place.check()["buffered"] == 1


def test_many_invalid_trajectories_stop_the_run_although_groups_survive(
    office: MakeOffice, make_trajectory: MakeTrajectory
) -> None:
    place = office(batch={"prompts": 8, "samples": 4})
    generator = place.generator().join()

    def run(bad: int, groups: int) -> None:
        """`bad` members of each group of four have no log-probs."""
        for _ in range(groups):
            generator.ack(place.desk.gate.version)
            place.tick()
            generator.granted()
            ticket = generator.tickets.pop(min(generator.tickets))
            nan = np.full(len(ticket.prompt_ids) + 3, np.nan, np.float32)
            members = []
            for member in range(4):
                change = {"logprobs": nan} if member < bad else {}
                named = {"reward": float(member), "incarnation": generator.incarnation}
                members.append(make_trajectory(ticket, member, **named, **change))
            generator.send(members)
            place.train()

    run(bad=0, groups=40)
    run(bad=1, groups=40)  # a quarter is counted
    assert place.desk.invalid == {"logprob_nan": 40}
    with pytest.raises(
        TrainingStopped, match=r"of the last 64 trajectories .*at version 0\.\d+: logprob_nan"
    ):
        run(bad=2, groups=40)


# Time --------------------------------------------------------------------------------------------------------


def test_a_silent_generator_is_given_up_after_two_heartbeats_and_its_prompts_go_out_again(
    office: MakeOffice,
) -> None:
    place = office(generator={"replicas": 2}, stream={"heartbeat_s": 2.0})
    silent, alive = place.generator(0).join(), place.generator(1).join()
    place.tick()
    held = silent.granted()
    alive.granted()
    silent.finish(held[0])  # this one is safe with the learner
    for _ in range(4):
        alive.beat()
        place.tick(1.0)
    assert place.lost == []
    alive.beat()
    place.tick(0.5)
    assert [index for index, _ in place.lost] == [0]
    assert "silent for 4.5 s" in place.lost[0][1]
    counts = place.desk.gate.counts()
    assert counts.dropped == {"generator_lost": len(held) - 1}
    again = alive.granted()
    assert [t.prompt_ids for t in again][: len(held) - 1] == [t.prompt_ids for t in held[1:]]
    assert not {t.ticket_id for t in again} & {t.ticket_id for t in held}
    silent.finish(held[1])  # it was only stopped, and comes back
    assert silent.heard(Refused)
    assert place.desk.gate.counts().trajectories["dropped.ticket_closed"] == 2
    place.check()


def test_a_loop_that_hangs_behind_a_beating_heart_is_given_up(office: MakeOffice) -> None:
    place = office(stream={"rollout_deadline_s": 30.0})
    generator = place.generator().join()
    place.tick()
    generator.beat(stalled_s=29.0)
    place.tick(0.1)
    assert place.lost == []
    generator.beat(stalled_s=31.0)
    place.tick(0.1)
    assert "its loop has not turned for 31.0 s" in place.lost[0][1]


def test_a_restarted_generator_replaces_its_old_self_at_once(office: MakeOffice) -> None:
    place = office()
    old = place.generator(0).join()
    place.tick()
    held = old.granted()
    new = place.generator(0, life=1).join()
    assert place.lost == [(0, "replaced by a new process")]
    place.tick()
    assert [t.prompt_ids for t in new.granted()] == [t.prompt_ids for t in held]


def test_a_generator_that_says_goodbye_gives_its_tickets_back(office: MakeOffice) -> None:
    place = office()
    generator = place.generator().join()
    place.tick()
    held = generator.granted()
    generator.say(Bye(incarnation=generator.incarnation, unsent=0))
    assert place.lost == []  # nobody needs to be told, and least of all to kill it
    assert place.desk.peers == []
    assert place.check()["dropped.generator_lost"] == len(held)


def test_a_beat_after_the_goodbye_is_not_told_that_its_generator_was_lost(
    office: MakeOffice, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = office()
    generator, stranger = place.generator().join(), place.generator(1)
    generator.say(Bye(incarnation=generator.incarnation, unsent=0))
    place.desk.outbox.clear()
    generator.beat()
    assert not place.desk.outbox
    assert not place.desk.refused
    stranger.beat()
    assert [type(message) for _, message in place.desk.outbox] == [Refused]
    assert place.desk.refused == {"unknown": 1}
    monkeypatch.setattr("headway.learner.desk.MAX_LEFT", 2)
    for life in range(3):  # those that left longest ago are forgotten, so that memory is bounded
        other = place.generator(2, life).join()
        other.say(Bye(incarnation=other.incarnation, unsent=0))
    place.desk.outbox.clear()
    generator.beat()
    assert place.desk.refused == {"unknown": 2}


def test_tokens_that_died_with_a_generator_are_counted_from_its_last_heartbeat(office: MakeOffice) -> None:
    place = office()
    generator = place.generator().join()
    place.tick()
    generator.finish(generator.granted()[0])  # 2 members x 3 tokens
    generator.beat(generated=6 + 11)
    place.tick(100.0)  # nobody looked for so long, so nobody is blamed
    assert place.lost == []
    for _ in range(3):
        place.tick(0.4)
    assert len(place.lost) == 1
    assert place.desk.gate.counts().tokens["lost_unsent"] == 11


def test_a_group_past_its_deadline_is_cancelled_dropped_and_its_slot_comes_back(office: MakeOffice) -> None:
    place = office(
        stream={"rollout_deadline_s": 30.0, "heartbeat_s": 100.0}, staleness={"max_lag": 1, "window": 1}
    )
    generator = place.generator().join()
    place.tick()
    slow, *others = generator.granted()
    for ticket in others:
        generator.finish(ticket)
    assert place.train() == []  # the window's foot is the slow one
    place.tick(29.9)
    assert generator.heard(Cancel) == []
    place.tick(0.2)
    assert [cancel.ticket_ids for cancel in generator.heard(Cancel)] == [[slow.ticket_id]]
    assert len(generator.granted()) == 1
    assert len(place.train()) == 2
    generator.finish(slow)  # late
    counts = place.desk.gate.counts()
    assert counts.dropped == {"deadline": 1}
    assert counts.trajectories["dropped.ticket_closed"] == 2
    place.check()


# What cannot be trained --------------------------------------------------------------------------------------


def test_groups_of_equal_rewards_are_replaced_within_the_bound_and_then_trained(office: MakeOffice) -> None:
    place = office(algo={"max_replacements": 1.0}, staleness={"max_lag": 4})
    generator = place.generator().join()
    place.tick()
    for ticket in generator.granted():
        generator.finish(ticket, rewards=[1.0, 1.0])
    place.tick()
    assert place.desk.gate.counts().dropped == {"zero_variance": 2}  # P per step
    assert len(generator.granted()) == 2
    assert len(place.train()) == 2  # flat, but a bound is a bound
    place.tick()
    # a new step, a new bound; the groups that were kept before stay kept
    assert place.desk.gate.counts().dropped["zero_variance"] <= 4
    assert place.desk.take_flat_rewards() == [1.0] * (2 * place.desk.gate.counts().dropped["zero_variance"])


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 2, 0]])
def test_a_synchronous_round_replaces_flat_groups_only_when_it_is_complete(
    office: MakeOffice, order: list[int]
) -> None:
    """Else what a round replaces, and which prompts follow, would depend on the order of arrival."""
    place = office(
        batch={"prompts": 4, "samples": 2}, algo={"max_replacements": 0.25}, staleness={"max_lag": 0}
    )
    generator = place.generator().join()
    place.tick()
    tickets = generator.granted()
    for number in order:
        assert place.desk.gate.counts().dropped == {}
        flat = number in (0, 3)  # two, of which the bound allows to replace one
        generator.finish(tickets[number], rewards=[1.0, 1.0] if flat else [0.0, 1.0])
        place.desk.tick()
    assert place.desk.gate.counts().dropped == {"zero_variance": 1}
    (again,) = generator.granted()
    assert (again.ticket_id, again.prompt_index) == (4, 4)
    generator.finish(again)
    assert [group.ticket_id for group in place.train()] == [1, 2, 3, 4]


def test_equal_rewards_are_trained_when_the_filter_is_off(office: MakeOffice) -> None:
    place = office(algo={"filter_zero_variance": False})
    generator = place.generator().join()
    place.tick()
    for ticket in generator.granted():
        generator.finish(ticket, rewards=[1.0, 1.0])
    assert len(place.train()) == 2
    assert place.desk.gate.counts().dropped == {}


def test_a_trajectory_that_no_row_can_hold_drops_its_group(office: MakeOffice) -> None:
    place = office(batch={"prompts": 2, "samples": 2, "tokens_per_row": 8}, sampling={"max_new_tokens": 6})
    generator = place.generator().join()
    place.tick()
    fits, too_long = generator.granted()[:2]
    generator.finish(fits)
    generator.finish(too_long, tokens=list(range(3, 9)))  # 1 + 6 tokens: fits
    assert place.check()["buffered"] == 2
    place = office(batch={"prompts": 2, "samples": 2, "tokens_per_row": 5}, sampling={"max_new_tokens": 6})
    generator = place.generator().join()
    place.tick()
    generator.finish(generator.granted()[0], tokens=list(range(3, 9)))
    assert place.desk.gate.counts().dropped == {"row_too_short": 1}


def test_a_few_failures_are_counted_and_the_run_goes_on(office: MakeOffice) -> None:
    place = office(batch={"prompts": 2, "samples": 4})
    generator = place.generator().join()
    trained = 0
    for turn in range(40):
        place.tick()
        generator.granted()
        for ticket in list(generator.tickets.values()):
            if ticket.ticket_id % 10 == 9:
                generator.send(failures=[fail(ticket, member) for member in range(4)])
            else:
                generator.finish(ticket)
            del generator.tickets[ticket.ticket_id]
        trained += len(place.train())
        generator.ack(place.desk.gate.version)
        assert turn < 3 or trained
    counts = place.desk.gate.counts()
    assert trained > 40
    assert counts.dropped["generation_failed"] >= 5


def test_when_everything_fails_the_run_stops_with_the_first_error(office: MakeOffice) -> None:
    place = office()
    generator = place.generator().join()
    first: list[int] = []

    def everything_fails() -> None:
        for _ in range(30):
            place.tick()
            for ticket in generator.granted():
                first.append(ticket.ticket_id)
                generator.send(failures=[fail(ticket, member, "reward_failed") for member in range(2)])

    with pytest.raises(
        TrainingStopped, match=r"last 16 groups all failed.* reward_failed: what went wrong with 0"
    ):
        everything_fails()
    assert len(first) == 16


# Weights -----------------------------------------------------------------------------------------------------


def test_a_generator_that_serves_other_weights_is_given_up_and_the_third_time_stops_the_run(
    office: MakeOffice,
) -> None:
    place = office()
    for life in range(2):
        generator = place.generator(0, life)
        generator.hello()
        generator.ack(FIRST, digest="of the initial model")
        assert place.lost[-1][1].startswith(
            "serves of the initial model as version 0.0, published was digest of 0.0"
        )
        place.tick()
        assert generator.granted() == []
    generator = place.generator(0, 2)
    generator.hello()
    with pytest.raises(TrainingStopped, match="weights do not arrive as they are sent"):
        generator.ack(FIRST, digest="of the initial model")


def test_an_ack_that_overtakes_the_learners_own_notice_is_checked_when_that_comes(office: MakeOffice) -> None:
    """A generator sees a version in the channel before the main loop has told the desk its digest."""
    place = office()
    good, bad = place.generator(0).join(), place.generator(1).join()
    version = PolicyVersion(0, 1)
    place.desk.gate.trained([], version)
    good.ack(version)
    bad.ack(version, digest="something else")
    place.publish(version)
    assert [peer.index for peer in place.desk.peers] == [0]
    assert "serves something else as version 0.1" in place.lost[0][1]


def test_an_older_ack_does_not_turn_a_generator_back(office: MakeOffice) -> None:
    place = office()
    generator = place.generator().join()
    place.desk.gate.trained([], PolicyVersion(0, 1))
    place.publish(PolicyVersion(0, 1))
    generator.ack(PolicyVersion(0, 1))
    generator.ack(FIRST)
    assert place.desk.peers[0].acked == PolicyVersion(0, 1)


def test_acks_say_how_long_a_push_was_on_its_way_and_how_long_decoding_stood_still(
    office: MakeOffice,
) -> None:
    place = office()
    generators = [place.generator(index).join() for index in range(2)]
    place.desk.ack_lap()
    version = PolicyVersion(0, 1)
    place.desk.gate.trained([], version)
    place.publish(version)
    for generator, pause_s in zip(generators, (0.5, 1.0), strict=True):
        place.now += 2.0
        generator.ack(version, pause_s=pause_s)
    generators[0].ack(version, pause_s=9.0)  # once more
    assert place.desk.ack_lap() == AckLap(3.0, 0.75)
    assert place.desk.ack_lap() == AckLap(0.0, 0.0)


# Ends --------------------------------------------------------------------------------------------------------


def test_no_more_tickets_than_the_run_can_use(office: MakeOffice) -> None:
    place = office(steps=2, staleness={"max_lag": 4})
    generator = place.generator().join()
    for _ in range(10):
        place.tick()
        for ticket in generator.granted():
            generator.finish(ticket)
        place.train()
        generator.ack(place.desk.gate.version)
    assert place.check() == {"issued": 4, "trained": 4, "dropped": 0, "in_flight": 0, "buffered": 0}


@pytest.mark.parametrize("max_lag", [0, 2])
def test_ten_prompts_and_batches_of_sixteen_end_in_one_short_batch(office: MakeOffice, max_lag: int) -> None:
    place = office(10, passes=1, batch={"prompts": 16, "samples": 2}, staleness={"max_lag": max_lag})
    generator = place.generator().join()
    place.tick()
    tickets = generator.granted()
    assert len(tickets) == 10
    assert place.desk.finishing
    for ticket in tickets[:-1]:
        generator.finish(ticket)
        assert place.train() == []
    assert not place.desk.drained
    generator.finish(tickets[-1])
    assert len(place.train()) == 10
    assert place.desk.drained


def test_ten_prompts_wrap_for_as_long_as_the_run_lasts(office: MakeOffice) -> None:
    place = office(10, batch={"prompts": 4, "samples": 2})
    generator = place.generator().join()
    trained: list[int] = []
    for _ in range(30):
        place.tick()
        for ticket in generator.granted():
            generator.finish(ticket)
        trained += [group.ticket.prompt_index for group in place.train()]
        generator.ack(place.desk.gate.version)
    assert len(trained) >= 80
    assert np.bincount(trained).min() >= 8
    assert place.prompts.passes_done >= 8


def test_prompts_of_a_lost_generator_are_still_trained_in_the_last_pass(office: MakeOffice) -> None:
    place = office(6, passes=1, batch={"prompts": 6, "samples": 2})
    first = place.generator(0).join()
    place.tick()
    held = first.granted()
    assert len(held) == 6
    assert place.desk.finishing
    for ticket in held[:2]:
        first.finish(ticket)
    second = place.generator(0, life=1).join()
    assert not place.desk.finishing
    place.tick()
    for ticket in second.granted():
        second.finish(ticket)
    groups = place.train()
    assert sorted(group.ticket.prompt_index for group in groups) == [0, 1, 2, 3, 4, 5]
    assert place.desk.drained


def test_closing_ends_everything_as_shutdown(office: MakeOffice) -> None:
    place = office()
    generator = place.generator().join()
    place.tick()
    tickets = generator.granted()
    generator.finish(tickets[0])
    place.desk.buffer.close()
    counts = place.check()
    assert (counts["in_flight"], counts["buffered"]) == (0, 0)
    assert counts[f"dropped.{DropReason.SHUTDOWN}"] == len(tickets)


def test_a_ticket_whose_grant_was_lost_is_granted_again_and_no_other(office: MakeOffice) -> None:
    place = office()
    generator = place.generator().join()
    place.tick()
    held = generator.granted()
    generator.finish(held[0])
    generator.heard(Grant)
    lost = held[-1]
    generator.hello(tickets=[ticket.ticket_id for ticket in held[:-1]])
    (again,) = generator.heard(Grant)
    assert again.tickets == [lost]
    generator.hello(tickets=[ticket.ticket_id for ticket in held])
    assert generator.heard(Grant) == []
    generator.finish(lost)
    generator.hello(
        tickets=[ticket.ticket_id for ticket in held[1:-1]]
    )  # those that ended are no longer expected
    assert generator.heard(Grant) == []
    place.check()


def test_a_trajectory_whose_id_is_not_its_place_is_invalid(office: MakeOffice, make_trajectory: Any) -> None:
    place = office()
    generator = place.generator().join()
    place.tick()
    ticket = generator.granted()[0]
    generator.send([make_trajectory(ticket, 0, incarnation="somebody")])
    assert place.desk.invalid == {"trajectory_id": 1}


def test_a_message_out_of_all_order_is_acknowledged_and_not_taken(
    office: MakeOffice, make_trajectory: Any
) -> None:
    place = office()
    generator = place.generator().join()
    place.tick()
    ticket = generator.granted()[0]
    member = make_trajectory(ticket, 0, incarnation=generator.incarnation)
    for seq in (0, 10**9):
        generator.send([member], seq=seq)
    assert place.desk.invalid == {"seq": 2}
    generator.send([member])
    assert place.desk.gate.counts().trajectories["received"] == 1
