"""What a weight push costs a vLLM generator: `headway bench vllm`, with 8 requests in flight, against vLLM's own ways.

A token gap is the time from the end of one decode step, in which every request gets a token, to the end of the next.
The extra gap of a push is its longest gap less the median gap of the same engine without one, in that round. A push of
headway's spans several gaps, because it is staged and proved beside decoding: "all gaps" sums what each is too long.
The ways take turns; three engines live in one process: headway's, one with headway's back-end for vLLM's weight
transfer, and an untouched one for vLLM's own two.

Wrong is: a request that did not run to its budget, another version on a token than was in force, or engines that
disagree on the log-probs of one prompt after the last push. The exit status is 1 if something was wrong, if the extra
gap exceeds 20 ms, or if one of vLLM's own ways takes less than 3 times as much (`--kv keep`, medians).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from headway.errors import RunFailed, UnsupportedOption
from headway.generate.protocol import FinishedMember, GroupRequest
from headway.generate.vllm import transfer
from headway.generate.vllm.engine import VLLMEngine
from headway.generate.vllm.start import Sizes
from headway.model.builtin import builtin_folder
from headway.types import FinishReason, PolicyVersion, Sampling
from headway_bench.harness import (
    Row,
    exit_status,
    interleave,
    make_row,
    ratios_by_round,
    results_folder,
    rows_table,
    wide_console,
    write_rows,
)
from headway_bench.vllm_ways import HeadwayWay, OwnEngine, OwnWay, TransferWay, Way

BAR_MS, BAR_RATIO = 20.0, 3.0
FLOOR_MS = 0.1  # an extra gap below this is noise, and counts as this much in a ratio
PUSH_DEADLINE_S = 20.0
PLAIN_STEPS = 6  # of a turn, before its push; the first finds another engine's memory in the cache
MAX_TOKENS = 500
PROMPT = [1, 7, 5, 9, 4, 8, 6]
AGREEMENT = 1e-4
OURS, BACK_END = "headway", "headway back-end"
ENGINES = (OURS, BACK_END, "vllm update")
"""Ways by which each engine is started and looked at."""


@dataclass(frozen=True)
class Options:
    """pushes: of each way; requests: in flight; kv: keep or recompute; model: builtin's name or a folder."""

    pushes: int
    requests: int
    kv: str
    model: str
    results: Path


@dataclass
class Measured:
    """Of one way, in ms.

    Attributes:
        extra_ms: of each push, its longest gap beyond a plain one; all_ms: all its gaps beyond plain ones.
        pause_ms: the engine's thread in the push itself; plain_ms: gaps without a push.
    """

    extra_ms: list[float]
    all_ms: list[float]
    pause_ms: list[float]
    plain_ms: list[float]


def parse_options(arguments: Sequence[str]) -> Options:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="headway bench vllm")
    parser.add_argument("--pushes", type=int, default=20)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--kv", choices=("keep", "recompute"), default="keep")
    parser.add_argument("--model", default="builtin:sort5")
    parser.add_argument("--results", type=Path, default=Path("runs/bench"))
    found = parser.parse_args(arguments)
    if found.pushes < 1 or found.requests < 1:
        raise UnsupportedOption(
            f"--pushes {found.pushes} --requests {found.requests}: allowed: at least 1 of each"
        )
    return Options(found.pushes, found.requests, found.kv, found.model, found.results)


def push(way: Way) -> list[tuple[float, float]]:
    """Steps from a publication until the push is over: of each, gap and what it held of the push, in ms.

    Raises:
        RunFailed: it does not come to an end.
    """
    gaps: list[tuple[float, float]] = []
    over, deadline = False, time.perf_counter() + PUSH_DEADLINE_S
    while not over:
        if time.perf_counter() > deadline:
            raise RunFailed(f"a push was not over after {PUSH_DEADLINE_S:g} s and {len(gaps)} steps")
        started = time.perf_counter()
        over = way.push()
        pushed = time.perf_counter()
        step(way.engine)
        gaps.append((1e3 * (time.perf_counter() - started), 1e3 * (pushed - started)))
    return gaps


def step(engine: VLLMEngine) -> None:
    """A step in which nothing may end; before the first version there is none to make."""
    ended = engine.step() if engine.version is not None else []
    if ended:
        raise RunFailed(
            f"a request ended in mid-bench: {ended[0].finish_reason} after {len(ended[0].token_ids)}"
        )


def turn(way: Way, measured: Measured, flat: torch.Tensor, version: PolicyVersion) -> None:
    """Plain steps, then a push."""
    step(way.engine)
    gaps: list[float] = []
    for _ in range(PLAIN_STEPS - 1):
        started = time.perf_counter()
        step(way.engine)
        gaps.append(1e3 * (time.perf_counter() - started))
    way.prepare(flat, version)
    around = push(way)
    plain = statistics.median(gaps)
    measured.plain_ms += gaps
    measured.extra_ms.append(max(gap for gap, _ in around) - plain)
    measured.all_ms.append(sum(gap - plain for gap, _ in around))
    measured.pause_ms.append(max(pause for _, pause in around))


def flat_of(base: torch.Tensor, number: int) -> torch.Tensor:
    """Weights number `number`: every element differs from the version before."""
    noise = torch.Generator().manual_seed(number)
    return base + 1e-3 * torch.randn(base.shape, generator=noise)


def start(way: Way, base: torch.Tensor, options: Options, budget: int) -> None:
    """First version, and requests in flight."""
    way.prepare(flat_of(base, 0), PolicyVersion(0, 0))
    push(way)
    sampling = Sampling(1.0, budget, [], ignore_eos=True)
    way.engine.add(GroupRequest(1, PROMPT, options.requests, sampling, 11))
    step(way.engine)


def finish(engine: VLLMEngine) -> list[FinishedMember]:
    """Until everything has ended."""
    done: list[FinishedMember] = []
    while engine.num_running:
        done += engine.step()
    return done


def check_ended(
    name: str, done: Sequence[FinishedMember], options: Options, budget: int, pushes: int
) -> None:
    """Every request ran to its budget over every version.

    Raises:
        RunFailed: one did not.
    """
    whole = [
        member
        for member in done
        if member.finish_reason is FinishReason.LENGTH
        and len(member.token_ids) == budget
        and [span.version.step for span in member.spans] == list(range(pushes + 1))
    ]
    if len(whole) != options.requests or len(done) != options.requests:
        raise RunFailed(
            f"{name}: {len(whole)} of {options.requests} requests ran to their end over all versions"
        )


def check_agreement(engines: Mapping[str, VLLMEngine]) -> None:
    """The engines serve the same weights: the same tokens and log-probs of one new request.

    Raises:
        RunFailed: they do not.
    """
    found: dict[str, FinishedMember] = {}
    for name, engine in engines.items():
        engine.add(GroupRequest(2, PROMPT, 1, Sampling(1.0, 12, [], ignore_eos=True), 5))
        (found[name],) = [*engine.step(), *finish(engine)]
    ours = found[OURS]
    for name, theirs in found.items():
        apart = float(np.abs(ours.logprobs - theirs.logprobs).max())
        if not np.array_equal(ours.token_ids, theirs.token_ids) or not apart <= AGREEMENT:
            raise RunFailed(f"after the last push {name} and {OURS} differ: log-probs by {apart:.1e}")


def measure(options: Options, folder: Path) -> dict[str, Measured]:
    """Every way's pushes, in turns.

    Raises:
        RunFailed: something was wrong.
    """
    budget = MAX_TOKENS
    sizes = Sizes(options.requests, 0, 512)
    ours = HeadwayWay(folder, sizes, options.kv, budget + len(PROMPT) + 1)
    try:
        own = OwnEngine(folder, ours.engine.manifest, ours.engine, options.kv)
        other = OwnEngine(folder, ours.engine.manifest, ours.engine, options.kv, transfer.NAME)
        ways: dict[str, Way] = {
            OURS: ours,
            BACK_END: TransferWay(other),
            "vllm update": OwnWay(own, reload=False),
            "vllm reload": OwnWay(own, reload=True),
        }
        base = _base(folder)
        for name in ENGINES:
            start(ways[name], base, options, budget)
        measured = {name: Measured([], [], [], []) for name in ways}
        steps = {id(way.engine): 0 for way in ways.values()}
        for _, name in interleave(list(ways), options.pushes):
            engine = id(ways[name].engine)
            steps[engine] += 1
            number = steps[engine]
            turn(ways[name], measured[name], flat_of(base, number), PolicyVersion(0, number))
        for name in ENGINES:
            engine = ways[name].engine
            check_ended(name, finish(engine), options, budget, steps[id(engine)])
        last = steps[id(own.engine)] + 1
        for name in ENGINES:
            ways[name].prepare(flat_of(base, last), PolicyVersion(0, last))
            push(ways[name])
        check_agreement({name: ways[name].engine for name in ENGINES})
        ways[BACK_END].close()
        return measured
    finally:
        ours.close()


def _base(folder: Path) -> torch.Tensor:
    from headway.model import load_policy

    return load_policy(folder, with_grad=False).flat.clone()


def rows_of(measured: Mapping[str, Measured], options: Options) -> list[Row]:
    """Extra gap, push and plain gap of each way."""
    config: dict[str, str | float | int | bool] = {
        "model": options.model, "requests": options.requests, "pushes": options.pushes, "kv": options.kv,
        "dtype": "float32",
    }  # fmt: skip
    rows: list[Row] = []
    ours = dict(enumerate(max(FLOOR_MS, value) for value in measured[OURS].extra_ms))
    for name, found in measured.items():
        theirs = dict(enumerate(max(FLOOR_MS, value) for value in found.extra_ms))
        ratios = {} if name == OURS else {"over headway": ratios_by_round(theirs, ours)}
        rows.append(make_row("vllm", f"extra gap/{name}", "ms", found.extra_ms, config=config, ratios=ratios))
    ours = dict(enumerate(max(FLOOR_MS, value) for value in measured[OURS].all_ms))
    for name, found in measured.items():
        theirs = dict(enumerate(max(FLOOR_MS, value) for value in found.all_ms))
        ratios = {} if name == OURS else {"over headway": ratios_by_round(theirs, ours)}
        rows.append(make_row("vllm", f"all gaps/{name}", "ms", found.all_ms, config=config, ratios=ratios))
    for name, found in measured.items():
        rows.append(make_row("vllm", f"push alone/{name}", "ms", found.pause_ms, config=config))
        rows.append(make_row("vllm", f"gap without/{name}", "ms", found.plain_ms, config=config))
    return rows


def missed_bars(rows: Sequence[Row]) -> list[str]:
    """Bars of the extra gap that were not reached."""
    missed: list[str] = []
    for row in rows:
        if row.case == f"extra gap/{OURS}" and row.p50 > BAR_MS:
            missed.append(f"{row.case}: {row.p50:.1f} ms, at most {BAR_MS:g}")
        elif (
            row.case.startswith("extra gap/vllm")
            and "over headway" in row.ratios
            and row.ratios["over headway"].p50 < BAR_RATIO
        ):
            missed.append(
                f"{row.case}: {row.ratios['over headway'].format()} of headway's, at least {BAR_RATIO:g}"
            )
    return missed


def run_bench(options: Options, console: Console) -> bool:
    """Runs, saves rows.jsonl, shows a table; whether every bar was met."""
    torch.set_num_threads(1)
    folder = results_folder(options.results, "vllm").resolve()
    console.print(f"results: {folder}", highlight=False, soft_wrap=True)
    model = options.model
    path = builtin_folder(model.removeprefix("builtin:")) if model.startswith("builtin:") else Path(model)
    rows = rows_of(measure(options, path), options)
    write_rows(rows, folder / "rows.jsonl")
    console.print(
        rows_table(f"{options.requests} requests in flight, {options.pushes} pushes, none aborted", rows)
    )
    missed = missed_bars(rows)
    for text in missed:
        console.print(text, highlight=False)
    return not missed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; 0: every bar was met, 1: one was not, 2: it could not run."""
    given = sys.argv[1:] if arguments is None else arguments
    return exit_status(lambda: run_bench(parse_options(given), wide_console()))


if __name__ == "__main__":
    raise SystemExit(main())
