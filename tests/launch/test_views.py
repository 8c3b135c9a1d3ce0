"""What a user sees while a run goes on."""

import io
import typing
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from headway.config import load_recipe
from headway.launch import PlainView
from headway.launch.live import LiveView, sparkline
from headway.launch.tally import Tally
from headway.types import StepRecord, TimeSplit

CONFIG = load_recipe(None, {"model.path": "builtin:sort", "env.name": "sort", "steps": 40})


def record(**changes: Any) -> StepRecord:
    empty = {int: 0, float: 0.0, bool: False, TimeSplit: TimeSplit(6.0, 1.0, 2.5, 0.5), list: [], dict: {}}
    kinds = {
        field.name: typing.get_origin(field.type) or field.type
        for field in msgspec.structs.fields(StepRecord)
    }
    values: dict[str, Any] = {name: empty[kind] for name, kind in kinds.items()}
    return StepRecord(
        **{**values, "step": 3, "reward": 0.5, "lag_histogram": [3, 1], "lag_max": 1, **changes}
    )


def test_the_plain_view_is_one_line_a_step() -> None:
    out = io.StringIO()
    view = PlainView(CONFIG, Path("/runs/x"), out)
    view.step(record(dropped={"stale": 2}, tokens_per_s=1234.4, in_flight=7))
    view.note("generator-0 \x1b[31mdied")
    view.finish(Tally().status("stopped", "interrupted by Ctrl-C"))
    lines = out.getvalue().splitlines()
    assert lines[0] == (
        "step 3/40  reward 0.500  lag 0.00 (max 1)  ess 0.00  trained 1,234 tok/s  generated 0 tok/s  "
        "idle learner 25% generator 25%  in flight 7 buffered 0  dropped 2"
    )
    assert lines[1] == "note: generator-0 \\e[31mdied"
    assert lines[2].startswith("stopped after 0 of 40 updates")
    assert lines[-1] == "run folder: /runs/x"


def test_the_live_view_shows_every_quantity_and_no_markup_of_others() -> None:
    out = io.StringIO()
    view = LiveView(CONFIG, Path("/runs/x"), Console(file=out, force_terminal=True, width=140))
    view.note("[red]not markup[/red] \x1b]0;title\x07")
    view.step(record(dropped={"[bold]": 2}, buffered=5, generators=2))
    view.finish(Tally().status("finished", ""))
    shown = out.getvalue()
    for word in (
        "step 3/40",
        "reward",
        "75 %",
        "5 buffered",
        "tokens/s",
        "idle 25%",
        "2 x decoding",
        "[bold] 2",
    ):
        assert word in shown
    assert "[red]not markup[/red] \\e]0;title\\x07" in shown
    assert "run folder: /runs/x" in shown


def test_a_sparkline_spans_its_values() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.3, 0.3]) == "▁▁"
    assert sparkline([0.0, float("nan"), 1.0]) == "▁·█"
    assert sparkline([]) == ""


def test_a_tally_adds_up_what_a_dead_learner_cannot_say() -> None:
    tally = Tally()
    for step in range(1, 13):
        tally.add(
            record(step=step, elapsed_s=2.0 * step, reward=float(step), num_trajectories=4, num_tokens=4)
        )
    status = tally.status("failed", "gone")
    assert (status.step, status.wall_s, status.samples_per_s, status.max_lag_seen) == (12, 24.0, 2.0, 1)
    assert (status.lag_histogram, status.reward_last_10) == ([36, 12], 7.5)
    assert status.learner == TimeSplit(72.0, 12.0, 30.0, 6.0)
