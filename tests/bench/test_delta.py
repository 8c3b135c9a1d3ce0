"""The delta bench: what it counts as bytes, what it judges, and that what it times ends in the right state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headway.errors import RunFailed
from headway_bench import delta
from headway_bench.harness import make_row, read_rows, wide_console


@pytest.fixture(autouse=True)
def _threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_bytes_are_those_that_must_move() -> None:
    size = 100_000
    state = delta.State.random(size, 0.01)
    changed = state.fresh.view(torch.int16) != state.published.view(torch.int16)
    assert state.delta.num_changed == int(changed.sum()) > 900
    lines = len({at // 32 for at in changed.nonzero()[:, 0].tolist()})
    payload = 4 * state.delta.num_changed
    assert state.bytes_of("memcpy") == 4 * size
    assert state.bytes_of("cast_and_diff") == 8 * size + payload
    assert state.bytes_of("encode (torch)") == 4 * size + payload
    assert state.bytes_of("apply") == 128 * lines + payload


def test_the_bench_runs_and_saves_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "MILLION", 70_000)
    arguments = ["--millions", "1", "--density", "1", "--threads", "1", "--rounds", "2"]
    delta.run_bench(delta.parse_options([*arguments, "--results", str(tmp_path)]), wide_console())
    rows = {row.case: row for row in read_rows(next(tmp_path.glob("delta-*/rows.jsonl")))}
    ours, theirs = rows["1M/1/1t/apply"], rows["1M/1/1t/apply (torch)"]
    assert ours.config["elements"] == 70_000
    expected = [b / a for a, b in zip(ours.values, theirs.values, strict=True)]
    assert ours.ratios["torch over ours"].p50 == pytest.approx(sum(expected) / 2)
    assert len(rows) == 7


def test_a_contestant_that_ends_elsewhere_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "apply_delta", lambda *_: None)
    with pytest.raises(RunFailed, match="apply did not end in the new state"):
        delta.measure(delta.State.random(1000, 0.5), 1)


def test_a_share_is_of_the_memcpy_or_below_one_per_cent_of_a_scatter() -> None:
    def row(name: str, share: float, over: float):
        ratios = {"share of memcpy": [share], "torch over ours": [over]}
        return make_row("delta", f"16M/{name}", "ms", [1.0], config={}, ratios=ratios)

    rows = [row("cast_and_diff", 0.5, 9.0), row("apply", 0.5, 1.0), row("encode", 0.1, 0.1)]
    assert delta.below_bar(rows, 1e-4) == ["16M/cast_and_diff: share of memcpy 0.50 (0.50 to 0.50)"]
    assert len(delta.below_bar(rows, 0.01)) == 2
    assert len(delta.below_bar([row("apply", 0.9, 0.5)], 1e-4)) == 1
    assert delta.below_bar([row("apply", 0.61, 0.1)], 1.0) == []


@pytest.mark.parametrize("arguments", [["--density", "0"], ["--rounds", "0"], ["--millions", "0"]])
def test_what_the_bench_cannot_run_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        delta.parse_options(arguments)
