"""One learner, several receivers over tcp: what the learner sends, and when the first and the last have it."""

from __future__ import annotations

import contextlib
import time

from headway.errors import RunFailed
from headway.weights.tcp import TcpSender
from headway_bench.push_process import MemberProcess
from headway_bench.push_wire import DEADLINE_S, Source, whole_publication


class FanOut:
    """Receivers in processes of their own, joined to one tcp sender.

    Args:
        num_receivers: processes; source: what is sent.
    """

    def __init__(self, num_receivers: int, source: Source) -> None:
        self.num_receivers = num_receivers
        self._source = source
        self._stack = contextlib.ExitStack()
        try:
            self._sender = TcpSender("bench", "bench")
            self._stack.callback(self._sender.close)
            size = source.memory.nbytes
            self._members = [
                MemberProcess("channel", channel="tcp", address=self._sender.address, num_bytes=size)
                for _ in range(num_receivers)
            ]
            for member in self._members:
                self._stack.callback(member.close)
            for member in self._members:
                member.answer()
        except BaseException:
            self._stack.close()
            raise

    def run(self) -> dict[str, float]:
        """One push: seconds to the "first" and the "last" receiver, and bytes "sent" by the learner per payload byte.

        Raises:
            RunFailed: what arrived is not what was sent.
        """
        value = self._source.fill()
        for member in self._members:
            member.send(probe=self._source.memory.nbytes - 1)
        for member in self._members:
            member.answer()
        before = self._sender.bytes_sent
        started = time.monotonic()
        self._sender.publish(whole_publication(self._source), DEADLINE_S)
        answers = [member.answer(DEADLINE_S) for member in self._members]
        if any(answer["byte"] != value for answer in answers):
            raise RunFailed(f"receivers have {[answer['byte'] for answer in answers]}, sent was {value}")
        times = sorted(answer["done_at"] - started for answer in answers)
        sent = (self._sender.bytes_sent - before) / self._source.memory.nbytes
        return {"first": times[0], "last": times[-1], "sent": sent}

    def close(self) -> None:
        """End all."""
        self._stack.close()
