"""Supervisor and learner over the control channel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from headway.errors import OwnershipError, StreamError
from headway.stream import LearnerControl, SupervisorControl
from headway.wire import encode
from headway.wire.messages import Command, Event, Stop


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_events_and_commands_in_order(until: Callable[..., None], short_dir: Path, transport: str) -> None:
    supervisor = SupervisorControl("tcp://127.0.0.1:0" if transport == "tcp" else f"ipc://{short_dir}/c")
    assert not supervisor.send(Command(command_id=0, action="stop"))
    learner = LearnerControl(supervisor.endpoint)
    for i in range(50):
        assert learner.send(Event(note=str(i)))
    events: list[Event] = []
    until(lambda: len(events) == 50, lambda: events.extend(supervisor.poll(0.1)))
    assert [event.note for event in events] == [str(i) for i in range(50)]
    sent = [Command(command_id=i, action="set", key="staleness.max_lag", value="1") for i in range(3)]
    assert all(supervisor.send(command) for command in sent)
    commands: list[Command] = []
    until(lambda: len(commands) == 3, lambda: commands.extend(learner.poll(0.1)))
    assert commands == sent
    learner.close()
    supervisor.close()
    supervisor.close()


def test_events_sent_before_the_supervisor_binds_arrive(until: Callable[..., None], short_dir: Path) -> None:
    learner = LearnerControl(f"ipc://{short_dir}/c")
    assert learner.send(Event(note="early"))
    supervisor = SupervisorControl(f"ipc://{short_dir}/c")
    events: list[Event] = []
    until(lambda: events, lambda: events.extend(supervisor.poll(0.1)))
    assert events == [Event(note="early")]
    learner.close()
    supervisor.close()


def test_the_last_event_before_closing_arrives(until: Callable[..., None]) -> None:
    supervisor = SupervisorControl()
    learner = LearnerControl(supervisor.endpoint)
    learner.send(Event(status=b"{}"))
    learner.close()
    events: list[Event] = []
    until(lambda: events, lambda: events.extend(supervisor.poll(0.1)))
    assert events == [Event(status=b"{}")]
    supervisor.close()


def test_a_restarted_learner_takes_the_old_ones_place(
    start_peer: Callable[..., object], until: Callable[..., None]
) -> None:
    supervisor = SupervisorControl()
    events: list[Event] = []

    def listen() -> None:
        events.extend(supervisor.poll(0.1))

    for number in range(2):
        process = start_peer("control", supervisor.endpoint)
        until(lambda expected=2 * number + 1: len(events) == expected, listen)
        assert events[-1].note == str(process.pid)
        assert supervisor.send(Command(command_id=number, action="stop"))
        until(lambda expected=2 * number + 2: len(events) == expected, listen)
        assert events[-1].answered == number
        process.kill()
    until(lambda: not supervisor.send(Command(command_id=9, action="stop")), lambda: supervisor.poll(0.05))
    supervisor.close()


def test_what_is_no_event_is_counted(until: Callable[..., None]) -> None:
    supervisor = SupervisorControl()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = [context.socket(zmq.DEALER) for _ in range(2)]
    for socket, name in zip(sockets, (b"learner", b"stranger"), strict=True):
        socket.routing_id = name
        socket.connect(supervisor.endpoint)
        for frames in ([b"junk"], [b"x"] * 9, encode(Stop(reason="")), encode(Event(note="x"))):
            socket.send_multipart(frames)
    events: list[Event] = []
    until(
        lambda: supervisor.rejected.total() == 7 and events,
        lambda: events.extend(supervisor.poll(0.05)),
    )
    assert events == [Event(note="x")]
    assert supervisor.rejected == {"magic": 1, "frames": 2, "direction": 1, "identity": 3}
    context.destroy(linger=0)
    supervisor.close()


def test_wake_and_ownership() -> None:
    supervisor = SupervisorControl()
    supervisor.wake()
    assert supervisor.poll(30.0) == []
    caught: list[OwnershipError] = []

    def intrude() -> None:
        try:
            supervisor.poll(0)
        except OwnershipError as error:
            caught.append(error)

    thread = threading.Thread(target=intrude)
    thread.start()
    thread.join()
    assert len(caught) == 1
    supervisor.close()


def test_only_loopback(short_dir: Path) -> None:
    with pytest.raises(StreamError, match="refused to bind"):
        SupervisorControl("tcp://0.0.0.0:0")
