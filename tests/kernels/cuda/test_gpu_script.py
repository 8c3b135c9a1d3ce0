"""The GPU script's checks and timings of the CUDA kernels, gone through on the emulated ones."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from headway_bench.gpu import checks, limits, memory_times
from headway_bench.gpu.context import Context
from headway_bench.gpu.report import Report
from headway_bench.harness import read_rows

pytestmark = pytest.mark.cuda_emulated


def test_its_checks_pass_and_every_case_is_timed(tmp_path: Path) -> None:
    report = Report(tmp_path, "small", "emulated", is_rehearsal=True)
    context = Context(torch.device("cpu"), True, time.monotonic() + 300, report)
    checks.run(context)
    limits.measure(context)
    memory_times.run(context)
    assert not context.wrong
    assert all(note.startswith(("policy_loss on triton", "segment_scan on triton")) for note in report.notes)
    cases = [row.case for row in read_rows(tmp_path / "small.jsonl")]
    for start, count in (("weight_delta", 7), ("pack_cast", 4), ("segment_scan", 2), ("policy_loss", 1)):
        assert (
            sum(case.startswith(start) and ("cpu" not in case.split("/")[-1]) for case in cases) >= count
        ), cases
