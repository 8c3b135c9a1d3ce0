"""A learner, a generator or a supervisor in a process of its own, for the tests to start, stop and kill.

Prints one line per event and obeys nothing but signals:
    learner DATA HEARTBEAT [mute]      binds; prints the endpoints and what it receives; `mute`: no Received
    generator ENDPOINTS NAME COUNT     sends COUNT messages, prints "done" when all are acked; beats
    control ENDPOINT                   connects as the learner and sends one Event
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from headway.stream import Endpoints, GeneratorSocket, HeartbeatThread, LearnerControl, LearnerSocket
from headway.types import FinishReason, PolicyVersion, TimeSplit, Trajectory, VersionSpan
from headway.wire.messages import Event, Heartbeat, Hello, Received, Trajectories, Welcome

LIFETIME_S = 60.0


def say(*words: object) -> None:
    print(*words, flush=True)


def trajectory(ticket_id: int) -> Trajectory:
    ids = np.arange(14, dtype=np.int32)
    return Trajectory(
        f"g.{ticket_id}.0", ticket_id, 0, 0, 1, 5, ids, ids >= 5, -np.ones(14, np.float32),
        [VersionSpan(5, 14, PolicyVersion(0, 0))], 1.0, FinishReason.STOP, None, 0, 0.0, 0.0,
    )  # fmt: skip


def hello(name: str) -> Hello:
    return Hello(
        run_id="run",
        schema=1,
        generator=0,
        incarnation=name,
        pid=os.getpid(),
        host="localhost",
        max_running=1,
        serving=None,
    )


def learner(data: str, heartbeat: str, *options: str) -> None:
    stream = LearnerSocket(data, heartbeat)
    say(stream.endpoints)
    deadline = time.monotonic() + LIFETIME_S
    while time.monotonic() < deadline:
        for peer, message in stream.poll(1.0):
            if isinstance(message, Hello):
                version = PolicyVersion(0, 0)
                stream.send(
                    peer, Welcome(manifest_digest="", weight_channel="", version=version, heartbeat_s=1.0)
                )
                say("hello", peer.decode())
            elif isinstance(message, Trajectories):
                if "mute" not in options:
                    stream.send(peer, Received(seq=message.seq))
                say("got", message.seq)


def generator(endpoints: str, name: str, count: str) -> None:
    where = Endpoints.parse(endpoints)
    split = TimeSplit(0.0, 0.0, 0.0, 0.0)

    def snapshot() -> Heartbeat:
        return Heartbeat(
            incarnation=name, seq=1, stalled_s=0.0, serving=None, running=0, waiting=0, tickets=0,
            generated=0, unsent=0, split=split,
        )  # fmt: skip

    beats = HeartbeatThread(where.heartbeat, snapshot, 0.05)
    with GeneratorSocket.connect(where, lambda: hello(name)) as stream:
        for seq in range(1, int(count) + 1):
            stream.send(
                Trajectories(
                    incarnation=name, seq=seq, trajectories=[trajectory(seq)], failures=[], generated=9 * seq
                )
            )
        deadline = time.monotonic() + LIFETIME_S
        while stream.unacked and time.monotonic() < deadline:
            stream.receive(1.0)
        say("done", stream.unacked)
        while time.monotonic() < deadline:
            stream.receive(1.0)
    beats.stop()


def control(endpoint: str) -> None:
    channel = LearnerControl(endpoint)
    channel.send(Event(note=str(os.getpid())))
    deadline = time.monotonic() + LIFETIME_S
    while time.monotonic() < deadline:
        for command in channel.poll(1.0):
            channel.send(Event(answered=command.command_id))


if __name__ == "__main__":
    {"learner": learner, "generator": generator, "control": control}[sys.argv[1]](*sys.argv[2:])
