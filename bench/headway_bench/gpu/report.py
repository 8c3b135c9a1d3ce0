"""Rows of the GPU script, in the fields of harness.Row, written without msgspec; and the table that people read.

A row is written as soon as it is there: a section that hangs or dies takes no figure of an earlier one with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from headway_bench.machine import Hardware, installed_versions, this_commit, this_hardware

PACKAGES = ("headway", "torch", "triton", "liger-kernel", "cut-cross-entropy", "flash-attn")
Setting = str | float | int | bool


@dataclass(frozen=True)
class Quantiles:
    """As harness.Quantiles."""

    p20: float
    p50: float
    p80: float


@dataclass(frozen=True)
class Row:
    """One figure; the fields of harness.Row, which reads what this writes."""

    bench: str
    case: str
    unit: str
    values: list[float]
    p20: float
    p50: float
    p80: float
    ratios: dict[str, Quantiles]
    config: dict[str, Setting]
    commit: str
    hardware: Hardware
    versions: dict[str, str]
    recorded_at: str


def spread(values: Sequence[float]) -> Quantiles:
    """The 20th, 50th and 80th percentile, by linear interpolation."""
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return Quantiles(at(0.2), at(0.5), at(0.8))


class Report:
    """Collects rows and notes and writes them as they come.

    Args:
        folder: where NAME.jsonl and NAME.md go; None writes nothing.
        name: of the files. accelerator: the GPU, in words.
        commit: where the tree has no git to ask.
        is_rehearsal: marks every row as no measurement.
    """

    def __init__(
        self, folder: Path | None, name: str, accelerator: str, *, is_rehearsal: bool, commit: str = ""
    ) -> None:
        self._folder, self._name, self._is_rehearsal = folder, name, is_rehearsal
        self._hardware = replace(this_hardware(), accelerator=accelerator)
        self._commit = commit or this_commit()
        found = installed_versions(PACKAGES)
        self._versions = {name: each for name, each in found.items() if each != "source" or name == "headway"}
        self.rows: list[Row] = []
        self.notes: list[str] = []
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._path("jsonl").write_text("", encoding="utf-8")

    def _path(self, kind: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{self._name}.{kind}"

    def add(
        self,
        case: str,
        unit: str,
        values: Sequence[float],
        *,
        config: Mapping[str, Setting],
        ratios: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Adds a figure and prints it. ratios: by name, one value a round."""
        middle = spread(values)
        row = Row(
            bench="gpu", case=case, unit=unit, values=list(values), p20=middle.p20, p50=middle.p50, p80=middle.p80,
            ratios={name: spread(each) for name, each in (ratios or {}).items() if each},
            config={**config, "rehearsal": True} if self._is_rehearsal else dict(config),
            commit=self._commit, hardware=self._hardware, versions=self._versions,
            recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )  # fmt: skip
        self.rows.append(row)
        shown = "  ".join(f"{name} {quantile.p50:.2f}" for name, quantile in row.ratios.items())
        print(f"  {case:<44} {row.p50:12.4g} {unit:<8} {shown}", flush=True)
        if self._folder is not None:
            with self._path("jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")

    def note(self, text: str) -> None:
        """A line for the table's foot, once: what was left out, what failed."""
        if text not in self.notes:
            self.notes.append(text)
            print(f"  {text}", flush=True)

    def goal(self, what: str, *, met: bool) -> None:
        """A line that says whether a goal was met."""
        self.note(f"goal {'met' if met else 'MISSED'}: {what}")

    def finish(self, title: str) -> None:
        """Writes the table."""
        if self._folder is not None:
            self._path("md").write_text(self.table(title), encoding="utf-8")

    def describe_files(self) -> str:
        """Where the rows are."""
        return (
            "nothing written"
            if self._folder is None
            else f"{len(self.rows)} rows in {self._path('jsonl')} and .md"
        )

    def table(self, title: str) -> str:
        """Every row as Markdown: case, median with its spread, ratios; the notes below."""
        head = (
            f"# {title}\n\n{self._hardware.accelerator}; {self._hardware.cpu}, {self._hardware.cores} cores; "
        )
        head += ", ".join(f"{name} {version}" for name, version in self._versions.items())
        lines = [head + f"; commit {self._commit}.\n"]
        if self._is_rehearsal:
            lines.append("A rehearsal on the CPU at tiny sizes: no measurement of anything.\n")
        lines += ["| case | p50 (p20 to p80) | unit | ratios (p50) | rounds |", "|---|---:|---|---|---:|"]
        for row in self.rows:
            ratios = ", ".join(f"{name} {each.p50:.2f}" for name, each in row.ratios.items())
            figure = f"{row.p50:.4g} ({row.p20:.4g} to {row.p80:.4g})"
            lines.append(f"| {row.case} | {figure} | {row.unit} | {ratios} | {len(row.values)} |")
        lines += ["", *(f"- {note}" for note in self.notes), ""]
        return "\n".join(lines)


def shares(limit: float, values: Sequence[float]) -> list[float]:
    """limit / value of each round: the share of the physical limit, for times."""
    return [limit / value for value in values]


def middle(values: Sequence[float]) -> float:
    """The median."""
    return float(median(values))
