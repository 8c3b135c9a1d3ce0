"""The benches by name. `headway bench NAME ...` and `python -m headway_bench NAME ...` both end in `run`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.errors import UnsupportedOption


@dataclass(frozen=True)
class Bench:
    """A bench: the module whose `main(argv) -> int` runs it, and one line about it."""

    module: str
    about: str


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
    "plan": Bench(
        "headway_bench.shaped.bench", "what headway plan predicts, against real runs shaped by sleeps"
    ),
    "async": Bench(
        "headway_bench.shaped.asynchronous", "asynchronous runs over the synchronous one, shaped by sleeps"
    ),
    "lag": Bench("headway_bench.lag", "reward at an exact lag, by objective, after the same samples"),
    "record": Bench("headway_bench.record", "what rows and time slices cost, in shares of the step"),
    "rival": Bench("headway_bench.rival", "samples per second of the whole loop against TRL, interleaved"),
}


def run(name: str, arguments: Sequence[str]) -> int:
    """Run a bench with its own command-line arguments; returns its exit code.

    The bench's module is imported only now: a bench may need packages that the others do not.

    Raises:
        UnsupportedOption: no bench of this name; the message lists the names.
    """
    bench = BENCHES.get(name)
    if bench is None:
        raise UnsupportedOption(unknown_name(name))
    main: Callable[[Sequence[str]], int] = importlib.import_module(bench.module).main
    return main(arguments)


def unknown_name(name: str) -> str:
    """The message for a name that no bench has."""
    close = difflib.get_close_matches(name, BENCHES, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"no bench is called {name!r}{hint} The benches are: {', '.join(sorted(BENCHES))}."


def listing() -> str:
    """One line per bench: name and what it measures."""
    width = max(map(len, BENCHES))
    return "\n".join(f"{name:<{width}}  {BENCHES[name].about}" for name in sorted(BENCHES))
