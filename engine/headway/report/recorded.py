"""Figures and tables of what is no column of the rows: the timeline of each process, and what the journal says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.report.figures import PART_COLOURS, Figure, escape, figure
from headway.report.groups import Groups, LagSplit
from headway.report.processes import MAX_PROCESSES, PARTS, Process
from headway.telemetry.sanitise import printable

MAX_SLICES = 2000  # drawn, of all processes together
_ORDER = ("idle", "other", "work", "push")  # within a slice, whose parts were not told in order


def timeline(processes: Sequence[Process]) -> list[Figure]:
    """A lane for each process; none where the run did not record it."""
    drawn = [(process, process.coarse(MAX_SLICES // len(processes))) for process in processes]
    if not any(len(slices) for _, slices in drawn):
        return []
    start = min(float(slices[0, 0]) for _, slices in drawn if len(slices))
    bars: dict[str, tuple[list[str], list[float], list[float]]] = {part: ([], [], []) for part in _ORDER}
    for process, slices in drawn:
        for row in slices.tolist():
            at, seconds = row[0] - start, dict(zip(PARTS, row[2:], strict=True))
            for part in _ORDER:
                if seconds[part] > 0.0:
                    lanes, begins, lengths = bars[part]
                    lanes.append(escape(printable(process.name)))
                    begins.append(round(at, 4))
                    lengths.append(round(seconds[part], 4))
                    at += seconds[part]
    traces: list[dict[str, Any]] = [
        {
            "type": "bar", "orientation": "h", "name": part, "y": lanes, "base": begins, "x": lengths,
            "marker": {"color": PART_COLOURS[part], "line": {"width": 0}},
            "hovertemplate": "%{y}: " + part + " %{x:.4f} s from second %{base:.3f}<extra></extra>",
        }
        for part, (lanes, begins, lengths) in bars.items()
    ]  # fmt: skip
    note = (
        "Train or generate (work), push, wait (idle). Where states change within milliseconds, and in long runs, "
        "neighbours share a slice and their order in it is lost, their sums are not."
    )
    if len(processes) == MAX_PROCESSES:
        note += f" The first {MAX_PROCESSES} processes are shown."
    layout = {
        "barmode": "overlay", "bargap": 0.25, "hovermode": "closest",
        "xaxis": {"title": {"text": "seconds since the first process began"}},
        "yaxis": {"autorange": "reversed", "automargin": True, "type": "category"},
    }  # fmt: skip
    return [figure("timeline", "What each process did when", note, traces, layout, wide=True)]


def journal_figures(groups: Groups) -> list[Figure]:
    """What the journal says, drawn."""
    return [*_lag(groups.lag), *_deciles(groups)]


def _lag(lag: LagSplit) -> list[Figure]:
    if not len(lag.steps):
        return []
    note = (
        "Mean over the trained trajectories of the lag of their oldest token: updates while it was sampled and sent "
        "(in flight), and updates that it then waited in the buffer (in queue)."
    )
    traces = [
        {
            "type": "scatter", "mode": "lines", "name": name, "x": lag.steps.tolist(), "stackgroup": "one",
            "y": [round(value, 4) for value in values.tolist()], "line": {"width": 0.5},
        }
        for name, values in (("in flight", lag.in_flight), ("in queue", lag.in_queue))
    ]  # fmt: skip
    layout = {"xaxis": {"title": {"text": "update"}}, "yaxis": {"title": {"text": "updates"}}}
    return [figure("lag_split", "Where lag arose", note, traces, layout)]


def _deciles(groups: Groups) -> list[Figure]:
    if not groups.deciles:
        return []
    labels = [
        str(part.shortest) if part.shortest == part.longest else f"{part.shortest}-{part.longest}"
        for part in groups.deciles
    ]
    share = [round(100.0 * part.trained / part.count, 3) for part in groups.deciles]
    counts = [f"{part.trained} of {part.count}" for part in groups.deciles]
    note = (
        "Trajectories in ten parts by length; the share of each part that was trained. A share that falls to the "
        "right means that long completions are lost."
    )
    traces = [
        {
            "type": "bar", "name": "trained", "x": labels, "y": share, "customdata": counts,
            "hovertemplate": "%{x} tokens: %{customdata} trained<extra></extra>",
        }
    ]  # fmt: skip
    layout = {
        "hovermode": "closest", "xaxis": {"title": {"text": "sampled tokens"}, "type": "category"},
        "yaxis": {"ticksuffix": " %", "range": [0, 100]},
    }  # fmt: skip
    return [figure("length_bias", "Length bias: trained against generated", note, traces, layout)]


def slowest_table(groups: Groups) -> tuple[str, list[str], list[list[str]]]:
    """Title, head and rows of the slowest groups."""
    rows = [
        [
            str(group.ticket_id), f"{group.seconds:.2f} s", str(group.members), str(group.longest),
            str(group.tokens), group.state,
        ]
        for group in groups.slowest
    ]  # fmt: skip
    head = ["group", "ticket to last member", "members", "longest", "sampled tokens", "what became of it"]
    return "Slowest groups", head, rows
