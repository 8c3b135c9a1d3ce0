"""The end of an intake, with real sockets: the idle, the late and the given up hear that nothing is to come."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from headway.learner.intake import STOP_GRACE_S, Intake
from headway.stream import GeneratorSocket, LearnerSocket
from headway.wire.messages import SCHEMA, Bye, DataMessage, Hello, Refused, Stop, Welcome

DEADLINE_S = 10.0


def hello(name: str, index: int = 0) -> Callable[[], Hello]:
    said = Hello(
        run_id="run", schema=SCHEMA, generator=index, incarnation=name, pid=os.getpid(), host="here", max_running=1,
        serving=None,
    )  # fmt: skip
    return lambda: said


def hear(stream: GeneratorSocket, kind: type[DataMessage]) -> DataMessage:
    """The next message of a kind; waits for it, at most DEADLINE_S."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        for message in stream.receive(0.1):
            if isinstance(message, kind):
                return message
    raise AssertionError(f"no {kind.__name__}")


def test_stop_reaches_those_who_idle_and_those_who_join_at_that_moment(office: Callable[..., Any]) -> None:
    intake = Intake(office().desk, LearnerSocket, patience_s=60.0)
    with (
        GeneratorSocket.connect(intake.endpoints, hello("early", 0)) as early,
        GeneratorSocket.connect(intake.endpoints, hello("late", 1)) as late,
    ):
        hear(early, Welcome)
        closing = threading.Thread(target=intake.close, args=("over",))
        closing.start()
        stop = hear(early, Stop)
        assert isinstance(stop, Stop)
        assert stop.reason == "over"
        hear(late, Stop)  # says Hello while the intake waits for the other's Bye
        early.send(Bye(incarnation="early", unsent=0))
        late.connected = True  # it was told to stop, not welcomed
        late.send(Bye(incarnation="late", unsent=0))
        closing.join(DEADLINE_S)
        assert not closing.is_alive()


def test_the_end_does_not_wait_for_ever_for_a_generator_that_says_nothing(office: Callable[..., Any]) -> None:
    intake = Intake(office().desk, LearnerSocket, patience_s=60.0)
    with GeneratorSocket.connect(intake.endpoints, hello("mute")) as mute:
        hear(mute, Welcome)
        started = time.monotonic()
        intake.close("over")
        assert STOP_GRACE_S <= time.monotonic() - started < STOP_GRACE_S + DEADLINE_S


def test_a_generator_that_is_given_up_while_it_idles_hears_of_it(office: Callable[..., Any]) -> None:
    place = office()
    intake = Intake(place.desk, LearnerSocket, patience_s=60.0)
    with GeneratorSocket.connect(intake.endpoints, hello("g")) as stream:
        hear(stream, Welcome)
        with intake.lock:
            for _ in range(12):  # the desk's clock goes on in small steps while no heartbeat comes
                place.now += 0.5
                place.desk.tick()
            assert place.desk.peers == []
        refused = hear(stream, Refused)
        assert isinstance(refused, Refused)
        assert "silent for" in refused.reason
    intake.close("over")


def test_a_stranger_that_beats_is_refused(office: Callable[..., Any]) -> None:
    place = office()
    stranger = place.generator()
    stranger.beat()
    (refused,) = stranger.heard(Refused)
    assert "given up" in refused.reason


@pytest.mark.parametrize(("pid_offset", "dies"), [(0, True), (1, False)])
def test_news_of_a_lost_generator_hits_only_the_process_it_is_about(pid_offset: int, dies: bool) -> None:
    from headway.config import RunConfig
    from headway.launch.fleet import Fleet

    class Stub:
        name, pid, age_s = "generator-0", 4242, 3600.0
        killed = False

        def poll(self) -> int | None:
            return None

        def kill(self) -> None:
            self.killed = True

    config = RunConfig.model_validate({"model": {"path": "m"}, "env": {"name": "sort"}})
    fleet = Fleet(config, None, (), lambda text: None)  # type: ignore[arg-type]
    stub = Stub()
    fleet._children[0] = stub  # type: ignore[assignment]
    fleet.lost(0, stub.pid + pid_offset, "silent")
    assert stub.killed is dies
