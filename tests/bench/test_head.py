"""The head bench: contestants compute the same, a bar is held by the best torch contestant, every part runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headway.errors import RunFailed
from headway_bench import head
from headway_bench.harness import read_rows, wide_console
from headway_bench.head_rivals import Rows, gradients
from headway_bench.peak_memory import peak_extra_mb
from headway_kernels import native

needs_native = pytest.mark.skipif(not native.available(), reason="no native library was built")


@pytest.fixture(autouse=True)
def _threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@needs_native
def test_the_bench_runs_and_saves_what_it_measured(tmp_path: Path) -> None:
    options = head.parse_options(
        ["--shape=128,16,300", "--threads=1", "--rounds=2", "--tasks=gradients", f"--results={tmp_path}"]
    )
    assert head.run_bench(options, wide_console()), "only the bar's own shape is judged"
    rows = {row.case: row for row in read_rows(next(tmp_path.glob("head-*/rows.jsonl")))}
    ours = rows["gradients/T128-H16-V300/1t/headway"]
    product = rows["gradients/T128-H16-V300/1t/product"]
    assert len(ours.values) == 2
    assert ours.ratios["over headway"].p50 == 1.0
    shares = [3 * a / b for a, b in zip(product.values, ours.values, strict=True)]
    assert ours.ratios["share of the products' rate"].p50 == pytest.approx(sum(shares) / 2)
    assert float(ours.config["peak_extra_mb"]) >= 0
    for name in ("full", "chunked", "eager"):
        assert f"gradients/T128-H16-V300/1t/{name}" in rows


def test_the_best_torch_contestant_is_the_one_of_the_least_median() -> None:
    seconds = {
        "headway": [1.0, 2.0, 1.0],
        "full": [2.0, 2.0, 9.0],
        "chunked": [1.5, 3.0, 8.0],
        "liger": [0.1, 0.1, 0.1],
        "product": [0.1, 0.1, 0.1],
    }
    assert head.speedup(seconds) == ("full", [2.0, 1.0, 9.0])


@needs_native
def test_contestants_that_disagree_are_not_timed() -> None:
    works = dict(gradients(Rows.random(128, 8, 40)))
    head.check_agreement("gradients", works)
    x_grad, weight_grad = works["full"]()
    with pytest.raises(RunFailed, match="off and full differ"):
        head.check_agreement(
            "gradients", {"full": works["full"], "off": lambda: (x_grad * 1.001, weight_grad)}
        )


@pytest.mark.parametrize(
    "arguments", [["--shape", "100,8,8"], ["--shape", "128,8"], ["--tasks", "backward"], ["--rounds", "0"]]
)
def test_what_the_bench_cannot_run_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        head.parse_options(arguments)


def test_a_peak_is_what_a_call_holds_at_once() -> None:
    def work() -> None:
        for _ in range(3):
            torch.ones(10_000_000)  # 40 MB, freed before the next

    peak_mb = min(peak_extra_mb(work) for _ in range(3))  # other threads of this process can only add
    assert 39 < peak_mb < 60
