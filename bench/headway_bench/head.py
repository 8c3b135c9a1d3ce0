"""The language-model head on this CPU: `headway bench head`. Log-probs alone, and loss with both gradients.

Contestants (head_rivals.py) take turns; each round also times one bare matrix product [T, H] x [H, V], and a share of
its rate says how far a contestant is from what the machine's products allow: one product forward, three with both
gradients. Peak memory is that of one more call, above inputs, gradients included. Before anything is timed, every
contestant's log-probs and gradients are compared.

The exit status is 1 if the native head is not at least 1.5 times (forward) and 1.3 times (with gradients) as fast as
the best torch contestant at T 1024, H 512, V 32000.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
from headway_bench.head_rivals import CHUNK_ROWS, MEAN_CROSS_ENTROPY, Rows, absent, forwards, gradients
from headway_bench.peak_memory import peak_extra_mb
from headway_kernels.head_native import release_buffers

Shape = tuple[int, int, int]
BARS = {"forward": 1.5, "gradients": 1.3}
PRODUCTS = {"forward": 1, "gradients": 3}
BAR_SHAPE: Shape = (1024, 512, 32_000)
PRODUCT = "product"


@dataclass(frozen=True)
class Options:
    """shapes: (T, H, V); threads: counts; rounds: counted turns of each contestant, after one that is not."""

    shapes: list[Shape]
    threads: list[int]
    rounds: int
    tasks: list[str]
    results: Path


def parse_options(arguments: Sequence[str]) -> Options:
    """Read the command line; argparse ends the process with status 2 on a fault."""
    parser = argparse.ArgumentParser(
        prog="headway bench head", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", action="append", help="T,H,V; several times (default 1024,512,32000)")
    parser.add_argument("--threads", type=int, action="append", help="several times (default 1 and 2)")
    parser.add_argument("--rounds", type=int, default=5, help="counted turns of each contestant")
    parser.add_argument("--tasks", default="forward,gradients", help="comma-separated")
    parser.add_argument("--results", type=Path, default=Path("runs/bench"), help="folder for results")
    given = parser.parse_args(arguments)
    shapes: list[Shape] = []
    for text in given.shape or [",".join(map(str, BAR_SHAPE))]:
        numbers = text.split(",")
        if len(numbers) != 3 or not all(number.isdigit() and int(number) for number in numbers):
            parser.error(f"--shape {text}: expected three counts T,H,V")
        T, H, V = map(int, numbers)
        if T % CHUNK_ROWS:
            parser.error(f"--shape {text}: T must be a multiple of {CHUNK_ROWS}")
        shapes.append((T, H, V))
    tasks = given.tasks.split(",")
    if unknown := [task for task in tasks if task not in BARS]:
        parser.error(f"--tasks {','.join(unknown)}: there are {', '.join(BARS)}")
    threads = given.threads or [1, 2]
    if given.rounds < 1 or min(threads) < 1:
        parser.error("--rounds and --threads are at least 1")
    return Options(shapes, threads, given.rounds, tasks, given.results)


def check_agreement(task: str, works: Mapping[str, Callable[[], object]]) -> None:
    """Raises RunFailed unless all contestants compute the same to 1e-4 of the largest element (cross-entropy apart)."""
    groups = [[name for name in works if name not in MEAN_CROSS_ENTROPY], list(MEAN_CROSS_ENTROPY)]
    if task == "forward":
        groups = [list(works)]
    for group in groups:
        outputs = {name: works[name]() for name in group if name in works}
        if not outputs:
            continue
        first, expected = next(iter(outputs.items()))
        for name, got in outputs.items():
            for ours, theirs in zip(_tensors(expected), _tensors(got), strict=True):
                error = float((ours - theirs).abs().max() / ours.abs().max())
                if not error <= 1e-4:
                    raise RunFailed(
                        f"{task}: {name} and {first} differ by {error:.1e} of the largest element"
                    )


def _tensors(output: object) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else list(output)  # type: ignore[call-overload]


def measure(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds by contestant, one a round; each has run before."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _, name in interleave(list(works), rounds):
        start = time.perf_counter()
        works[name]()
        seconds[name].append(time.perf_counter() - start)
    return seconds


def speedup(seconds: Mapping[str, Sequence[float]]) -> tuple[str, list[float]]:
    """The torch contestant of the least median, and its time over ours in each round."""
    torch_only = [name for name in seconds if name not in ("headway", "liger", PRODUCT)]
    best = min(torch_only, key=lambda name: statistics.median(seconds[name]))
    return best, [theirs / ours for theirs, ours in zip(seconds[best], seconds["headway"], strict=True)]


def case_rows(
    task: str, shape: Shape, threads: int, seconds: Mapping[str, list[float]], peaks: Mapping[str, float]
) -> list[Row]:
    """A row a contestant: ms, with its share of the product's rate and its time over ours."""
    T, H, V = shape
    numbered = {name: dict(enumerate(values)) for name, values in seconds.items()}
    product_s, products = numbered[PRODUCT], PRODUCTS[task]
    rows: list[Row] = []
    for name, values in seconds.items():
        ratios: dict[str, list[float]] = {}
        if name != PRODUCT:
            ratios["over headway"] = ratios_by_round(numbered[name], numbered["headway"])
            ratios["share of the products' rate"] = [
                products * share for share in ratios_by_round(product_s, numbered[name])
            ]
        config: dict[str, str | float | int | bool] = {
            "T": T, "H": H, "V": V, "dtype": "float32", "threads": threads, "task": task,
            "gflop_per_s": 2e-9 * T * H * V * (products if name != PRODUCT else 1) / statistics.median(values),
        }  # fmt: skip
        if name in peaks:
            config["peak_extra_mb"] = round(peaks[name], 1)
        label = f"{task}/T{T}-H{H}-V{V}/{threads}t/{name}"
        rows.append(make_row("head", label, "ms", [1e3 * v for v in values], config=config, ratios=ratios))
    return rows


def run_case(task: str, shape: Shape, threads: int, rounds: int) -> tuple[list[Row], str, list[float]]:
    """Rows, the best torch contestant and our speed-up over it in each round."""
    torch.set_num_threads(threads)
    rows = Rows.random(*shape)
    chosen = forwards(rows) if task == "forward" else gradients(rows)
    works: dict[str, Callable[[], object]] = dict(chosen)
    with torch.inference_mode(task == "forward"):
        check_agreement(task, works)
        x, transposed = rows.x.detach(), rows.weight.detach().t()
        product = torch.empty(shape[0], shape[2])
        works[PRODUCT] = lambda: torch.mm(x, transposed, out=product)
        works[PRODUCT]()
        seconds = measure(works, rounds)
        peaks: dict[str, float] = {}
        for name in chosen:
            release_buffers()
            peaks[name] = peak_extra_mb(works[name])
    best, ratios = speedup(seconds)
    return case_rows(task, shape, threads, seconds, peaks), best, ratios


def run_bench(options: Options, console: Console) -> bool:
    """Runs every case, saves rows.jsonl, shows tables; whether the bars held where they apply.

    Raises:
        RunFailed: contestants disagree.
    """
    folder = results_folder(options.results, "head").resolve()
    console.print(f"results: {folder}", highlight=False, soft_wrap=True)
    for name, reason in absent().items():
        console.print(f"not measured: {name}: {reason}", highlight=False)
    rows: list[Row] = []
    held = True
    for shape in options.shapes:
        for threads in options.threads:
            for task in options.tasks:
                part, best, ratios = run_case(task, shape, threads, options.rounds)
                rows += part
                write_rows(rows, folder / "rows.jsonl")
                console.print(rows_table(f"{task}, {threads} threads", part))
                peaks = {row.case.rsplit("/", 1)[1]: row.config.get("peak_extra_mb") for row in part}
                console.print(
                    "peak extra MB: "
                    + ", ".join(f"{name} {mb}" for name, mb in peaks.items() if mb is not None),
                    highlight=False,
                )
                middle, bar = statistics.median(ratios), BARS[task]
                verdict = f"{task}, {threads} threads: {middle:.2f} times as fast as torch's best ({best})"
                if shape == BAR_SHAPE:
                    held = held and middle >= bar
                    verdict += f"; the bar is {bar}: {'held' if middle >= bar else 'NOT HELD'}"
                console.print(verdict, highlight=False)
    return held


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; 0: every bar was met, 1: one was not, 2: it could not run."""
    options = parse_options(sys.argv[1:] if arguments is None else arguments)
    return exit_status(lambda: run_bench(options, wide_console()))


if __name__ == "__main__":
    raise SystemExit(main())
