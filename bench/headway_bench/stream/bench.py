"""`headway bench stream`: trajectories a second with journal and acks on, and the ticket latency of a crowd.

    plane          encode, ZeroMQ, decode, checks, ledger, journal with fsync, ack, next ticket; two real processes
    push/pull      the same frames, encoded once, through plain PUSH and PULL as multipart
    append         the same frames written and fsynced one message at a time
    append, group  the same, one fsync for as many messages as the plane had in one

Contestants take turns; ratios are formed within a round. Then a crowd of simulated generators on one learner: the
time from sending the end of a ticket to reading the Grant of the next, with everything durable in between.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
from rich.console import Console

from headway.errors import DeadlineExceeded, RunFailed
from headway_bench.harness import Row, interleave, make_row, results_folder, rows_table, write_rows
from headway_bench.stream.content import payload
from headway_bench.stream.floors import append, pull
from headway_bench.stream.plane import Plane, TimedDisk, recipe, running

MIN_SHARE = 0.60
MAX_P99_S = 0.050
START_S = 60.0
PROMPTS, SAMPLES = 32, 8
MEMORY = Path("/dev/shm")
CASES = ("plane", "push/pull", "append", "append, group")


@dataclass(frozen=True)
class Options:
    """The command line.

    Attributes:
        rounds, seconds: of the throughput part, and of each turn in it; tokens: of a trajectory; slots: tickets.
        crowd: simulated generators, 0: none; think_s, crowd_s: per ticket, and how long they are measured.
    """

    rounds: int
    seconds: float
    tokens: int
    slots: int
    crowd: int
    think_s: float
    crowd_s: float
    results: Path


def parse_options(arguments: Sequence[str]) -> Options:
    """Read the command line; argparse ends the process with status 2 on a fault."""
    parser = argparse.ArgumentParser(
        prog="headway bench stream", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant; 0: only the crowd")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--tokens", type=int, default=2660, help="of a trajectory, 9 bytes each: 24 KB")
    parser.add_argument("--slots", type=int, default=64, help=f"tickets of {SAMPLES} trajectories each")
    parser.add_argument("--crowd", type=int, default=1000, help="simulated generators; 0: none")
    parser.add_argument("--think", type=float, default=5.0, help="seconds that they work on a ticket")
    parser.add_argument("--crowd-seconds", type=float, default=15.0, help="how long they are measured")
    parser.add_argument(
        "--results", type=Path, default=Path("runs/bench"), help="folder for results, on the disk to measure"
    )
    given = parser.parse_args(arguments)
    if (
        given.rounds < 0
        or given.crowd < 0
        or given.slots < PROMPTS
        or min(given.seconds, given.crowd_seconds) <= 0
    ):
        parser.error(f"--rounds and --crowd are at least 0, --slots at least {PROMPTS}, seconds above 0")
    return Options(
        given.rounds, given.seconds, given.tokens, given.slots, given.crowd, given.think,
        given.crowd_seconds, given.results,
    )  # fmt: skip


@contextlib.contextmanager
def peer(*words: object) -> Generator[subprocess.Popen[bytes]]:
    """A process of headway_bench.stream.peers; killed at the end if it is still there."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headway_bench.stream.peers", *map(str, words)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def wait_for(plane: Plane, num: int, process: subprocess.Popen[bytes]) -> None:
    """Until the plane has received so many.

    Raises:
        RunFailed: the process ended first. DeadlineExceeded: not in START_S.
    """
    deadline = time.monotonic() + START_S
    while plane.num_received < num:
        if process.poll() is not None:
            raise RunFailed(f"the sending process ended with {process.returncode}")
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{plane.num_received} of {num} trajectories after {START_S:g} s")
        time.sleep(0.01)


def plane_turn(options: Options, folder: Path) -> tuple[float, float]:
    """Messages a second, and messages per fsync."""
    with (
        running(recipe(1, options.slots, PROMPTS, SAMPLES), folder) as plane,
        peer("flood", plane.intake.endpoints, options.tokens) as process,
    ):
        wait_for(plane, 4 * options.slots * SAMPLES, process)
        began, received, commits = time.monotonic(), plane.num_received, plane.num_commits
        time.sleep(options.seconds)
        num = plane.num_received - received
        return num / (time.monotonic() - began), num / max(1, plane.num_commits - commits)


def pull_turn(options: Options) -> float:
    """Messages a second."""
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.linger = 0
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        with peer("push", f"tcp://127.0.0.1:{port}", options.tokens):
            return pull(options.seconds, 0.5, socket)


def throughput(options: Options, scratch: Path) -> tuple[list[Row], bool]:
    """The rows of the first part, and whether the plane does MIN_SHARE of the slower of its parts."""
    frames = payload(options.tokens)
    rates: dict[str, list[float]] = {case: [0.0] * options.rounds for case in CASES}
    groups: list[float] = []
    for turn, case in interleave(CASES[:3], options.rounds):
        if case == "plane":
            rates[case][turn], group = plane_turn(options, scratch / f"journal-{turn}")
            groups.append(group)
            # Right after it, so that both see the same disk.
            per_sync = max(1, round(group))
            rates["append, group"][turn] = append(scratch / "appended", frames, options.seconds, per_sync)
        elif case == "append":
            rates[case][turn] = append(scratch / "appended", frames, options.seconds, 1)
        else:
            rates[case][turn] = pull_turn(options)
    shares = {
        name: [ours / theirs for ours, theirs in zip(rates["plane"], rates[name], strict=True)]
        for name in CASES[1:]
    }
    slower = [
        ours / min(a, b)
        for ours, a, b in zip(rates["plane"], rates["push/pull"], rates["append"], strict=True)
    ]
    config = {
        "bytes": sum(map(len, frames)),
        "tokens": options.tokens,
        "slots": options.slots,
        "messages_per_fsync": sorted(groups)[len(groups) // 2],
    }
    rows = [
        make_row(
            "stream", case, "messages/s", rates[case], config=config,
            ratios={"of the slower": slower, **{f"of {name}": share for name, share in shares.items()}}
            if case == "plane" else {},
        )
        for case in CASES
    ]  # fmt: skip
    return rows, rows[0].ratios["of the slower"].p50 >= MIN_SHARE


def crowd_part(options: Options, folder: Path, where: str) -> Row:
    """The row of a crowd whose learner journals in `folder`; values in seconds.

    A slot comes back when its group is trained. Each group is a batch of its own: what is measured is the plane,
    not the time in which a batch fills.
    """
    disk = TimedDisk()
    config = recipe(options.crowd, options.crowd, 1, 2)
    with (
        running(config, folder, disk) as plane,
        peer(
            "crowd", plane.intake.endpoints, options.tokens // 2, options.crowd, options.think_s, options.crowd_s
        ) as process,
    ):  # fmt: skip
        out, _ = process.communicate(timeout=START_S + options.crowd_s + 10 * options.think_s)
        num_peers = plane.num_peers
    if not out:
        raise RunFailed(f"the crowd ended with {process.returncode} before it had figures")
    said = json.loads(out)
    latencies = sorted(said["latencies_s"])
    if not latencies or num_peers != options.crowd:
        raise RunFailed(f"{num_peers} of {options.crowd} generators live; {len(latencies)} tickets granted")
    return make_row(
        "stream", f"crowd, journal {where}", "s", latencies,
        config={
            "generators": options.crowd, "think_s": options.think_s,
            "tickets_per_s": len(latencies) / said["elapsed_s"],
            "p99_s": _at(latencies, 0.99), "max_s": latencies[-1],
            "fsync_p99_s": _at(sorted(disk.syncs_s), 0.99), "fsync_max_s": max(disk.syncs_s),
        },
    )  # fmt: skip


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[int(share * (len(ordered) - 1))]


def crowds(options: Options, scratch: Path) -> tuple[list[Row], bool]:
    """The crowd with its journal on the disk, then in memory; whether the first has its p99 below MAX_P99_S.

    The second says what of the first was the disk: an ack and a grant wait for their fsync.
    """
    rows = [crowd_part(options, scratch / "journal-crowd", "on disk")]
    if MEMORY.is_dir():
        with tempfile.TemporaryDirectory(dir=MEMORY, prefix="headway-stream-") as folder:
            rows.append(crowd_part(options, Path(folder), "in memory"))
    return rows, float(rows[0].config["p99_s"]) < MAX_P99_S


def crowd_line(row: Row) -> str:
    """For people."""
    figures = {key: 1e3 * float(row.config[key]) for key in ("p99_s", "max_s", "fsync_p99_s", "fsync_max_s")}
    return (
        f"{row.case}: {row.config['generators']} generators, {float(row.config['tickets_per_s']):.0f} tickets/s, "
        f"latency p50 {1e3 * row.p50:.1f} ms, p99 {figures['p99_s']:.1f}, most {figures['max_s']:.0f}; "
        f"fsync p99 {figures['fsync_p99_s']:.1f} ms, most {figures['fsync_max_s']:.0f}"
    )


def main(arguments: Sequence[str]) -> int:
    """Run the bench; 1 when the plane is slower than it must be."""
    options = parse_options(arguments)
    folder = results_folder(options.results, "stream")
    console = Console()
    rows: list[Row] = []
    held = True
    with tempfile.TemporaryDirectory(dir=folder, prefix="scratch-") as scratch:
        if options.rounds:
            rows, fast = throughput(options, Path(scratch))
            console.print(rows_table("trajectories with journal and acks, against the parts alone", rows))
            share = rows[0].ratios["of the slower"].p50
            console.print(
                f"of the slower of push/pull and append: {share:.2f}, must be {MIN_SHARE}: {_verdict(fast)}"
            )
            held = held and fast
        if options.crowd:
            found, quick = crowds(options, Path(scratch))
            rows += found
            for row in found:
                console.print(crowd_line(row))
            console.print(f"p99 on disk must be below {1e3 * MAX_P99_S:.0f} ms: {_verdict(quick)}")
            held = held and quick
    write_rows(rows, folder / "rows.jsonl")
    console.print(f"rows: {folder / 'rows.jsonl'}")
    return 0 if held else 1


def _verdict(holds: bool) -> str:
    return "holds" if holds else "does not hold"
