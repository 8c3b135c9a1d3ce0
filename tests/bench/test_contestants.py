"""How contestants are started and read. Nothing of TRL is imported; processes are small scripts."""

import json
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from headway.errors import BackendUnavailable, RunFailed
from headway_bench import contestants
from headway_bench.contestants import (
    CONTESTANTS,
    HEADWAY,
    Job,
    Launch,
    read_report,
    run_contestant,
    run_group,
)
from headway_bench.rivals.workload import W1, W2, Report, Workload, parse_runner_options


def job(folder: Path, workload: Workload = W1) -> Job:
    return Job(workload, seed=43, folder=folder, checkpoint=folder / "model", deadline_s=30.0)


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


@pytest.mark.parametrize("name", ["trl_default", "trl_two", "trl_async", "trl_threads"])
def test_a_rivals_command_line_is_read_back_by_its_runner(name: str, tmp_path: Path):
    launch = CONTESTANTS[name].launch(job(tmp_path, W2), Path("/venv/bin/python"))
    assert launch.command[0] == "/venv/bin/python"
    module = max(index for index, text in enumerate(launch.command) if text == "-m")
    options = parse_runner_options(launch.command[module + 2 :])
    assert (options.workload, options.seed, options.threads) == (W2, 43, 2 if name == "trl_threads" else 1)
    assert options.checkpoint == (tmp_path / "model").resolve()
    assert options.report == launch.report


def test_two_processes_are_started_by_torchrun_with_a_thread_each(tmp_path: Path):
    launch = CONTESTANTS["trl_two"].launch(job(tmp_path), Path("python"))
    assert launch.command[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    assert launch.command[5:7] == ["-m", "headway_bench.rivals.trl_default"]
    assert launch.environment["OMP_NUM_THREADS"] == option(launch.command, "--threads") == "1"


def test_a_rivals_path_holds_this_package_and_nothing_else(tmp_path: Path):
    launch = CONTESTANTS["trl_async"].launch(job(tmp_path), Path("python"))
    path = Path(launch.environment["PYTHONPATH"])
    assert [entry.name for entry in path.iterdir()] == ["headway_bench"]
    code = (
        "import headway_bench.rivals.workload, sys\n"
        "sys.exit('headway' in sys.modules or 'torch' in sys.modules)"
    )
    log = tmp_path / "log"
    assert run_group([sys.executable, "-c", code], {**os.environ, **launch.environment}, log, 30.0) == ""


def test_headway_is_started_from_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "w1.toml").touch()
    monkeypatch.setattr(contestants, "RECIPES", tmp_path)
    launch = CONTESTANTS[HEADWAY].launch(job(tmp_path), Path("/venv/bin/python"))
    assert launch.command[:5] == [sys.executable, "-m", "headway", "run", str(tmp_path / "w1.toml")]
    assert option(launch.command, "--seed") == option(launch.command, "--env.args.seed") == "43"
    assert option(launch.command, "--view") == "plain"
    assert option(launch.command, "--steps") == "100"
    assert option(launch.command, "--model.path") == str(tmp_path / "model")
    assert launch.report == Path(option(launch.command, "--run_dir")) / "summary.json"


def test_headway_without_a_recipe_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(contestants, "RECIPES", tmp_path)
    with pytest.raises(BackendUnavailable, match=r"no recipe for w1: .*w1\.toml"):
        CONTESTANTS[HEADWAY].launch(job(tmp_path), Path("python"))


def test_a_report_is_read_as_it_was_saved(tmp_path: Path):
    report = Report("completed", 100, 30.0, 426.7, 0.88, 2, {"generate_s": 12.5, "trl": "1.16.0"})
    report.save(tmp_path / "report.json")
    assert read_report(tmp_path / "report.json") == report


def test_headways_summary_may_say_more_than_the_bench_reads(tmp_path: Path):
    summary = {
        "samples_per_s": 1100,
        "updates": 100,
        "wall_s": 11.6,
        "reward_last_10": 0.9,
        "max_lag_seen": 2,
        "status": "completed",
        "ledger": {"trained": 800},
    }
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(summary))
    assert read_report(path) == Report("completed", 100, 11.6, 1100.0, 0.9, 2)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"updates": 3}', "missing required field"),
        ('{"updates": "3"}', "Expected `int`"),
        ("{]", "malformed"),
    ],
)
def test_what_is_no_report_is_refused(content: str, complaint: str, tmp_path: Path):
    path = tmp_path / "report.json"
    path.write_text(content)
    with pytest.raises(RunFailed, match=f"is not a report: .*{complaint}"):
        read_report(path)


class Scripted:
    """A contestant that is a Python script."""

    name = "scripted"
    title = "a script"

    def __init__(self, script: str) -> None:
        self.script = script

    def launch(self, job: Job, python: Path) -> Launch:
        return Launch([sys.executable, "-c", self.script], {}, job.folder / "report.json")


def run_scripted(script: str, folder: Path, deadline_s: float = 30.0) -> Report:
    work = Job(W2, seed=1, folder=folder / "run", checkpoint=folder, deadline_s=deadline_s)
    return run_contestant(Scripted(script), work, Path("python"))  # type: ignore[arg-type]


def test_a_failing_contestant_is_reported_with_the_end_of_its_log(tmp_path: Path):
    script = "print('line before'); raise SystemExit('boom')"
    with pytest.raises(
        RunFailed, match=r"a script on w2 ended with exit code 1(.|\n)*line before(.|\n)*boom"
    ):
        run_scripted(script, tmp_path)


def test_a_contestant_that_leaves_no_report_is_refused(tmp_path: Path):
    with pytest.raises(RunFailed, match="left no report"):
        run_scripted("", tmp_path)


def test_a_contestant_that_stopped_early_is_refused(tmp_path: Path):
    target = tmp_path / "run" / "report.json"
    script = (
        "from pathlib import Path\n"
        "from headway_bench.rivals.workload import Report\n"
        f"Report('stopped', 5, 1.0, 1.0, 1.0, 0).save(Path({str(target)!r}))"
    )
    with pytest.raises(RunFailed, match=r"did 5 updates, expected 6 \(status 'stopped'\)"):
        run_scripted(script, tmp_path)


def test_past_the_deadline_the_whole_process_group_ends(tmp_path: Path):
    child_file = tmp_path / "child"
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(child_file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )
    with pytest.raises(RunFailed, match="did not end within 2 s"):
        run_scripted(script, tmp_path, deadline_s=2.0)
    child = int(child_file.read_text())
    give_up = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < give_up, "the contestant's child outlived it"
