"""What every bench shares: interleaving, quantiles, ratios within a round, rows on disk, a table on screen.

Figures of a shared machine drift by tens of per cent within minutes. So contestants take turns, a ratio
is formed within a round and only then summarised, and a row carries all its values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.table import Table

from headway.errors import HeadwayError, UnsupportedOption
from headway_bench.machine import Hardware, installed_versions, this_commit, this_hardware

Contestant = TypeVar("Contestant")
REDIRECTED_WIDTH = 160


class Quantiles(msgspec.Struct, frozen=True):
    """The 20th, 50th and 80th percentile of some values."""

    p20: float
    p50: float
    p80: float

    def format(self, digits: int = 2) -> str:
        """`p50 (p20 to p80)`."""
        return f"{self.p50:.{digits}f} ({self.p20:.{digits}f} to {self.p80:.{digits}f})"


class Row(msgspec.Struct, frozen=True):
    """One figure of one bench, a line of JSON.

    Attributes:
        bench: the bench's name on the command line.
        case: what was measured, such as "w1/headway".
        unit: of the values, such as "samples/s".
        values: one per round, in order.
        p20, p50, p80: of the values.
        ratios: by name, quantiles of the ratio formed within each round: against a rival, or against a
            physical
            limit measured in the same run ("share of memcpy").
        config: what the case was set to.
        commit, hardware, versions, recorded_at: where and when.
    """

    bench: str
    case: str
    unit: str
    values: list[float]
    p20: float
    p50: float
    p80: float
    ratios: dict[str, Quantiles]
    config: dict[str, str | float | int | bool]
    commit: str
    hardware: Hardware
    versions: dict[str, str]
    recorded_at: str


_recorders: list[list[Row]] = []


def interleave(contestants: Sequence[Contestant], rounds: int) -> Iterator[tuple[int, Contestant]]:
    """Every contestant once a round, the order rotated by one each round: A B C, B C A, C A B, ...

    Rotation keeps one contestant from always running after the same one, in its heat and its page cache.

    Yields:
        (round, contestant), rounds counted from 0.

    Raises:
        UnsupportedOption: fewer than one round.
    """
    if rounds < 1:
        raise UnsupportedOption(f"rounds = {rounds}, expected at least 1")
    count = len(contestants)
    for turn in range(rounds):
        for place in range(count):
            yield turn, contestants[(turn + place) % count]


def quantiles(values: Sequence[float]) -> Quantiles:
    """Percentiles by linear interpolation between the order statistics (numpy's default rule).

    Raises:
        UnsupportedOption: no values.
    """
    if not values:
        raise UnsupportedOption("quantiles of no values; a case needs at least one round")
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return Quantiles(at(0.2), at(0.5), at(0.8))


def ratios_by_round(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """ours / theirs for every round that both have, in order of rounds; others do not count."""
    return [ours[turn] / theirs[turn] for turn in sorted(ours.keys() & theirs.keys())]


def make_row(
    bench: str,
    case: str,
    unit: str,
    values: Sequence[float],
    *,
    config: Mapping[str, str | float | int | bool],
    ratios: Mapping[str, Sequence[float]] | None = None,
    versions: Mapping[str, str] | None = None,
) -> Row:
    """A row of this machine, this commit and this moment.

    Args:
        ratios: by name, the per-round ratios.
        versions: of what ran, if not this process's own packages.
    """
    spread = quantiles(values)
    return Row(
        bench=bench,
        case=case,
        unit=unit,
        values=list(values),
        p20=spread.p20,
        p50=spread.p50,
        p80=spread.p80,
        ratios={name: quantiles(each) for name, each in (ratios or {}).items() if each},
        config=dict(config),
        commit=this_commit(),
        hardware=this_hardware(),
        versions=dict(versions) if versions is not None else installed_versions(),
        recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def exit_status(run: Callable[[], bool]) -> int:
    """Runs a bench; 0: every bar and claim held, 1: one did not, 2: it could not run, and why is on stderr."""
    try:
        return 0 if run() else 1
    except HeadwayError as error:
        print(error, file=sys.stderr)
        return 2


def wide_console() -> Console:
    """The terminal, or where the output goes to a file a width that no table has to fold into."""
    console = Console()
    return console if console.is_terminal else Console(width=REDIRECTED_WIDTH)


def results_folder(base: Path, bench: str) -> Path:
    """A fresh folder `base/BENCH-DATE-TIME[-N]` for the results of one run."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{number}" for number in range(1, 100))):
        folder = base / f"{bench}-{stamp}{suffix}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise UnsupportedOption(f"{base} already holds 100 runs of {bench} of this second; give another folder")


@contextmanager
def recording() -> Generator[list[Row]]:
    """The rows that are written meanwhile."""
    rows: list[Row] = []
    _recorders.append(rows)
    try:
        yield rows
    finally:
        _recorders.remove(rows)


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Write rows as JSON lines, replacing the file."""
    for recorder in _recorders:
        recorder.extend(rows)
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def read_rows(path: Path) -> list[Row]:
    """Rows written by write_rows.

    Raises:
        msgspec.ValidationError: a line lacks a field or holds another type.
    """
    return [msgspec.json.decode(line, type=Row) for line in path.read_bytes().splitlines() if line.strip()]


def rows_table(title: str, rows: Sequence[Row]) -> Table:
    """The rows as a table: case, p50 with p20 and p80, every ratio."""
    names = sorted({name for row in rows for name in row.ratios})
    table = Table(title=title, title_justify="left")
    table.add_column("case")
    table.add_column("unit")
    for column in ("p50 (p20 to p80)", *names, "rounds"):
        table.add_column(column, justify="right")
    for row in rows:
        shown = [row.ratios[name].format() if name in row.ratios else "" for name in names]
        spread = Quantiles(row.p20, row.p50, row.p80)
        digits = 1 if spread.p50 < 1000 else 0
        table.add_row(row.case, row.unit, spread.format(digits), *shown, str(len(row.values)))
    return table
