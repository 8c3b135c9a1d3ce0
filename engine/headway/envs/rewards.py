"""Rewards in worker processes: a pool that hands out jobs, enforces deadlines, and never waits for a reward.

A generator submits the completions of a group, goes on decoding, and polls. The user's reward function runs
in a process of its own that is killed when a completion exceeds its deadline and replaced when it is gone;
only the completion that it was at is failed, the others are scored by the next worker.

Whoever polls does so between two decode steps. So that a quick worker does not idle until the next one, it is sent as
many jobs ahead as it will have finished by then; behind a slow one nothing waits while another worker is free.

    with RewardPool(spec, num_workers=2, deadline_s=10.0) as pool:
        pool.submit(job_id, index, completions)
        ...                                        # decode
        for result in pool.poll(): ...
        pool.check()
"""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from headway.envs.loading import EnvSpec, check_spec
from headway.envs.messages import Batch, Ready, Refused, Scored, Setup
from headway.envs.process import WorkerProcess
from headway.envs.protocol import Completion
from headway.envs.verdict import FailureReason, FailureWatch, RewardCounters, RewardResult
from headway.errors import EnvironmentFailure

CRASH_GRACE_S = 0.2
CLOSE_GRACE_S = 0.5
MAX_FAILED_STARTS = 3
KEPT_TIMES = 1024
MOST_GAP_S = 1.0  # between two polls, that jobs are sent ahead for


@dataclass
class _Job:
    """A submitted group: verdicts so far, and the positions still to be scored, in order."""

    job_id: int
    index: int
    completions: list[Completion]
    todo: deque[int]
    rewards: list[float | None]
    errors: list[str]

    @property
    def result(self) -> RewardResult:
        return RewardResult(self.job_id, self.rewards, self.errors)


@dataclass
class _Worker:
    """A process and what it does since `since`: start (not ready), idle (no job), or score jobs[0].todo[0].

    Attributes:
        jobs: that it was sent, in its order; num_out: completions of them without a verdict.
        seconds: that it lately needed for a completion; None: not known yet.
    """

    process: WorkerProcess
    since: float
    ready: bool = False
    jobs: deque[_Job] = field(default_factory=deque["_Job"])
    num_out: int = 0
    seconds: float | None = None

    @property
    def is_idle(self) -> bool:
        return self.ready and not self.jobs

    def may_have_more(self, gap_s: float) -> bool:
        """It will be idle before `gap_s` is over, when it is looked after again, and has read all that it was sent."""
        if not self.ready or self.process.num_unsent:
            return False
        return not self.jobs or (self.seconds is not None and self.num_out * self.seconds < gap_s)

    def answered(self, seconds: float) -> None:
        """A completion took so long; the newest counts half."""
        self.num_out -= 1
        self.seconds = seconds if self.seconds is None else 0.5 * (self.seconds + seconds)


class RewardPool:
    """Scores completions in worker processes.

    Not thread-safe: one thread owns it. Everything but the constructor, `wait` and `close` returns at once (a
    worker that died is given CRASH_GRACE_S to leave its exit status).

    Args:
        spec: the environment; every worker builds its own.
        num_workers: processes, all started here.
        deadline_s: seconds for one completion, measured from the verdict before it.
        max_failure_share, window: see FailureWatch and `check`.
        start_timeout_s: seconds for a worker to start and build the environment.
        clock: monotonic seconds, for deadlines and for how often it is polled.

    Attributes:
        seconds: that the last completions took in their workers, a raised error included.

    Raises:
        EnvironmentFailure: the environment cannot be built (with its error's text), or not in time.
    """

    def __init__(
        self,
        spec: EnvSpec,
        num_workers: int,
        deadline_s: float,
        *,
        max_failure_share: float = 0.5,
        window: int = 200,
        start_timeout_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if num_workers < 1 or deadline_s <= 0:
            raise EnvironmentFailure(
                f"num_workers: got {num_workers}, expected at least 1; deadline_s: got {deadline_s}, "
                f"expected more than 0"
            )
        check_spec(spec)
        self._setup = Setup(spec)
        self._clock = clock
        self.seconds: deque[float] = deque(maxlen=KEPT_TIMES)
        self._polled_s: float | None = None
        self._gap_s = 0.0
        self._deadline_s = deadline_s
        self._start_timeout_s = start_timeout_s
        self._watch = FailureWatch(max_failure_share, window)
        self._selector = selectors.DefaultSelector()
        self._queue: deque[_Job] = deque()
        self._done: list[RewardResult] = []
        # while the pool starts, the first failure is one too many
        self._failed_starts = MAX_FAILED_STARTS - 1
        self._workers: list[_Worker] = []
        try:
            for _ in range(num_workers):
                self._workers.append(self._start_worker())
            while not all(worker.ready for worker in self._workers):
                self._selector.select(self.next_deadline_s())
                self.poll()
        except BaseException:
            self.close()
            raise

    @property
    def counters(self) -> RewardCounters:
        """Counts since the start; the pool goes on updating them."""
        return self._watch.counters

    @property
    def num_pending(self) -> int:
        """Jobs submitted and not answered yet."""
        return self.num_queued + len(self._done) + sum(len(worker.jobs) for worker in self._workers)

    @property
    def num_queued(self) -> int:
        """Jobs that no worker has been sent yet."""
        return len(self._queue)

    def pids(self) -> list[int]:
        """The workers' process ids."""
        return [worker.process.pid for worker in self._workers]

    def fileno(self) -> int:
        """A descriptor that is readable when `poll` has messages to read. It stays the same over restarts."""
        return self._selector.fileno()  # type: ignore[attr-defined, no-any-return]

    def next_deadline_s(self) -> float | None:
        """Seconds until `poll` has a deadline to enforce; None if nothing runs."""
        ends = [self._end_of(worker) for worker in self._workers if not worker.is_idle]
        return max(0.0, min(ends) - self._clock()) if ends else None

    def submit(self, job_id: int, index: int, completions: list[Completion]) -> None:
        """Queues the completions of prompt `index`; `poll` answers with one RewardResult for `job_id`."""
        num = len(completions)
        job = _Job(job_id, index, completions, deque(range(num)), [None] * num, [""] * num)
        if not completions:
            self._done.append(job.result)
            return
        self._queue.append(job)
        for worker in list(self._workers):
            self._service(worker)  # one that died while it was idle must not take the job with it
        self._dispatch()

    def poll(self) -> list[RewardResult]:
        """Takes in verdicts, enforces deadlines, replaces dead workers. Returns the jobs that are done.

        Raises:
            EnvironmentFailure: a worker could not build the environment.
        """
        now = self._clock()
        if self._polled_s is not None:  # jobs were out, or it says nothing of decode steps
            self._gap_s = min(MOST_GAP_S, max(now - self._polled_s, 0.9 * self._gap_s))
        for worker in list(self._workers):
            self._service(worker)
        self._dispatch()
        self._polled_s = now if any(worker.jobs for worker in self._workers) else None
        done, self._done = self._done, []
        return done

    def wait(self, timeout_s: float) -> list[RewardResult]:
        """`poll` until it returns something, nothing is pending, or timeout_s is over.

        Waits for: a verdict that completes a job.
        """
        give_up = time.monotonic() + timeout_s
        while not (results := self.poll()) and self.num_pending:
            left = give_up - time.monotonic()
            if left <= 0:
                break
            deadline = self.next_deadline_s()
            self._selector.select(left if deadline is None else min(left, deadline + 0.001))
        return results

    def check(self) -> None:
        """Raises EnvironmentFailure when more than max_failure_share of the last completions failed."""
        self._watch.check()

    def close(self) -> None:
        """Ends all workers, busy ones too, within a second; what is pending gets no answer. Idempotent."""
        workers, self._workers = self._workers, []
        for worker in workers:
            self._selector.unregister(worker.process)
            worker.process.hang_up()
        give_up = time.monotonic() + CLOSE_GRACE_S
        for worker in workers:
            worker.process.stop(max(0.0, give_up - time.monotonic()) if worker.is_idle else 0.0)
        self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_worker(self) -> _Worker:
        worker = _Worker(WorkerProcess(self._setup), self._clock())
        self._selector.register(worker.process, selectors.EVENT_READ)
        return worker

    def _end_of(self, worker: _Worker) -> float:
        """When what the worker is at must be over."""
        return worker.since + (self._deadline_s if worker.ready else self._start_timeout_s)

    def _dispatch(self) -> None:
        """Gives queued jobs to workers, the one with the fewest first."""
        while self._queue:
            free = [worker for worker in self._workers if worker.may_have_more(self._gap_s)]
            if not free:
                return
            worker = min(free, key=lambda worker: len(worker.jobs))
            job = self._queue.popleft()
            if not worker.jobs:
                worker.since = self._clock()
            worker.jobs.append(job)
            worker.num_out += len(job.todo)
            worker.process.send(Batch(job.index, [job.completions[position] for position in job.todo]))
            self._select_writes(worker)

    def _service(self, worker: _Worker) -> None:
        """Reads what a worker says, and replaces it if it is dead or late."""
        messages, has_ended = worker.process.receive()
        for message in messages:
            match message:
                case Ready():
                    worker.ready = True
                    self._failed_starts = 0
                case Refused(error):
                    raise EnvironmentFailure(error)
                case Scored():
                    self._take(worker, message)
        if has_ended:
            self._replace(worker, FailureReason.CRASH)
            return
        if worker.process.num_unsent:
            worker.process.flush()
            self._select_writes(worker)
            if len(worker.jobs) < 2:
                worker.since = self._clock()  # it cannot have begun
        if not worker.is_idle and self._clock() > self._end_of(worker):
            self._replace(worker, FailureReason.TIMEOUT)

    def _select_writes(self, worker: _Worker) -> None:
        """Wakes the owner for writing only while something is left to send."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.process.num_unsent else 0)
        self._selector.modify(worker.process, events)

    def _take(self, worker: _Worker, verdict: Scored) -> None:
        """Books the verdict on the completion that the worker was at."""
        assert worker.jobs, "a verdict without a job"
        job = worker.jobs[0]
        worker.answered(verdict.seconds)
        self.seconds.append(verdict.seconds)
        worker.since = self._clock()
        if verdict.reward is None:
            self._fail(job, FailureReason(verdict.error.partition(":")[0]), verdict.error)
        else:
            job.rewards[job.todo.popleft()] = verdict.reward
            self._watch.scored(verdict.reward)
        if not job.todo:
            self._done.append(worker.jobs.popleft().result)

    def _fail(self, job: _Job, reason: FailureReason, error: str) -> None:
        job.errors[job.todo.popleft()] = error
        self._watch.failed(reason, error)

    def _replace(self, worker: _Worker, reason: FailureReason) -> None:
        """Ends a worker, fails the completion that it was at, requeues all others, starts another."""
        self._selector.unregister(worker.process)
        ended_by = worker.process.stop(CRASH_GRACE_S if reason is FailureReason.CRASH else 0.0)
        self._workers.remove(worker)
        if not worker.ready:
            self._count_failed_start(reason, ended_by)
        if worker.jobs:
            job = worker.jobs.popleft()
            late = reason is FailureReason.TIMEOUT
            detail = f"no reward after {self._deadline_s} s; killed" if late else ended_by
            self._fail(job, reason, f"{reason}: {detail}")
            self._queue.extendleft(reversed(worker.jobs))
            if job.todo:
                self._queue.appendleft(job)
            else:
                self._done.append(job.result)
        self._watch.counters.restarts += 1
        self._workers.append(self._start_worker())

    def _count_failed_start(self, reason: FailureReason, ended_by: str) -> None:
        """Raises when starting again is pointless."""
        self._failed_starts += 1
        if self._failed_starts < MAX_FAILED_STARTS:
            return
        late = reason is FailureReason.TIMEOUT
        what = f"took over {self._start_timeout_s} s" if late else f"ended ({ended_by})"
        raise EnvironmentFailure(
            f"a reward worker {what} while it built the environment {self._setup.spec.name!r}; "
            f"its output is on standard error"
        )
