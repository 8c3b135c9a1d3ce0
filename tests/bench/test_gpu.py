"""The GPU script without a GPU: what it says, its rehearsal, its budget, and that a wrong kernel is not timed."""

from __future__ import annotations

import ast
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from headway_bench.gpu import checks, head_times, memory_times, rivals, run, sanitize
from headway_bench.gpu.context import Context, OutOfTime
from headway_bench.gpu.report import Report
from headway_bench.harness import read_rows
from headway_kernels import registry

CPU = torch.device("cpu")
KERNELS = Path(registry.__file__).parent


def context(budget_s: float = 60.0, folder: Path | None = None, *, is_small: bool = True) -> Context:
    report = Report(folder, "test", "no GPU", is_rehearsal=is_small)
    return Context(CPU, is_small, time.monotonic() + budget_s, report)


def section(name: str, work: Any, least_s: float = 0.0, until: float = 1.0) -> run.Section:
    return run.Section(name, "about it", until, least_s, work)


def run_sections(here: Context, *sections: run.Section, budget_s: float = 60.0) -> list[str]:
    return run.run_sections(here, sections, time.monotonic(), budget_s)


def test_without_a_gpu_it_says_so_and_has_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main([]) == 3
    assert "no CUDA GPU is visible" in capsys.readouterr().out


def test_a_rehearsal_goes_through_every_section_and_marks_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["--rehearse", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert all(f"{each.name}:" in said for each in run.SECTIONS)
    rows = read_rows(next(tmp_path.glob("*.jsonl")))
    assert all(row.config["rehearsal"] is True and row.bench == "gpu" for row in rows)
    cases = " ".join(row.case for row in rows)
    for part in (
        "limit/copy",
        "head_loss_step T16 H32 / torch full logits",
        "head_logp",
        "segment_scan",
        "policy_loss",
    ):
        assert part in cases
    share = next(row for row in rows if row.case.startswith("head_loss_step")).ratios["share of limit"]
    assert 0 < share.p50 < 1.5
    assert ("rivals not installed" in said) == bool(rivals.missing())
    assert "no measurement of anything" in next(tmp_path.glob("*.md")).read_text()


def test_the_budget_leaves_out_what_it_names(capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []

    def half(_: Context) -> None:
        ran.append("half")
        raise OutOfTime("the rest of half")

    sections = [
        section("half", half),
        section("never", ran.append, least_s=1e6),
        section("late", ran.append, until=-1),
    ]
    assert run_sections(context(is_small=False), *sections) == ["the rest of half", "never", "late"]
    assert ran == ["half"]
    with pytest.raises(OutOfTime, match="a case"):
        context(budget_s=-1).check_time("a case")


def test_a_section_that_breaks_off_fails_the_run_and_the_next_goes_on() -> None:
    ran: list[Context] = []

    def broken(_: Context) -> None:
        raise ZeroDivisionError("planted")

    here = context()
    assert run_sections(here, section("broken", broken), section("next", ran.append)) == []
    assert here.wrong == {("broken", "section")}
    assert "planted" in here.report.notes[0]
    assert ran == [here]


def test_a_section_that_hangs_ends_the_process_with_its_table_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    codes: list[int] = []
    ended = threading.Event()

    def leave(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(run.os, "_exit", leave)
    monkeypatch.setattr(run, "GRACE_S", 0.01)
    run_sections(context(folder=tmp_path), section("hangs", lambda _: ended.wait(10)), budget_s=0.02)
    assert codes == [4]
    assert "section hangs did not end" in (tmp_path / "test.md").read_text()


def test_a_wrong_kernel_is_found_and_its_time_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = checks.segment_scan

    def wrong(*arguments: Any, **named: Any) -> Any:
        out = honest(*arguments, **named)
        return out._replace(target=out.target * 1.001) if arguments[1].dtype == torch.float32 else out

    here = context()
    here.copy_rate = 1.0
    monkeypatch.setattr(checks, "segment_scan", wrong)
    checks.check_segment_scan(here)
    names = here.backends("segment_scan")
    assert here.wrong == {("segment_scan", name) for name in names}
    assert any("WRONG: segment_scan" in note for note in here.report.notes)
    memory_times.time_segment_scan(here)
    assert not here.report.rows


@pytest.mark.parametrize(
    ("said", "code", "expected", "wrong"),
    [
        ("ERROR SUMMARY: 0 errors", 0, "memcheck: 0 errors", False),
        ("Invalid __global__ write\\nERROR SUMMARY: 2 errors", 9, "WRONG: memcheck", True),
        ("Device not supported", 1, "memcheck: no verdict, exit code 1: Device not supported", False),
    ],
)
def test_memcheck_s_verdict_is_read(
    said: str, code: int, expected: str, wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\nprintf '{said}\\n'\nexit {code}\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    here = context(is_small=False)
    sanitize.run(here)
    assert expected in here.report.notes[0]
    assert len(here.report.notes) == 2  # racecheck's too
    assert bool(here.wrong) == wrong


def test_contestants_take_turns_and_one_that_raises_is_noted() -> None:
    order: list[str] = []

    def broken() -> None:
        raise RuntimeError("cannot")

    here = context()
    times = here.interleaved(
        {"a": lambda: order.append("a"), "broken": broken, "b": lambda: order.append("b")}, 2
    )
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2}
    assert order[4:] == ["a", "b", "b", "a"]  # after two calls each to warm up
    assert here.report.notes == ["broken: left out: RuntimeError: cannot"]


def test_one_that_breaks_in_a_later_round_is_noted_and_left_out() -> None:
    calls: list[str] = []

    def late() -> None:
        calls.append("late")
        if len(calls) > 3:
            raise MemoryError("no more")

    here = context()
    assert set(here.interleaved({"late": late, "fine": lambda: None}, 3, label="case / ")) == {"fine"}
    assert here.report.notes == ["case / late: left out: MemoryError: no more"]


def test_rounds_stop_when_the_time_of_the_section_is_used_up() -> None:
    here = context()

    def last() -> None:
        here.deadline = 0.0

    assert {name: len(each) for name, each in here.interleaved({"a": list}, 9).items()} == {"a": 9}
    assert len(here.interleaved({"a": list, "last": last, "never": list}, 9)["a"]) == 1
    assert [note.split(":")[0] for note in here.report.notes] == ["never", "1 of 9 rounds"]


def test_a_rehearsal_never_writes_among_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        run.main(["--rehearse", "--out", str(run.RESULTS / "here")])
    assert refused.value.code == 2
    assert "a rehearsal measures nothing" in capsys.readouterr().err
    assert not (run.RESULTS / "here").exists()


def test_the_shares_of_the_sections_end_within_eight_minutes() -> None:
    untils = [each.until for each in run.SECTIONS]
    assert untils == sorted(untils)
    assert untils[-1] == 1.0
    assert run.BUDGET_S + run.GRACE_S <= 480


def test_torch_s_rivals_compute_the_same_gradients_and_log_probs() -> None:
    rows = head_times.make_rows(context(), 40, 16, 30)
    rows = rivals.Rows(
        rows.x.detach().float().requires_grad_(), rows.weight.detach().float().requires_grad_(), rows.target,
        rows.behaviour, rows.advantage,
    )  # fmt: skip
    steps, found = rivals.steps(rows), []
    rivals.PIECE_ROWS, whole = 16, rivals.PIECE_ROWS
    try:
        for name in (rivals.FULL, "torch chunked"):
            steps[name]()
            assert rows.x.grad is not None
            assert rows.weight.grad is not None
            found.append((rows.x.grad.clone(), rows.weight.grad.clone()))
        full, chunked = (rivals.logps(rows)[name]() for name in (rivals.FULL, "torch chunked"))
    finally:
        rivals.PIECE_ROWS = whole
    for one, other in zip(found[0], found[1], strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(full, chunked)


def test_it_needs_no_package_that_a_gpu_machine_may_lack() -> None:
    allowed = {"torch", "numpy", "triton", "headway_bench", "headway_kernels", *sys.stdlib_module_names}
    rival_packages = {"liger_kernel", "cut_cross_entropy", "flash_attn"}
    folder = Path(run.__file__).parent
    for path in (*folder.glob("*.py"), folder.parent / "machine.py", *KERNELS.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = (
            tree.body if path.name == "loop.py" else ast.walk(tree)
        )  # the loop imports the engine when it runs
        names = [name for node in nodes for name in _imported(node)]
        roots = {name.partition(".")[0] for name in names}
        assert roots <= allowed | (rival_packages if path.name == "rivals.py" else set()), path
        benches = [name for name in names if name.startswith("headway_bench")]
        assert all(name.startswith(("headway_bench.gpu", "headway_bench.machine")) for name in benches), path


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return []
