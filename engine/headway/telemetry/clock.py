"""Where a process's wall time goes: work, push, idle, and everything else as `other`.

One state at a time, on one clock, in whole nanoseconds, so the parts sum to the elapsed time exactly. The
owner thread moves between states; any thread may read.

    clock = SplitClock()
    with clock("work"):        # a nested state interrupts the outer one and gives the time back to it at its
    end
        ...
    record.learner = clock.lap()
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from headway.telemetry.spans import SpanLog, State
from headway.types import TimeSplit


class SplitClock:
    """Splits the time since its construction by state; starts in `other`."""

    def __init__(
        self, now_ns: Callable[[], int] = time.monotonic_ns, spans: Callable[[int], SpanLog] | None = None
    ) -> None:
        """
        Args:
            now_ns: a monotonic clock in nanoseconds; tests give their own.
            spans: opens what is told every state with its time, given the time of the construction.
        """
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._spent: dict[State, int] = {"work": 0, "push": 0, "idle": 0, "other": 0}
        self._lap = dict(self._spent)
        self._state: State = "other"
        self._since = self._entered = now_ns()
        self._spans = spans(self._since) if spans is not None else None

    @contextmanager
    def __call__(self, state: State) -> Generator[None]:
        """Spends the time of the block in `state`, then returns to the state before it."""
        before = self._enter(state)
        try:
            yield
        finally:
            self._enter(before)

    def split(self) -> TimeSplit:
        """The split since construction, the running state included."""
        with self._lock:
            return _as_split(self._settled())

    def lap(self) -> TimeSplit:
        """The split since the last lap (or construction); the next lap begins where this one ends."""
        with self._lock:
            spent = self._settled()
            passed: dict[State, int] = {state: spent[state] - self._lap[state] for state in spent}
            self._lap = dict(spent)
            return _as_split(passed)

    def sampled_by(self, count: Callable[[], int]) -> None:
        """Sampled tokens are counted by `count` from now on, for the spans."""
        if self._spans is not None:
            self._spans.sampled = count

    def close(self) -> None:
        """Hands the running state to the spans and closes them; called by the owner thread, last."""
        self._enter("other")
        if self._spans is not None:
            self._spans.close()

    def _enter(self, state: State) -> State:
        with self._lock:
            self._settled()
            before, self._state = self._state, state
            began, self._entered = self._entered, self._since
        if self._spans is not None:
            self._spans.add(before, began, self._entered)
        return before

    def _settled(self) -> dict[State, int]:
        """Books the time since the last change. Only with the lock held."""
        now = self._now_ns()
        self._spent[self._state] += now - self._since
        self._since = now
        return self._spent


def _as_split(spent: dict[State, int]) -> TimeSplit:
    return TimeSplit(**{state: nanoseconds / 1e9 for state, nanoseconds in spent.items()})
