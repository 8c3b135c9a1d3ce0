"""The trade-off that a study found: tokens per second against lag, one self-contained HTML page."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.errors import UnsupportedOption
from headway.tune.study import Trial, describe


def require_plotly() -> Any:
    """Plotly's graph objects.

    Raises:
        UnsupportedOption: it is not installed.
    """
    try:
        return importlib.import_module("plotly.graph_objects")
    except ImportError:
        raise UnsupportedOption(
            "the picture needs plotly, which is not installed: pip install 'headway[tune]'"
        ) from None


def draw(trials: Sequence[Trial], best: Trial | None, title: str, target: Path) -> None:
    """Write the page.

    Raises:
        UnsupportedOption: Plotly is not installed.
    """
    graphs = require_plotly()
    shown = [(trial, trial.outcome) for trial in trials if trial.outcome is not None]
    marks = ["star" if best is not None and trial.number == best.number else "circle" for trial, _ in shown]
    figure = graphs.Figure(
        graphs.Scatter(
            x=[outcome.lag_mean for _, outcome in shown],
            y=[outcome.tokens_per_s for _, outcome in shown],
            mode="markers+text",
            text=[str(trial.number) for trial, _ in shown],
            textposition="top center",
            hovertext=[describe(trial) for trial, _ in shown],
            hoverinfo="text",
            marker={
                "symbol": marks,
                "size": [18 if mark == "star" else 10 for mark in marks],
                "color": [outcome.reward for _, outcome in shown],
                "colorscale": "Viridis",
                "showscale": True,
                "colorbar": {"title": {"text": "reward"}},
                "line": {
                    "width": 1.5,
                    "color": ["#d62828" if not trial.kept else "#1d2433" for trial, _ in shown],
                },
            },
        )
    )
    figure.update_layout(
        title=f"{title}: trained tokens per second against lag (star: the best; red rim: a limit is not kept)",
        xaxis_title="mean lag of a trained token, optimizer steps",
        yaxis_title="trained tokens per second",
        yaxis_rangemode="tozero",
    )
    figure.write_html(str(target), include_plotlyjs=True)
