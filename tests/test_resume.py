"""Guarantee 4 on real processes: what a kill and a resume change is nothing; no prompt is lost or trained twice."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from headway.config import RunConfig, to_toml
from headway.journal import BatchSelected, Entry, Opened, StepTrained, TicketEnded, TicketIssued, read, unpack

pytestmark = pytest.mark.slow
MakeConfig = Callable[..., RunConfig]
DEADLINE_S = 240.0
# What says how long something took, where it ran, what came over the wire twice, or was compared again on the way in.
TIMED = {
    "time_s", "elapsed_s", "queue_s", "tokens_per_s", "generated_per_s", "learner", "generator", "push_s",
    "checkpoint_s", "ack_s", "pause_s", "epoch", "push_bytes", "changed_share", "tickets", "trajectories", "tokens",
    "dropped", "buffered", "in_flight", "generators", "start_check",
}  # fmt: skip


def start(*words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "headway", "run", *words, "--view", "none"]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors.decode(errors="replace")


def family(process: subprocess.Popen[bytes], kind: str = "") -> list[psutil.Process]:
    """The supervisor and everything it started, or the processes of one kind."""
    found: list[psutil.Process] = []
    try:
        root = psutil.Process(process.pid)
        for member in [root, *root.children(recursive=True)]:
            if not kind or kind in member.cmdline():
                found.append(member)
    except psutil.NoSuchProcess:
        pass
    return found


def kill(members: list[psutil.Process]) -> None:
    for member in members:
        try:
            os.kill(member.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@contextmanager
def running(*words: str) -> Generator[subprocess.Popen[bytes]]:
    process = start(*words)
    try:
        yield process
    finally:
        kill(family(process))
        process.communicate()


def wait_until(what: str, seen: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not seen():
        assert time.monotonic() < end, f"not within {DEADLINE_S:g} s: {what}"
        assert process.poll() is None, f"ended before {what}"
        time.sleep(0.002)


def rows(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "step"]


def entries(run: Path) -> list[Entry]:
    return [unpack(record.kind, record.payload) for _, record in read(run / "journal")]


def lineage(run: Path) -> tuple[dict[int, list[int]], dict[int, int], list[TicketEnded]]:
    """Of the surviving steps: their tickets, the tickets' prompts; and every recorded drop."""
    steps: dict[int, list[int]] = {}
    prompts: dict[int, int] = {}
    ended: list[TicketEnded] = []
    batch: BatchSelected | None = None
    for entry in entries(run):
        match entry:
            case Opened():
                steps = {step: ids for step, ids in steps.items() if step <= entry.step}
                batch = None
            case TicketIssued():
                prompts[entry.ticket.ticket_id] = entry.ticket.prompt_index
            case TicketEnded():
                ended.append(entry)
            case BatchSelected():
                batch = entry
            case StepTrained() if not entry.skipped:
                assert batch is not None
                assert batch.ticket_ids == entry.ticket_ids
                steps[entry.version.step] = entry.ticket_ids
            case _:
                pass
    return steps, prompts, ended


def test_ten_updates_straight_equal_five_a_kill_a_resume_and_five(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    recipes: dict[str, Path] = {}
    for name in ("straight", "killed"):
        config = tiny_config(
            steps=10,
            run_dir=str(tmp_path / name),
            staleness={"max_lag": 0},
            checkpoint={"interval": 5, "keep": 9},
            batch={"prompts": 4, "samples": 8},
            sampling={"max_new_tokens": 48, "ignore_eos": True},
        )
        recipes[name] = tmp_path / f"{name}.toml"
        recipes[name].write_text(to_toml(config))
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    finish(start(str(recipes["straight"])))
    with running(str(recipes["killed"])) as process:
        marker = killed / "checkpoints" / "0.5" / "checkpoint.json"
        wait_until("the checkpoint of step 5", marker.exists, process)
        kill(family(process))
        process.wait(DEADLINE_S)
    assert not (killed / "checkpoints" / "0.10").exists()
    finish(start("--resume", str(killed)))

    one, other = straight / "checkpoints" / "0.10", killed / "checkpoints" / "1.10"
    for name in ("model.safetensors", "optimizer.safetensors", "rng.msgpack"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert json.loads((one / "cursor.json").read_text()) == json.loads((other / "cursor.json").read_text())
    trained, prompts, _ = lineage(straight)
    again, prompts_again, _ = lineage(killed)
    assert trained == again
    assert [[prompts[i] for i in ids] for ids in trained.values()] == [
        [prompts_again[i] for i in ids] for ids in again.values()
    ]
    assert [row["step"] for row in rows(killed)] == list(range(1, 11))
    compared = [row["step"] for row in rows(killed) if row["start_check"]]
    assert {1, 6} <= set(compared) <= {1, 2, 6, 7}, (
        "both sides are compared when a run starts, and when it goes on"
    )
    for row, row_again in zip(rows(straight), rows(killed), strict=True):
        assert {k: v for k, v in row.items() if k not in TIMED} == {
            k: v for k, v in row_again.items() if k not in TIMED
        }


def test_a_run_that_was_killed_after_its_last_update_is_closed_by_a_resume(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(tiny_config(steps=2, run_dir=str(run), checkpoint={"interval": 1}, save=True)))
    finish(start(str(recipe)))
    # what is there when everything dies before the last row
    (run / "summary.json").unlink()
    metrics = run / "metrics.jsonl"
    metrics.write_text("".join(line + "\n" for line in metrics.read_text().splitlines()[:-1]))
    shutil.rmtree(run / "policy")
    finish(start("--resume", str(run)))
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    assert (run / "policy" / "model.safetensors").exists()
    assert [row["step"] for row in rows(run)] == [1, 2]
    again = start("--resume", str(run))
    _, errors = again.communicate(timeout=DEADLINE_S)
    assert again.returncode == 2
    assert b"all 2 updates are done" in errors


def test_an_epoch_of_1000_prompts_with_20_kills_trains_each_exactly_once(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    dice = random.Random(7)
    table, run = tmp_path / "prompts.jsonl", tmp_path / "run"
    with table.open("w") as file:
        for _ in range(1000):
            digits = [dice.randrange(10) for _ in range(4)]
            row = {"prompt": " ".join(map(str, digits)), "answer": str(sorted(digits)[0])}
            file.write(json.dumps(row) + "\n")
    config = tiny_config(
        steps=100,
        run_dir=str(run),
        env={"name": "table", "args": {"path": str(table)}, "passes": 1},
        batch={"prompts": 10, "samples": 2},
        algo={"filter_zero_variance": False},
        staleness={"max_lag": 2},
        checkpoint={"interval": 2},
    )
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(config))
    kills: Counter[str] = Counter()
    words = [str(recipe)]
    while sum(kills.values()) < 20:
        with running(*words) as process:
            begun = len(rows(run)) if (run / "metrics.jsonl").exists() else 0
            goal = begun + dice.randint(1, 4)
            wait_until(f"step {goal}", lambda goal=goal: _num_rows(run) >= goal or _at_end(run), process)
            if _at_end(run):
                break
            time.sleep(dice.uniform(0.0, 0.1))  # anywhere within a step
            what = dice.choice(["learner", "", "", "generator"])
            kill(family(process, what))
            kills[what or "everything"] += 1
            if what == "generator":
                wait_until("the next step", lambda goal=goal: _num_rows(run) > goal or _at_end(run), process)
            kill(family(process))
            process.wait(DEADLINE_S)
        words = ["--resume", str(run)]
    assert sum(kills.values()) == 20, f"too few steps for the kills: {kills}"
    finish(start("--resume", str(run)))

    steps, prompts, ended = lineage(run)
    assert sorted(steps) == list(range(1, 101))
    trained = Counter(prompts[ticket] for ids in steps.values() for ticket in ids)
    dropped = {prompts[entry.ticket_id] for entry in ended}
    twice = {prompt for prompt, times in trained.items() if times > 1}
    lost = set(range(1000)) - trained.keys() - dropped
    assert not twice
    assert not lost
    assert [row["step"] for row in rows(run)] == list(range(1, 101))
    assert max(row["lag_max"] for row in rows(run)) <= 2
    print(f"kills {dict(kills)}; {len(trained)} of 1000 prompts trained once, {1000 - len(trained)} dropped")


def _num_rows(run: Path) -> int:
    try:
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def _at_end(run: Path) -> bool:
    return _num_rows(run) >= 100


def test_memory_is_flat_over_2000_updates(tiny_config: MakeConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = tiny_config(steps=2000, run_dir=str(run), staleness={"max_lag": 2}, checkpoint={"interval": 50})
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(config))
    early: dict[str, int] = {}
    late: dict[str, int] = {}
    with running(str(recipe)) as process:
        for goal, seen in ((300, early), (1990, late)):
            end = time.monotonic() + 1500.0
            while _num_rows(run) < goal:
                assert time.monotonic() < end, f"step {_num_rows(run)} of {goal}"
                assert process.poll() is None
                time.sleep(0.05)
            for kind in ("learner", "generator"):
                (member,) = family(process, kind)
                seen[kind] = member.memory_info().rss
            seen["supervisor"] = psutil.Process(process.pid).memory_info().rss
        finish(process)
    growth = {kind: late[kind] / early[kind] - 1.0 for kind in early}
    print({kind: f"{early[kind] >> 20} MiB, {100 * growth[kind]:+.1f} %" for kind in early})
    assert max(growth.values()) < 0.05, growth
