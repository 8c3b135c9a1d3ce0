"""The bench of recording times a real run: every update and decode step of it, and less of it than there is."""

from __future__ import annotations

from pathlib import Path

from headway_bench.record import PAIRS, config_of, measure


def test_what_recording_took_is_within_its_update(tmp_path: Path) -> None:
    costs = measure(config_of(tmp_path / "run", samples=16, steps=3), warmup=1)
    assert len(costs.updates) == len(costs.recording) == 2
    assert all(0.0 < took < whole for took, whole in zip(costs.recording, costs.updates, strict=True))
    assert len(costs.decode) > 3 * 3  # each update decodes more than three tokens
    assert min(costs.pairs) > 0.0
    lines = (tmp_path / "run" / "spans" / "g0.jsonl").read_bytes().splitlines()
    assert len(lines) > 2 * PAIRS  # each change of state ended a slice, and it was written
