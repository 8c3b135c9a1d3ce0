"""The process under fire: everything of a learner and its supervisor that listens, and honest work meanwhile.

    python -m headway_bench.fuzz.target FOLDER RUN_ID

Prints its endpoints, then answers each line of input with its counts, both as a line of JSON; ends at end of input.
"""

from __future__ import annotations

import json
import select
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from headway.stream import RequestServer, SupervisorControl
from headway.weights.tcp import TcpSender
from headway.weights.tcp_link import TcpAddress
from headway_bench.stream.plane import Plane, recipe, running

GENERATORS = 4


class Target:
    """What listens, and its counts.

    Attributes:
        accepted: by socket, messages that were no rejects.
    """

    def __init__(self, plane: Plane, run_id: str) -> None:
        self.accepted: Counter[str] = Counter()
        self._plane = plane
        self._control = SupervisorControl()
        self._requests = RequestServer(run_id)
        self._weights = TcpSender(run_id, "the manifest")

    def endpoints(self) -> dict[str, str]:
        """By socket."""
        return {
            "data": self._plane.intake.endpoints.data,
            "heartbeat": self._plane.intake.endpoints.heartbeat,
            "control": self._control.endpoint,
            "requests": self._requests.endpoint,
            "weights": TcpAddress.parse(self._weights.address).endpoint,
        }

    def turn(self) -> None:
        """Read what came to the sockets that belong to this thread."""
        self.accepted["control"] += len(self._control.poll(0.005))
        for who, command in self._requests.poll():
            self.accepted["requests"] += 1
            self._requests.answer(who, command.command_id, "no")

    def counts(self) -> dict[str, Any]:
        """Rejects by socket and reason, what was accepted, honest work done, and memory."""
        return {
            "rejected": {
                "stream": self._plane.intake.rejected,
                "control": self._control.rejected,
                "requests": self._requests.rejected,
                "weights": dict(self._weights.rejected),
            },
            "accepted": self.accepted,
            "trained": self._plane.num_trained,
            "peers": self._plane.num_peers,
            "rss": psutil.Process().memory_info().rss,
            "descriptors": psutil.Process().num_fds(),
        }

    def close(self) -> None:
        """End everything."""
        self._weights.close()
        self._requests.close()
        self._control.close()


def main(words: list[str]) -> None:
    """Listen until the input ends."""
    folder, run_id = words
    with running(recipe(GENERATORS, 32, 8, 2), Path(folder)) as plane:
        target = Target(plane, run_id)
        print(json.dumps(target.endpoints()), flush=True)
        while True:
            target.turn()
            if select.select([sys.stdin], [], [], 0.0)[0]:
                if not sys.stdin.readline():
                    break
                print(json.dumps(target.counts()), flush=True)
        target.close()


if __name__ == "__main__":
    main(sys.argv[1:])
