"""A bench's rows against earlier ones of the same machine: `headway bench NAME ... --compare FILE`.

Rows are matched by case, unit and config. A row regresses if its median is worse by more than the tolerance and by more
than both spreads together (the hypotenuse of half their 20th to 80th percentile ranges): what a noisy machine does to
a figure is no regression. A row of one value has no spread: there the tolerance alone counts. Figures of other hardware
say nothing about these and are refused.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.table import Table

from headway.errors import UnsupportedOption
from headway_bench.harness import Row, read_rows, write_rows
from headway_bench.machine import Hardware, this_hardware

BASELINES = Path(__file__).parent / "baselines"
TOLERANCE = 0.1
LESS_IS_BETTER = frozenset({"s", "ms", "us", "ns", "B", "bytes", "MB", "MiB", "GiB"})
MORE_IS_BETTER = frozenset({"reward", "x"})  # and everything per second


@dataclass(frozen=True)
class Change:
    """One row beside its baseline.

    Attributes:
        worse: by how much, as a share of the baseline's median; negative: better. noise: likewise, of both spreads.
    """

    row: Row
    before: Row
    worse: float
    noise: float

    def regressed(self, tolerance: float) -> bool:
        """Worse by more than is allowed and than noise explains."""
        return self.worse > max(tolerance, self.noise)


@dataclass(frozen=True)
class Comparison:
    """All rows.

    Attributes:
        new, missing: cases of one side only.
    """

    changes: list[Change]
    new: list[str]
    missing: list[str]
    tolerance: float

    @property
    def regressed(self) -> list[Change]:
        """The rows that did."""
        return [change for change in self.changes if change.regressed(self.tolerance)]


def share(text: str) -> float:
    """A tolerance of the command line: 0.1 is ten per cent.

    Raises:
        ArgumentTypeError: it is no number, negative or not finite.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a share, 0 or more (0.1 is 10 %)")
    return value


def less_is_better(unit: str) -> bool:
    """Which way a figure of this unit is better.

    Raises:
        UnsupportedOption: it is not known.
    """
    if unit.endswith("/s") or unit in MORE_IS_BETTER:
        return False
    if unit in LESS_IS_BETTER:
        return True
    known = ", ".join(sorted(LESS_IS_BETTER | MORE_IS_BETTER))
    raise UnsupportedOption(
        f"rows in {unit!r}: not known whether less is better; known: anything per second, {known}"
    )


def compare(rows: Sequence[Row], baseline: Sequence[Row], tolerance: float = TOLERANCE) -> Comparison:
    """Rows beside their baseline.

    Raises:
        UnsupportedOption: of other hardware, of a unit without a direction, or with nothing in common.
    """
    ours, theirs = _by_key(rows), _by_key(baseline)
    for row in baseline:
        if (mine := this_hardware()) != row.hardware:
            raise UnsupportedOption(f"the baseline is of {_named(row.hardware)}, this is {_named(mine)}")
    common = [key for key in ours if key in theirs]
    if not common:
        raise UnsupportedOption(
            f"no row of the baseline has the case and config of one of these {len(ours)}: was it run with other "
            "options?"
        )
    changes = [_change(ours[key], theirs[key]) for key in common]
    return Comparison(
        changes,
        [row.case for key, row in ours.items() if key not in theirs],
        [row.case for key, row in theirs.items() if key not in ours],
        tolerance,
    )


def _change(row: Row, before: Row) -> Change:
    if before.p50 == 0.0:
        raise UnsupportedOption(
            f"{before.case}: the baseline's median is 0, which nothing can be compared with"
        )
    worse = (row.p50 - before.p50) / abs(before.p50)
    noise = math.hypot(row.p80 - row.p20, before.p80 - before.p20) / 2.0 / abs(before.p50)
    return Change(row, before, worse if less_is_better(row.unit) else -worse, noise)


def _by_key(rows: Sequence[Row]) -> dict[tuple[str, str, str, bytes], Row]:
    found = {_key(row): row for row in rows}
    if len(found) < len(rows):
        raise UnsupportedOption(f"{len(rows)} rows hold {len(found)} cases: one would hide another")
    return found


def _key(row: Row) -> tuple[str, str, str, bytes]:
    return row.bench, row.case, row.unit, msgspec.json.encode(row.config, order="sorted")


def _named(hardware: Hardware) -> str:
    accelerator = f", {hardware.accelerator}" if hardware.accelerator else ""
    return f"{hardware.cpu}, {hardware.cores} cores, {hardware.memory_gib:g} GiB{accelerator}"


def baseline_of(bench: str, hardware: Hardware | None = None) -> Path:
    """The file of this machine's baseline of a bench."""
    hardware = hardware or this_hardware()
    tag = re.sub(r"[^a-z0-9]+", "-", f"{hardware.cpu} {hardware.cores} cores {hardware.accelerator}".lower())
    return BASELINES / f"{bench}-{tag.strip('-')}.jsonl"


def read_baseline(bench: str, name: str) -> list[Row]:
    """Rows of a file, or of "baseline": this machine's.

    Raises:
        UnsupportedOption: there is none, or it holds no rows.
    """
    path = baseline_of(bench) if name == "baseline" else Path(name)
    try:
        rows = [row for row in read_rows(path) if row.bench == bench]
    except OSError as error:
        hint = "; --keep-baseline makes one" if name == "baseline" else ""
        raise UnsupportedOption(f"--compare {name}: {path} cannot be read: {error.strerror}{hint}") from None
    except msgspec.MsgspecError as error:
        raise UnsupportedOption(f"--compare {name}: {path} holds no rows of a bench: {error}") from None
    if not rows:
        raise UnsupportedOption(f"--compare {name}: {path} holds no rows of {bench}")
    return rows


def keep_baseline(bench: str, rows: Sequence[Row]) -> Path:
    """Write this machine's baseline."""
    path = baseline_of(bench)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(rows, path)
    return path


def comparison_table(comparison: Comparison) -> Table:
    """A line for each row that both have."""
    table = Table(title="against the baseline (medians)", title_justify="left")
    for column in ("case", "unit", "before", "now", "worse by", "noise", ""):
        table.add_column(column, justify="left" if column in ("case", "unit", "") else "right")
    for change in comparison.changes:
        table.add_row(
            change.row.case,
            change.row.unit,
            f"{change.before.p50:.4g}",
            f"{change.row.p50:.4g}",
            f"{change.worse:+.1%}",
            f"{change.noise:.1%}",
            "regressed" if change.regressed(comparison.tolerance) else "",
        )
    return table
