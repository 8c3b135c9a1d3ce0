"""Rewards in real processes: faults cost one completion, time is bounded, nothing is left behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from headway.envs import Completion, EnvSpec, FailureReason, RewardPool, RewardResult
from headway.errors import EnvironmentFailure

DEADLINE_S = 0.4
PATIENCE_S = 30.0

FAULTY = """
import ctypes, os, signal, sys, time
import numpy as np

class Faulty:
    num_prompts = None

    def prompt(self, index):
        return str(index)

    def reward(self, index, completion):
        name, _, argument = completion.text.partition(":")
        if argument:
            return getattr(self, name)(argument)
        return getattr(self, name, lambda: float(completion.text))()

    def sleeps(self): time.sleep(1000)
    def spins(self):
        while True: pass
    def spins_in_c(self):
        ctypes.PyDLL(None).sleep(1000)   # holds the interpreter lock
    def ignores_signals(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True: pass
    def raises(self): raise ValueError("no such answer")
    def exits(self): sys.exit(3)
    def os_exits(self): os._exit(7)
    def crashes(self): ctypes.string_at(0)
    def alarm_kills(self):
        signal.alarm(1); signal.setitimer(signal.ITIMER_REAL, 0.05); time.sleep(1000)
    def alarm_raises(self):
        def stop(number, stack): raise TimeoutError("my own alarm")
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.05); time.sleep(1000)
    def leaves_an_alarm(self):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        return 2.0
    def counts(self, path):
        with open(path, "ab") as file: file.write(b".")
        return 1.0
    def naps(self): time.sleep(0.2); return 3.0
    def pid(self): return os.getpid()
    def prints(self):
        print("hello " * 1000, flush=True); os.write(1, b"raw bytes"); return 4.0
    def starts_a_child(self): import subprocess; return subprocess.Popen(["sleep", "1000"]).pid
    def an_int(self): return 1
    def a_bool(self): return True
    def a_numpy_scalar(self): return np.float32(0.5)
    def a_numpy_0d(self): return np.array(0.25)
    def a_tensor_0d(self): import torch; return torch.tensor(0.125)
    def a_nan(self): return float("nan")
    def an_infinity(self): return float("-inf")
    def a_none(self): return None
    def a_string(self): return "1.0"
    def an_array(self): return np.array([1.0])
    def a_huge_int(self): return 10 ** 400
    def a_complex(self): return 1j
"""


def completions(*texts: str) -> list[Completion]:
    return [Completion(text, [1, 2], "stop") for text in texts]


def collect(pool: RewardPool, num_jobs: int) -> dict[int, RewardResult]:
    """All results, or a failed test at PATIENCE_S."""
    give_up = time.monotonic() + PATIENCE_S
    found: dict[int, RewardResult] = {}
    while len(found) < num_jobs:
        assert time.monotonic() < give_up, f"only {sorted(found)} of {num_jobs} jobs were answered"
        found |= {result.job_id: result for result in pool.wait(1.0)}
    return found


def until(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EnvSpec:
    file = tmp_path_factory.mktemp("envs") / "faulty.py"
    file.write_text(FAULTY)
    return EnvSpec(str(file))


@pytest.fixture
def pool(spec: EnvSpec) -> Iterator[RewardPool]:
    with RewardPool(spec, 1, DEADLINE_S) as pool:
        yield pool


@pytest.mark.parametrize(
    ("fault", "error", "num_restarts"),
    [
        ("sleeps", "timeout: no reward after 0.4 s", 1),
        ("spins", "timeout", 1),
        ("spins_in_c", "timeout", 1),
        ("ignores_signals", "timeout", 1),
        ("raises", "raised: ValueError: no such answer", 0),
        ("exits", "raised: SystemExit: 3", 0),
        ("os_exits", "crash: exit status 7", 1),
        ("crashes", "crash: killed by SIGSEGV", 1),
        ("alarm_kills", "crash: killed by SIGALRM", 1),
        ("alarm_raises", "raised: TimeoutError: my own alarm", 0),
    ],
)
def test_a_faulty_reward_fails_alone_in_bounded_time(
    pool: RewardPool, fault: str, error: str, num_restarts: int
) -> None:
    pool.submit(5, 0, completions("0.5", fault, "1.5", "2.5"))
    result = collect(pool, 1)[5]
    assert result.rewards == [0.5, None, 1.5, 2.5]
    assert result.errors[1].startswith(error)
    assert [result.errors[i] for i in (0, 2, 3)] == ["", "", ""]
    assert pool.counters.restarts == num_restarts
    assert pool.counters.scored == 3
    reason = FailureReason(error.split(":")[0])
    assert pool.counters.failed == {r: int(r is reason) for r in FailureReason}


def test_every_completion_of_a_job_may_hang(pool: RewardPool) -> None:
    started = time.monotonic()
    pool.submit(1, 0, completions("sleeps", "spins", "os_exits"))
    result = collect(pool, 1)[1]
    assert result.rewards == [None, None, None]
    assert [error.split(":")[0] for error in result.errors] == ["timeout", "timeout", "crash"]
    assert time.monotonic() - started < 2 * DEADLINE_S + 10


def test_the_deadline_is_per_completion(pool: RewardPool) -> None:
    pool.submit(1, 0, completions(*["naps"] * 4))
    assert collect(pool, 1)[1].rewards == [3.0] * 4  # 0.8 s in all, twice the deadline


def test_an_alarm_that_is_left_over_does_not_hit_a_sibling(pool: RewardPool) -> None:
    pool.submit(1, 0, completions("leaves_an_alarm", "naps"))
    assert collect(pool, 1)[1].rewards == [2.0, 3.0]


def test_printing_does_not_corrupt_the_answers(pool: RewardPool) -> None:
    pool.submit(1, 0, completions("prints", "0.25"))
    assert collect(pool, 1)[1].rewards == [4.0, 0.25]


def test_reward_types(spec: EnvSpec) -> None:
    good = {"an_int": 1.0, "a_bool": 1.0, "a_numpy_scalar": 0.5, "a_numpy_0d": 0.25, "a_tensor_0d": 0.125}
    bad = ["a_nan", "an_infinity", "a_none", "a_string", "an_array", "a_huge_int", "a_complex"]
    with RewardPool(spec, 1, PATIENCE_S) as pool:
        pool.submit(1, 0, completions(*good, *bad))
        result = collect(pool, 1)[1]
        assert result.rewards == [*good.values(), *[None] * len(bad)]
        assert all(
            error.startswith("bad value: Faulty.reward returned") for error in result.errors[len(good) :]
        )
        assert "'1.0' (str); expected a finite number" in result.errors[len(good) + bad.index("a_string")]
        assert pool.counters.failed[FailureReason.BAD_VALUE] == len(bad)


def test_a_worker_killed_in_mid_job_costs_one_completion(spec: EnvSpec) -> None:
    with RewardPool(spec, 1, PATIENCE_S) as pool:
        pool.submit(1, 0, completions("0.5", "sleeps", "1.5"))
        until(lambda: not pool.poll() and pool.counters.scored == 1, "the first reward")
        os.kill(pool.pids()[0], signal.SIGKILL)
        result = collect(pool, 1)[1]
        assert result.rewards == [0.5, None, 1.5]
        assert result.errors[1] == "crash: killed by SIGKILL"


def test_a_stopped_worker_is_noticed(spec: EnvSpec) -> None:
    with RewardPool(spec, 1, DEADLINE_S) as pool:
        os.kill(pool.pids()[0], signal.SIGSTOP)
        pool.submit(1, 0, completions("0.5"))
        assert collect(pool, 1)[1].errors[0].startswith("timeout")


def test_a_worker_that_died_idle_takes_no_job_with_it(pool: RewardPool) -> None:
    process = psutil.Process(pool.pids()[0])
    process.kill()
    until(lambda: process.status() == psutil.STATUS_ZOMBIE, "the worker to die")
    pool.submit(1, 0, completions("0.5"))
    assert collect(pool, 1)[1].rewards == [0.5]
    assert pool.counters.restarts == 1


def test_many_jobs_over_two_workers_with_faults_between(spec: EnvSpec) -> None:
    with RewardPool(spec, 2, PATIENCE_S) as pool:
        for job in range(60):
            texts = [
                str(job),
                "os_exits" if job % 20 == 7 else "raises" if job % 10 == 3 else "0.5",
                str(-job),
            ]
            pool.submit(job, job, completions(*texts))
        assert pool.num_pending == 60
        results = collect(pool, 60)
        assert pool.num_pending == 0
        for job, result in results.items():
            middle = None if job % 20 == 7 or job % 10 == 3 else 0.5
            assert result.rewards == [job, middle, -job]
        assert pool.counters.scored + sum(pool.counters.failed.values()) == 180


def test_few_polls_are_enough_for_many_quick_jobs(spec: EnvSpec, tmp_path: Path) -> None:
    """A generator polls once a decode step: a job a poll would be a few dozen a second, however quick rewards are."""
    counted = tmp_path / "counted"
    counted.touch()
    num_jobs, now, results = 64, 0.0, list[RewardResult]()
    with RewardPool(spec, 1, PATIENCE_S, clock=lambda: now) as pool:
        for job in range(num_jobs):
            pool.submit(job, 0, completions(f"counts:{counted}"))
        give_up = time.monotonic() + PATIENCE_S
        while len(results) < num_jobs:
            while (
                counted.stat().st_size < num_jobs - pool.num_queued
            ):  # it is at the last of what it was sent
                assert time.monotonic() < give_up
            assert select.select([pool.fileno()], [], [], PATIENCE_S)[0]  # and has answered at least one
            now += 0.5  # far more than a dozen quick ones take
            results += pool.poll()
    assert [result.job_id for result in results] == list(range(num_jobs))
    assert now <= 16 * 0.5


def test_nothing_waits_behind_a_slow_completion(spec: EnvSpec) -> None:
    now, num_polls, results = 0.0, 0, list[RewardResult]()
    with RewardPool(spec, 2, PATIENCE_S, clock=lambda: now) as pool:
        for job in range(8):
            pool.submit(job, 0, completions("naps"))  # for 0.2 s
        while len(results) < 8:
            assert select.select([pool.fileno()], [], [], PATIENCE_S)[0]
            now, num_polls = now + 0.04, num_polls + 1
            results += pool.poll()
            assert pool.num_pending - pool.num_queued <= 2  # one for each worker
    assert num_polls >= 4


def test_jobs_behind_a_hanging_one_are_scored_by_the_next_worker(spec: EnvSpec) -> None:
    results: dict[int, RewardResult] = {}
    with RewardPool(spec, 1, deadline_s=DEADLINE_S) as pool:
        for job in range(40):
            pool.submit(job, 0, completions("sleeps" if job == 30 else str(job), "1"))
        give_up = time.monotonic() + PATIENCE_S
        while len(results) < 40:
            assert time.monotonic() < give_up
            results |= {result.job_id: result for result in pool.wait(1.0)}
    assert [results[job].rewards for job in range(40)] == [
        [None if job == 30 else float(job), 1.0] for job in range(40)
    ]
    assert pool.counters.restarts == 1


def test_a_job_larger_than_the_socket_buffer(pool: RewardPool) -> None:
    large = [Completion("0.5", list(range(100_000, 200_000)), "length") for _ in range(16)]  # 8 MB
    pool.submit(1, 0, large)
    assert collect(pool, 1)[1].rewards == [0.5] * 16


def test_an_empty_job_is_answered(pool: RewardPool) -> None:
    pool.submit(9, 0, [])
    assert pool.poll() == [RewardResult(9, [], [])]


def test_the_descriptor_wakes_a_poller_and_survives_restarts(pool: RewardPool) -> None:
    poller = select.poll()
    poller.register(pool.fileno(), select.POLLIN)
    pool.submit(1, 0, completions("os_exits", "0.5"))
    results: list[RewardResult] = []
    give_up = time.monotonic() + PATIENCE_S
    while not results:
        assert time.monotonic() < give_up
        assert poller.poll(1000 * PATIENCE_S), "nothing woke the poller"
        results = pool.poll()
    assert results[0].rewards == [None, 0.5]


def test_next_deadline(pool: RewardPool) -> None:
    assert pool.next_deadline_s() is None
    pool.submit(1, 0, completions("sleeps"))
    left = pool.next_deadline_s()
    assert left is not None
    assert 0 <= left <= DEADLINE_S


def test_check_stops_when_most_rewards_fail_and_shows_the_first_error(pool: RewardPool) -> None:
    pool.submit(1, 0, completions(*["raises"] * 49))
    collect(pool, 1)
    pool.check()  # fewer than 50: too early to judge
    pool.submit(2, 0, completions("raises"))
    collect(pool, 1)
    with pytest.raises(
        EnvironmentFailure, match=r"50 of the last 50 .*50 raised.*ValueError: no such answer"
    ):
        pool.check()


def test_check_allows_a_few_failures(pool: RewardPool) -> None:
    pool.submit(1, 0, completions(*["raises", "0", "0", "1"] * 25))
    collect(pool, 1)
    pool.check()
    assert pool.counters.zero_streak == 0
    pool.submit(2, 0, completions(*["0"] * 5))
    collect(pool, 1)
    assert pool.counters.zero_streak == 5


def test_an_environment_that_cannot_be_built_is_the_callers_error(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(
        FAULTY.replace("num_prompts = None", "def __init__(self): raise KeyError('no data here')")
    )
    with pytest.raises(EnvironmentFailure, match="no data here"):
        RewardPool(EnvSpec(str(file)), 2, 1.0)


def test_an_environment_that_kills_its_worker_is_the_callers_error(tmp_path: Path) -> None:
    file = tmp_path / "deadly.py"
    file.write_text("import os\nos._exit(9)\n")
    with pytest.raises(EnvironmentFailure, match="exit status 9"):
        RewardPool(EnvSpec(str(file)), 1, 1.0)


def test_an_environment_that_never_gets_built_is_the_callers_error(tmp_path: Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text("import time\ntime.sleep(1000)\n")
    with pytest.raises(EnvironmentFailure, match=r"took over 0\.5 s"):
        RewardPool(EnvSpec(str(file)), 1, 1.0, start_timeout_s=0.5)


@pytest.mark.parametrize("texts", [[], ["sleeps"], ["ignores_signals"], ["spins_in_c"]])
def test_the_pool_closes_within_two_seconds_and_leaves_no_process(spec: EnvSpec, texts: list[str]) -> None:
    pool = RewardPool(spec, 2, PATIENCE_S)
    pids = pool.pids()
    if texts:
        pool.submit(1, 0, completions("0.5", *texts))
        until(lambda: not pool.poll() and pool.counters.scored == 1, "the first reward")
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 2.0
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    pool.close()


def test_what_the_environment_started_dies_with_the_worker(spec: EnvSpec) -> None:
    with RewardPool(spec, 1, PATIENCE_S) as pool:
        pool.submit(1, 0, completions("starts_a_child"))
        reward = collect(pool, 1)[1].rewards[0]
        assert reward is not None
        child = psutil.Process(int(reward))
        assert child.is_running()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the child's death")


@pytest.mark.parametrize("text", ["", "spins", "spins_in_c"])
def test_workers_die_with_a_killed_parent(spec: EnvSpec, text: str) -> None:
    script = textwrap.dedent(f"""
        import time
        from headway.envs import Completion, EnvSpec, RewardPool
        pool = RewardPool(EnvSpec({spec.name!r}), 2, 1000.0)
        texts = ["0.5", {text!r}] if {text!r} else ["0.5"]
        pool.submit(1, 0, [Completion(t, [], "stop") for t in texts])
        while pool.counters.scored == 0: pool.wait(0.01)
        print(*pool.pids(), flush=True)
        while True: time.sleep(1)
    """)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as parent:
        assert parent.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        parent.kill()
    until(lambda: not any(alive(worker) for worker in workers), "the workers' death")


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_worker_imports_neither_torch_nor_transformers() -> None:
    heavy = "{'torch', 'transformers', 'reasoning_gym', 'matplotlib'}"
    code = f"import sys, headway.envs.worker; print({heavy} & set(sys.modules))"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert out.stdout.strip() == "set()", out.stderr
