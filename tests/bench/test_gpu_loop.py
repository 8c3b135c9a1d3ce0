"""The GPU script's whole loop, rehearsed on the CPU with real processes; and that it finds what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headway.types import StepRecord
from headway_bench.gpu import loop, run
from headway_bench.gpu.loop import Shape, faults
from headway_bench.harness import read_rows


def test_a_rehearsal_of_the_loop_is_checked_and_marks_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[StepRecord]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(loop, "REHEARSED", loop.REHEARSED[1:])
    monkeypatch.setattr(
        loop, "faults", lambda records, shape: (seen.append(records), faults(records, shape))[1]
    )
    assert run.main(["--loop", "--rehearse", "--out", str(tmp_path)]) == 0
    assert "every check that ran passed" in capsys.readouterr().out
    rows = read_rows(next(tmp_path.glob("gpu-loop-rehearsal-*.jsonl")))
    assert all(row.config["rehearsal"] is True for row in rows)
    assert {"loop/0.5B/trained", "loop/0.5B/max |pi - mu| at lag 0"} <= {row.case for row in rows}

    (records,), shape = seen, loop.REHEARSED[0]
    check_that_faults_are_found(records, shape)


def check_that_faults_are_found(records: list[StepRecord], shape: Shape) -> None:
    def changed(**values: Any) -> list[StepRecord]:
        return [*records[:-1], msgspec.structs.replace(records[-1], **values)]

    assert faults(records, shape) == []
    assert "3 updates of 4" in faults(records[:-1], shape)[0]
    assert "had lag 3" in faults(changed(lag_max=3), shape)[0]
    assert "ESS nan" in faults(changed(ess=float("nan")), shape)[0]
    assert "skipped True" in faults(changed(skipped=True), shape)[0]
    lost = {**records[-1].tickets, "trained": 1}
    assert "do not add up" in faults(changed(tickets=lost), shape)[0]
    uncompared = [msgspec.structs.replace(records[0], start_check={}), *records[1:]]
    assert faults(uncompared, shape) == ["both sides' log-probs were not compared"]
