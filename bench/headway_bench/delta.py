"""Weight deltas on this CPU: `headway bench delta`. Cast and compare, encode, apply, by size and share changed.

    cast_and_diff  fp32 masters cast to bf16, compared with the published copy, encoded, the copy updated
    encode         two bf16 states compared and encoded
    apply          the delta written into a replica
    (torch)        beside each: the same with torch's operators (cast, comparison, nonzero, index_select; index_copy_)

Contestants take turns; each round also times a memcpy of a bf16 state between two others. A share of its rate compares
bytes per second. Bytes counted: 8 an element for cast_and_diff (read master, read and write published; lines that did
not change are not written, but counted) and 4 for encode, plus the payload; for apply the payload, read, and the lines
of 64 bytes with a change, read and written; for memcpy its source read and its target written.

The exit status is 1 if cast_and_diff, or apply where at least 1 % changed, has less than 60 % of the memcpy's rate.
Below 1 % each change is a line, or a page, of memory of its own, which no loop of stores writes at a memcpy's rate. The
limit there is a scatter that is given its indices, torch's index_copy_: apply, which decodes too, has 60 % of its rate.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from headway.errors import RunFailed
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
from headway_bench.peak_memory import peak_extra_mb
from headway_kernels.weight_delta import Delta, apply_delta, cast_and_diff, diff

BAR = 0.6
FEW = 0.01  # share changed below which apply is compared with a scatter
LINE_ELEMENTS = 32  # bf16 values in a line of 64 bytes
MILLION = 1_000_000


@dataclass(frozen=True)
class Options:
    """sizes: elements; densities: shares changed; threads: counts; rounds: counted turns of each contestant."""

    sizes: list[int]
    densities: list[float]
    threads: list[int]
    rounds: int
    results: Path


@dataclass
class State:
    """One push: masters whose cast differs from `published` in a share of the elements.

    Attributes:
        master: float32 [N]. published: bfloat16 [N], before the push. fresh: after it.
        work: what cast_and_diff overwrites. replica: what apply overwrites. delta: from published to fresh.
        num_lines: lines of `published` that change.
    """

    master: Tensor
    published: Tensor
    fresh: Tensor
    delta: Delta
    num_lines: int
    room: np.ndarray[tuple[int], np.dtype[np.uint8]] = field(repr=False)
    work: Tensor = field(repr=False)
    replica: Tensor = field(repr=False)
    copied: Tensor = field(repr=False)

    @staticmethod
    def random(size: int, density: float) -> State:
        """Every element changes with probability `density`, and then in its last place."""
        generator = torch.Generator().manual_seed(size)
        published = torch.randn(size, generator=generator).to(torch.bfloat16)
        chosen = torch.rand(size, generator=generator) < density
        fresh = (published.view(torch.int16) ^ chosen.to(torch.int16)).view(torch.bfloat16)
        room = np.zeros(2 * size, np.uint8)  # touched: a first write of fresh pages is the system's time
        delta = diff(fresh, published)
        whole = chosen[: size // LINE_ELEMENTS * LINE_ELEMENTS].view(-1, LINE_ELEMENTS)
        num_lines = int(whole.any(1).sum()) + int(chosen[whole.numel() :].any())
        copies = (published.clone() for _ in range(3))
        return State(fresh.float(), published, fresh, delta, num_lines, room, *copies)

    def bytes_of(self, name: str) -> int:
        """Counted bytes of a contestant; see the module's docstring."""
        size, payload = self.published.numel(), self.delta.payload.size
        return {
            "cast_and_diff": 8 * size + payload,
            "encode": 4 * size + payload,
            "apply": 2 * 64 * self.num_lines + payload,
            "memcpy": 4 * size,
        }[name.removesuffix(" (torch)")]


def parse_options(arguments: Sequence[str]) -> Options:
    """Read the command line; argparse ends the process with status 2 on a fault."""
    parser = argparse.ArgumentParser(
        prog="headway bench delta", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--millions", type=int, action="append", help="elements (default 16 and 134); several times"
    )
    parser.add_argument("--density", type=float, action="append", help="share changed; several times")
    parser.add_argument("--threads", type=int, action="append", help="several times (default 1 and 2)")
    parser.add_argument("--rounds", type=int, default=5, help="counted turns of each contestant")
    parser.add_argument("--results", type=Path, default=Path("runs/bench"), help="folder for results")
    given = parser.parse_args(arguments)
    sizes, threads = given.millions or [16, 134], given.threads or [1, 2]
    densities = given.density or [1e-4, 1e-3, 1e-2, 0.05, 0.2, 1.0]
    if given.rounds < 1 or min(threads) < 1 or min(sizes) < 1:
        parser.error("--rounds, --threads and --millions are at least 1")
    if any(not 0 < density <= 1 for density in densities):
        parser.error("--density: a share is above 0 and at most 1")
    return Options([size * MILLION for size in sizes], densities, threads, given.rounds, given.results)


def contestants(state: State) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """By name: what is timed, and what restores its input before, untimed."""

    def torch_diff() -> tuple[Tensor, Tensor]:
        fresh = state.master.to(torch.bfloat16)
        at = (fresh.view(torch.int16) != state.work.view(torch.int16)).nonzero()[:, 0]
        values = fresh.index_select(0, at)
        state.work.copy_(fresh)
        return at, values

    def torch_encode() -> tuple[Tensor, Tensor]:
        at = (state.fresh.view(torch.int16) != state.published.view(torch.int16)).nonzero()[:, 0]
        return at, state.fresh.index_select(0, at)

    at, values = torch_encode()

    def restore() -> Tensor:
        return state.work.copy_(state.published)

    def stale() -> Tensor:
        return state.replica.copy_(state.published)

    def nothing() -> None:
        return None

    return {
        "memcpy": (lambda: state.copied.copy_(state.published), nothing),
        "cast_and_diff": (lambda: cast_and_diff(state.master, state.work, payload=state.room), restore),
        "cast_and_diff (torch)": (torch_diff, restore),
        "encode": (lambda: diff(state.fresh, state.published, payload=state.room), nothing),
        "encode (torch)": (torch_encode, nothing),
        "apply": (lambda: apply_delta(state.delta, state.replica), stale),
        "apply (torch)": (lambda: state.replica.index_copy_(0, at, values), stale),
    }


def measure(state: State, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds by contestant, one a round, after one that does not count; peak extra MB of one more call.

    Raises:
        RunFailed: a contestant left other bits than the new state's.
    """
    works = contestants(state)
    for name, (work, prepare) in works.items():
        prepare()
        work()
        for result, mine in ((state.work, "cast_and_diff"), (state.replica, "apply")):
            if name.startswith(mine) and not torch.equal(
                result.view(torch.int16), state.fresh.view(torch.int16)
            ):
                raise RunFailed(f"{name} did not end in the new state")
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _, name in interleave(list(works), rounds):
        work, prepare = works[name]
        prepare()
        start = time.perf_counter()
        work()
        seconds[name].append(time.perf_counter() - start)
    return seconds, {name: peak_extra_mb(work) for name, (work, _) in works.items()}


def case_rows(
    label: str,
    config: Mapping[str, str | float | int | bool],
    state: State,
    seconds: Mapping[str, list[float]],
    peaks: Mapping[str, float],
) -> list[Row]:
    """A row a contestant: ms, its share of the memcpy's rate, the time of torch's operators over ours."""
    rates = {
        name: {turn: state.bytes_of(name) / value for turn, value in enumerate(values)}
        for name, values in seconds.items()
    }
    rows: list[Row] = []
    for name, values in seconds.items():
        ratios = (
            {"share of memcpy": ratios_by_round(rates[name], rates["memcpy"])} if name != "memcpy" else {}
        )
        other = f"{name} (torch)"
        if other in seconds:
            ratios["torch over ours"] = [
                theirs / ours for theirs, ours in zip(seconds[other], values, strict=True)
            ]
        gb_per_s = state.bytes_of(name) / statistics.median(values) / 1e9
        more = {**config, "gb_per_s": round(gb_per_s, 2), "peak_extra_mb": round(peaks[name], 1)}
        rows.append(
            make_row("delta", f"{label}/{name}", "ms", [1e3 * v for v in values], config=more, ratios=ratios)
        )
    return rows


def below_bar(rows: Sequence[Row], density: float) -> list[str]:
    """The judged cases of this density whose median share of their limit's rate is below the bar."""
    missed: list[str] = []
    for row in rows:
        name = row.case.rsplit("/", 1)[1]
        if name not in ("cast_and_diff", "apply"):
            continue
        limit = "torch over ours" if name == "apply" and density < FEW else "share of memcpy"
        if row.ratios[limit].p50 < BAR:
            missed.append(f"{row.case}: {limit} {row.ratios[limit].format()}")
    return missed


def run_bench(options: Options, console: Console) -> bool:
    """Runs every case, saves rows.jsonl, shows tables; whether every judged share reached the bar."""
    folder = results_folder(options.results, "delta").resolve()
    console.print(f"results: {folder}", highlight=False, soft_wrap=True)
    rows: list[Row] = []
    missed: list[str] = []
    for size in options.sizes:
        for density in options.densities:
            state = State.random(size, density)
            for threads in options.threads:
                torch.set_num_threads(threads)
                seconds, peaks = measure(state, options.rounds)
                label = f"{size // MILLION}M/{density:g}/{threads}t"
                config = {"elements": size, "density": density, "threads": threads, "dtype": "bfloat16"}
                part = case_rows(label, config, state, seconds, peaks)
                rows += part
                write_rows(rows, folder / "rows.jsonl")
                console.print(
                    rows_table(f"{size // MILLION} M elements, {density:g} changed, {threads} threads", part)
                )
                missed += below_bar(part, density)
    for text in missed:
        console.print(f"below {BAR} of the limit: {text}", highlight=False)
    if not missed:
        console.print(
            f"every cast_and_diff and apply has at least {BAR} of its limit's rate", highlight=False
        )
    return not missed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; 0: every bar was met, 1: one was not, 2: it could not run."""
    options = parse_options(sys.argv[1:] if arguments is None else arguments)
    return exit_status(lambda: run_bench(options, wide_console()))


if __name__ == "__main__":
    raise SystemExit(main())
