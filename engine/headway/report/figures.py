"""The figures of the page, as Plotly's traces and layouts, which name the columns that they draw.

The page puts the column in place of {"column": NAME}, summed over stretches of rows where `binned` is set, and the
chosen x axis (updates or seconds) under it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypedDict

from headway.report.columns import MAX_LAGS

Trace = dict[str, Any]
PART_COLOURS = {"work": "#2a9d8f", "push": "#e9c46a", "idle": "#d62828", "other": "#8d99ae"}
_SIDES = (
    ("learner", "Where the learner's time went", "training"),
    ("generator", "Where the generators' time went (mean over the live ones)", "decoding"),
)


class Figure(TypedDict):
    """One figure: its id on the page, its heading, what it shows, its traces, its layout, and its width."""

    id: str
    title: str
    note: str
    traces: list[Trace]
    layout: dict[str, Any]
    wide: bool


def figures(names: Collection[str]) -> list[Figure]:
    """Those for which the run has data, in the order of the page.

    Args:
        names: of the columns.
    """
    if "step" not in names:
        return []
    return [
        figure("reward", "Reward", "Mean and standard deviation over what was sampled for the update.",
                [_line("reward", "reward"), _line("reward_std", "standard deviation", opacity=0.4)]),
        _lag(names),
        figure("lag_mean", "Lag of the trained tokens", "In optimizer steps.",
                [_line("lag_mean", "mean"), _line("lag_max", "largest")]),
        figure("ess", "Effective sample size and importance ratios",
                "ESS as a share of 1 (left); ratios (right, logarithmic).",
                [_line("ess", "ESS"), _line("ratio_mean", "mean ratio", yaxis="y2"),
                 _line("ratio_max", "largest ratio", yaxis="y2"), _line("clip_share", "clipped share"),
                 _line("rejected_share", "rejected share")],
                {"yaxis": {"range": [0, 1.05]},
                 "yaxis2": {"type": "log", "overlaying": "y", "side": "right", "showgrid": False}}),
        figure("tokens", "Tokens per second", "Trained, and received from the generators.",
                [_line("tokens_per_s", "trained"), _line("generated_per_s", "received")]),
        *(_split(*side) for side in _SIDES),
        figure("waiting", "Waiting between the two sides",
                "Groups in the buffer, tickets at the generators, live generators; seconds in the queue (right).",
                [_line("buffered", "buffered"), _line("in_flight", "in flight"), _line("generators", "generators"),
                 _line("queue_s", "seconds in the queue", yaxis="y2")],
                {"yaxis2": {"overlaying": "y", "side": "right", "showgrid": False, "rangemode": "tozero"}}),
        *_dropped(names),
        figure("lengths", "Completions", "Mean sampled tokens (left); shares (right).",
                [_line("completion_tokens", "tokens"), _line("stop_share", "finished by a stop", yaxis="y2"),
                 _line("duplicate_share", "duplicates in their group", yaxis="y2")],
                {"yaxis2": {"overlaying": "y", "side": "right", "showgrid": False, "range": [0, 1.05]}}),
        figure("optimisation", "Optimisation", "Loss, entropy and KL (left); gradient norm (right).",
                [_line("loss", "loss"), _line("entropy", "entropy"), _line("kl_behaviour", "KL to the behaviour"),
                 _line("kl_reference", "KL to the reference"), _line("grad_norm", "gradient norm", yaxis="y2")],
                {"yaxis2": {"overlaying": "y", "side": "right", "showgrid": False, "rangemode": "tozero"}}),
        figure("push", "Weight pushes",
                "Seconds to publish, from there to a generator's ack, and of its pause (left); share of the elements "
                "that changed (right).",
                [_line("push_s", "publish"), _line("ack_s", "to the ack"), _line("pause_s", "pause"),
                 _line("changed_share", "changed share", yaxis="y2")],
                {"yaxis2": {"overlaying": "y", "side": "right", "showgrid": False, "range": [0, 1.05]}}),
    ]  # fmt: skip


def figure(
    name: str,
    title: str,
    note: str,
    traces: Sequence[Trace],
    layout: Mapping[str, Any] | None = None,
    *,
    wide: bool = False,
) -> Figure:
    """A figure, half as wide as the page or as wide as it."""
    return Figure(id=name, title=title, note=note, traces=list(traces), layout=dict(layout or {}), wide=wide)


def _line(column: str, label: str, **more: Any) -> Trace:
    return {"type": "scatter", "mode": "lines", "name": label, "y": {"column": column}, **more}


def _stack(column: str, label: str, percent: bool, **more: Any) -> Trace:
    norm = {"groupnorm": "percent"} if percent else {}
    shape: dict[str, Any] = {"width": 0.5, "shape": "vh"} if percent else {"width": 0.5}
    return _line(column, escape(label), stackgroup="one", binned=percent, line=shape, **norm, **more)


def _lag(names: Collection[str]) -> Figure:
    lags = [lag for lag in range(MAX_LAGS) if f"lag.{lag}" in names]
    labels = {lag: f"lag {lag}" + (" and more" if lag == MAX_LAGS - 1 else "") for lag in lags}
    return figure(
        "lag", "Lag histogram over time",
        "Share of the trained tokens by their lag in optimizer steps, over stretches of updates.",
        [_stack(f"lag.{lag}", labels[lag], percent=True) for lag in lags],
        {"yaxis": {"ticksuffix": " %", "range": [0, 100]}},
    )  # fmt: skip


def _split(side: str, title: str, work: str) -> Figure:
    return figure(
        f"time_{side}", title, "Shares of the wall time, over stretches of updates.",
        [
            _stack(f"{side}.{part}", work if part == "work" else part, percent=True, fillcolor=colour)
            for part, colour in PART_COLOURS.items()
        ],
        {"yaxis": {"ticksuffix": " %", "range": [0, 100]}},
    )  # fmt: skip


def _dropped(names: Collection[str]) -> list[Figure]:
    reasons = sorted(name for name in names if name.startswith("dropped."))
    if not reasons:
        return []
    traces = [_stack(name, name.removeprefix("dropped."), percent=False) for name in reasons]
    return [figure("dropped", "Dropped tickets by reason", "Since the start of the run.", traces)]


def escape(label: str) -> str:
    """A label that Plotly, which knows some HTML, shows letter by letter."""
    return label.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
