"""Trajectories messages into the buffer: each once, each checked against its ticket."""

from __future__ import annotations

from collections import Counter

from headway.buffer import Arrival, Buffer
from headway.learner.failures import FailureWatch
from headway.learner.judge import GroupJudge
from headway.learner.receipts import Receipts
from headway.types import DropReason, Trajectory
from headway.wire.check import validate_trajectory
from headway.wire.messages import Trajectories


class Arrivals:
    """What generators send, on its way into the buffer.

    Attributes:
        receipts: messages received so far.
        invalid: trajectories refused because they cannot be trained, by reason; "seq": whole messages.
        num_sampled: sampled tokens received.
    """

    def __init__(self, buffer: Buffer, judge: GroupJudge, failures: FailureWatch) -> None:
        self.receipts = Receipts()
        self.invalid: Counter[str] = Counter()
        self.num_sampled = 0
        self._buffer = buffer
        self._judge = judge
        self._failures = failures

    def is_new(self, message: Trajectories) -> bool:
        """Note a message of a live generator; False when there is nothing in it to take.

        It was received before (the ack was lost), or its seq is none that an orderly peer can have come to.
        """
        if not self.receipts.accepts(message.seq, message.incarnation):
            self.invalid["seq"] += 1
            self._failures.note(f"message {message.seq} of {message.incarnation} is out of all order")
            return False
        return self.receipts.is_new(message.seq, message.incarnation)

    def take(self, message: Trajectories) -> list[int]:
        """Take the members of a new message in; returns the tickets whose groups are complete or ended by it.

        Raises:
            TrainingStopped: too much of what arrives cannot be trained.
        """
        done: list[int] = []
        for trajectory in message.trajectories:
            self.num_sampled += trajectory.num_sampled
            self._arrived(trajectory.ticket_id, self._add(trajectory, message.incarnation), done)
        for failure in message.failures:
            self._failures.note(f"{failure.reason}: {failure.detail}")
            self._arrived(failure.ticket_id, self._buffer.fail(failure, message.incarnation), done)
        return done

    def _add(self, trajectory: Trajectory, incarnation: str) -> Arrival:
        ticket = self._buffer.ticket(trajectory.ticket_id)
        fault = validate_trajectory(trajectory, ticket) if ticket is not None else None
        if fault is None and trajectory.trajectory_id != _id_of(trajectory, incarnation):
            fault = "trajectory_id"
        if fault is not None:
            self.invalid[fault] += 1
            detail = f"trajectory {trajectory.trajectory_id} at version {trajectory.oldest}: {fault}"
            self._failures.judged(detail)
            return self._buffer.reject(trajectory, incarnation, detail)
        self._failures.judged("")
        self._failures.watch_zeros(trajectory)
        return self._buffer.add(trajectory, incarnation)

    def _arrived(self, ticket_id: int, arrival: Arrival, done: list[int]) -> None:
        finished, ended = arrival.finished, arrival.ended
        if finished is not None and self._judge.too_long(finished):
            self._buffer.drop(ticket_id, ended := DropReason.ROW_TOO_SHORT)
            self._failures.note(self._judge.too_long_message(finished))
        if finished is not None or ended is not None:
            done.append(ticket_id)
        if ended is not None:
            self._failures.ended(ended)
        elif finished is not None:
            self._failures.finished()

    def refuse(self, name: str, message: Trajectories) -> None:
        """Count what a stranger sent, under its address: the name it gives may be that of a live generator."""
        for trajectory in message.trajectories:
            self._buffer.add(trajectory, name)
        for failure in message.failures:
            self._buffer.fail(failure, name)


def _id_of(trajectory: Trajectory, incarnation: str) -> str:
    return f"{incarnation}.{trajectory.ticket_id}.{trajectory.member}"
