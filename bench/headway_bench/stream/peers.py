"""Processes on the other side of the plane; they print JSON lines.

python -m headway_bench.stream.peers flood ENDPOINTS TOKENS
python -m headway_bench.stream.peers crowd ENDPOINTS TOKENS NUM THINK_S SECONDS
python -m headway_bench.stream.peers push ENDPOINT TOKENS
"""

from __future__ import annotations

import sys

import zmq

from headway.stream import Endpoints, GeneratorSocket, HeartbeatThread
from headway.wire.messages import Grant, Stop
from headway_bench.stream.content import Content, answer, heartbeat, hello, payload, weight_ack
from headway_bench.stream.crowd import crowd


def flood(endpoints: Endpoints, tokens: int) -> None:
    """One generator that answers every ticket at once, one message a member, until it is told to stop."""
    content, name = Content(tokens), "g0-flood"
    seq = 0
    with GeneratorSocket.connect(endpoints, lambda: hello(name, 0), give_up_s=30.0) as stream:
        stream.send(weight_ack(name))
        beats: HeartbeatThread | None = None
        stopped = False
        while not stopped:
            for message in stream.receive(0.2):
                beats = beats or HeartbeatThread(endpoints.heartbeat, lambda: heartbeat(name, 1), 1.0)
                stopped |= isinstance(message, Stop)
                if not isinstance(message, Grant):
                    continue
                for ticket in message.tickets:
                    for member in range(ticket.num_members):
                        seq += 1
                        stream.send(answer(content, ticket, member, name, seq))
        if beats is not None:
            beats.stop()


def push(endpoint: str, tokens: int) -> None:
    """Plain PUSH of the same frames, encoded once, for as long as the process lives."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(endpoint)
    frames = payload(tokens)
    while True:
        socket.send_multipart(frames)


def main(words: list[str]) -> None:
    """Run one kind of peer."""
    kind, where, tokens, *rest = words
    if kind == "push":
        push(where, int(tokens))
    elif kind == "flood":
        flood(Endpoints.parse(where), int(tokens))
    else:
        num, think_s, seconds = rest
        crowd(Endpoints.parse(where), int(tokens), int(num), float(think_s), float(seconds))


if __name__ == "__main__":
    main(sys.argv[1:])
