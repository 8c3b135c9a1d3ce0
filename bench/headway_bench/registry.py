"""The benches by name. `headway bench NAME ...` and `python -m headway_bench NAME ...` both end in `run`."""

from __future__ import annotations

import argparse
import difflib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.errors import UnsupportedOption
from headway_bench.compare import TOLERANCE, compare, comparison_table, keep_baseline, read_baseline, share
from headway_bench.harness import recording, wide_console


@dataclass(frozen=True)
class Bench:
    """A bench: the module whose `entry(argv) -> int` runs it, and one line about it."""

    module: str
    about: str
    entry: str = "main"


BENCHES: dict[str, Bench] = {
    "push": Bench(
        "headway_bench.push", "weight pushes by channel, size and density, against what else carries bytes"
    ),
    "chaos": Bench(
        "headway_bench.chaos.bench", "whole runs under random faults, and whether every guarantee held"
    ),
    "changed": Bench(
        "headway_bench.changed", "share of bf16 weights that an update changes, and what a push weighs"
    ),
    "head": Bench(
        "headway_bench.head",
        "log-probs and policy gradients of the head against torch, and the products' rate",
    ),
    "delta": Bench(
        "headway_bench.delta", "weight deltas by size and share changed, in shares of the memcpy rate"
    ),
    "gpu": Bench(
        "headway_bench.gpu.run", "kernels on a GPU: correctness, then rivals and shares of the limits"
    ),
    "stream": Bench(
        "headway_bench.stream.bench",
        "trajectories a second with journal and acks on, and a thousand generators",
    ),
    "fuzz": Bench(
        "headway_bench.fuzz.bench",
        "mutated messages at every socket of a learner's process, which goes on serving",
    ),
    "generate": Bench(
        "headway_bench.alone.bench", "a recipe's generators alone, in shares of their bare work", "generate"
    ),
    "learn": Bench(
        "headway_bench.alone.bench", "a recipe's learner alone, in shares of its bare work", "learn"
    ),
    "loop": Bench(
        "headway_bench.pareto", "whole runs of a recipe over max_lag and batch: throughput, lag, ESS"
    ),
    "plan": Bench("headway_bench.shaped.bench", "what headway plan predicts, against real runs"),
    "optimise": Bench(
        "headway_bench.shaped.grid", "what headway plan --optimise proposes, against a grid of real runs"
    ),
    "async": Bench(
        "headway_bench.shaped.asynchronous", "asynchronous runs over the synchronous one, shaped by sleeps"
    ),
    "lag": Bench("headway_bench.lag", "reward at an exact lag, by objective, after the same samples"),
    "record": Bench("headway_bench.record", "what rows and time slices cost, in shares of the step"),
    "vllm": Bench(
        "headway_bench.vllm_push", "token gap of a push into a vLLM generator, against vLLM's own ways"
    ),
    "rival": Bench("headway_bench.rival", "samples per second of the whole loop against TRL, interleaved"),
}


def run(name: str, arguments: Sequence[str]) -> int:
    """Run a bench with its own command-line arguments.

    Returns:
        Its exit code; 1 also where a row regressed or is missing.

    Every bench takes --compare FILE (or "baseline"), --tolerance SHARE and --keep-baseline besides.

    The bench's module is imported only now: a bench may need packages that the others do not.

    Raises:
        UnsupportedOption: no bench of this name; the message lists the names. A baseline that is missing or of other
            hardware.
    """
    bench = BENCHES.get(name)
    if bench is None:
        raise UnsupportedOption(unknown_name(name))
    ours, theirs = _shared_options(arguments)
    main: Callable[[Sequence[str]], int] = getattr(importlib.import_module(bench.module), bench.entry)
    if ours.compare is None and not ours.keep_baseline:
        return main(theirs)
    before = read_baseline(name, ours.compare) if ours.compare is not None else []
    with recording() as rows:
        status = main(theirs)
    if not rows:
        raise UnsupportedOption(f"{name} wrote no rows to compare or keep; give it --out FILE")
    regressed = False
    if ours.compare is not None:
        comparison = compare(rows, before, ours.tolerance)
        console = wide_console()
        console.print(comparison_table(comparison))
        for what, cases in (
            ("not in the baseline", comparison.new),
            ("in the baseline only", comparison.missing),
        ):
            if cases:
                console.print(f"{what}: {', '.join(cases)}", highlight=False)
        regressed = bool(comparison.regressed or comparison.missing)
    if ours.keep_baseline and regressed:
        print("the baseline is kept as it was: a row regressed, or is missing")
    elif ours.keep_baseline:
        print(f"baseline: {keep_baseline(name, rows)}")
    return max(status, int(regressed))


def _shared_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options that every bench has, and the bench's own."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--compare", metavar="FILE", help="rows of an earlier run, or 'baseline': this machine's"
    )
    parser.add_argument(
        "--tolerance", type=share, default=TOLERANCE, help="a median may be worse by this share"
    )
    parser.add_argument("--keep-baseline", action="store_true", help="these rows are this machine's baseline")
    return parser.parse_known_args(arguments)


def unknown_name(name: str) -> str:
    """The message for a name that no bench has."""
    close = difflib.get_close_matches(name, BENCHES, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"no bench is called {name!r}{hint} The benches are: {', '.join(sorted(BENCHES))}."


def listing() -> str:
    """One line per bench: name and what it measures."""
    width = max(map(len, BENCHES))
    return "\n".join(f"{name:<{width}}  {BENCHES[name].about}" for name in sorted(BENCHES))
