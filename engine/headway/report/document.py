"""All that the page shows of a run, as one JSON document: words, tables, columns, figures."""

from __future__ import annotations

from typing import Any, TypedDict, cast

from headway.launch.closing import bottleneck, closing_lines
from headway.report.columns import Columns, Number, bins, columns
from headway.report.figures import Figure, figures
from headway.report.groups import Groups
from headway.report.recorded import journal_figures, slowest_table, timeline
from headway.report.rows import RunData
from headway.telemetry import printable
from headway.types import LearnerStatus

_PARTS = ("work", "push", "idle", "other")


class Table(TypedDict):
    """A table with its heading; cells are shown as they are."""

    title: str
    head: list[str]
    rows: list[list[str]]


class Document(TypedDict):
    """What page.js draws.

    Attributes:
        name: of the run; ended: whether more can come; lines: how it went, in words.
        what_if: the bottleneck's counterfactual.
        bins: the last row of each stretch over which histograms and time splits are summed.
    """

    name: str
    ended: bool
    lines: list[str]
    bottleneck: str
    what_if: str
    columns: Columns
    bins: list[int]
    figures: list[Figure]
    tables: list[Table]


def document(data: RunData, groups: Groups | None = None) -> Document:
    """What a run did.

    Args:
        groups: what its journal says; None: left out.
    """
    table = columns(data.steps)
    lines = [line for line in closing_lines(data.status, data.config, data.path) if line]
    if groups is not None and groups.fault:
        lines.append(f"what the journal says is left out: {printable(groups.fault)}")
    return Document(
        name=printable(data.config.name),
        ended=data.ended,
        lines=lines,
        bottleneck=bottleneck(data.status, data.config),
        what_if=one_more_generator(data.status, _generators(data)),
        columns=table,
        bins=bins(table),
        figures=[
            *timeline(data.processes),
            *figures(table),
            *(journal_figures(groups) if groups is not None else []),
        ],
        tables=[_time(data.status), *_slowest(groups), _changes(data), _skipped(data)],
    )


def one_more_generator(status: LearnerStatus, generators: int) -> str:
    """What another generator of the same kind would bring, from the idle times alone.

    Generation grows by its share of one in `generators` where those never waited, and training by no more than
    the learner's idle time leaves it: the smaller of both.
    """
    learner, generator = status.learner.shares(), status.generator.shares()
    if not generators or status.learner.total == 0.0 or status.generator.total == 0.0:
        return "unknown: no times were measured"
    by_generation = (generators + 1) / generators
    by_training = 1.0 / max(1e-9, 1.0 - learner.idle)
    gain = min(by_generation, by_training) - 1.0
    if generator.idle >= learner.idle:
        return "one more generator: +0 %, as the generators wait for the learner already"
    return (
        f"one more generator: about +{gain:.0%} tokens/s at most ({generators} generate now, and the learner "
        f"idled {learner.idle:.0%})"
    )


def _generators(data: RunData) -> int:
    return int(cast("Number", data.steps[-1]["generators"]) or 0) if data.steps else 0


def _time(status: LearnerStatus) -> Table:
    rows = [
        [
            side,
            *(f"{getattr(split, part):,.1f} s ({getattr(split.shares(), part):.0%})" for part in _PARTS),
        ]
        for side, split in (("learner", status.learner), ("generators (mean)", status.generator))
    ]
    return Table(title="Where the time went", head=["", *_PARTS], rows=rows)


def _slowest(groups: Groups | None) -> list[Table]:
    if groups is None:
        return []
    title, head, rows = slowest_table(groups)
    return [Table(title=title, head=head, rows=rows)]


def _changes(data: RunData) -> Table:
    rows = [
        [str(row["step"]), *(printable(str(change[name])) for name in ("key", "value", "source"))]
        for row in data.steps
        for change in cast("list[dict[str, Any]]", row.get("changes", []))
    ]
    return Table(title="Settings changed", head=["from update", "key", "value", "by"], rows=rows)


def _skipped(data: RunData) -> Table:
    rows = [[str(row["step"]), f"{cast('float', row['elapsed_s']):.1f}"] for row in data.skipped]
    return Table(title="Skipped: the gradient was not finite", head=["after update", "second"], rows=rows)
