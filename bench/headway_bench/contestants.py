"""The contestants of the rival bench: how each is started, in its own process, and how its report is read."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headway.errors import BackendUnavailable, RunFailed
from headway_bench.rivals.workload import Report, Workload

RECIPES = Path(__file__).resolve().parent / "recipes"
HEADWAY = "headway"
LOG_LINES_SHOWN = 15
# headway ends its own children within 5 s of a SIGTERM; they are sessions of their own and not in its group.
TERMINATION_S = 10.0


@dataclass(frozen=True)
class Job:
    """One run of one contestant.

    Attributes:
        workload: its steps are the updates to do.
        folder: empty folder of this run: its log, its report, and headway's run folder.
        checkpoint: the model to start from, in transformers format.
        deadline_s: wall seconds after which the run is stopped and counts as failed.
    """

    workload: Workload
    seed: int
    folder: Path
    checkpoint: Path
    deadline_s: float


@dataclass(frozen=True)
class Launch:
    """A command line, what it needs in its environment, and the report it leaves."""

    command: list[str]
    environment: dict[str, str]
    report: Path


@dataclass(frozen=True)
class Rival:
    """An engine with a runner in headway_bench.rivals.

    Attributes:
        name: on the command line.
        title: in tables.
        module: the runner.
        processes: started by torchrun if more than one.
        threads: torch threads of each process.
    """

    name: str
    title: str
    module: str
    processes: int = 1
    threads: int = 1

    def launch(self, job: Job, python: Path) -> Launch:
        """The command of one run, in the rivals' environment."""
        report = job.folder / "report.json"
        starter = ["-m", self.module]
        if self.processes > 1:
            starter = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.processes}"]
            starter += ["-m", self.module]
        arguments = {
            "workload": job.workload.name,
            "steps": str(job.workload.steps),
            "seed": str(job.seed),
            "checkpoint": str(job.checkpoint),
            "report": str(report),
            "threads": str(self.threads),
        }
        options = [text for name, value in arguments.items() for text in (f"--{name}", value)]
        return Launch([str(python), *starter, *options], rival_variables(job.folder, self.threads), report)


@dataclass(frozen=True)
class Headway:
    """headway itself, from its recipe of the workload, in this interpreter's environment."""

    name: str = HEADWAY
    title: str = "headway"

    def launch(self, job: Job, python: Path | None = None) -> Launch:
        """The command of one run.

        Raises:
            BackendUnavailable: there is no recipe of the workload.
        """
        recipe = RECIPES / f"{job.workload.name}.toml"
        if not recipe.exists():
            raise BackendUnavailable(f"no recipe for {job.workload.name}: {recipe} does not exist")
        run_dir = job.folder / "run"
        command = [sys.executable, "-m", "headway", "run", str(recipe)]
        command += ["--seed", str(job.seed), "--run_dir", str(run_dir), "--view", "plain"]
        # The rivals draw their prompts from the same seed.
        command += ["--env.args.seed", str(job.seed)]
        command += ["--model.path", str(job.checkpoint), "--steps", str(job.workload.steps)]
        return Launch(command, {}, run_dir / "summary.json")


Contestant = Rival | Headway

CONTESTANTS: dict[str, Contestant] = {
    each.name: each
    for each in (
        Headway(),
        Rival("trl_async", "TRL AsyncGRPOTrainer", "headway_bench.rivals.trl_async"),
        Rival("trl_two", "TRL GRPOTrainer, 2 processes", "headway_bench.rivals.trl_default", processes=2),
        Rival("trl_default", "TRL GRPOTrainer, 1 process", "headway_bench.rivals.trl_default"),
        Rival("trl_threads", "TRL GRPOTrainer, 2 threads", "headway_bench.rivals.trl_default", threads=2),
    )
}
# One process may use both cores too, but two threads are slower for it than one (docs/benchmarks.md);
# trl_threads is there to check that elsewhere.
USUAL = tuple(each for each in CONTESTANTS.values() if each.name != "trl_threads")


def rival_variables(folder: Path, threads: int) -> dict[str, str]:
    """Environment variables of a runner.

    The runners belong to this package, but the folder that holds it may be a whole site-packages: on the
    rivals' path it would hide their own packages. So a folder with one link to this package goes on the
    path instead.
    """
    link = folder / "path" / "headway_bench"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(Path(__file__).resolve().parent, target_is_directory=True)
    return {
        "PYTHONPATH": str(link.parent),
        "OMP_NUM_THREADS": str(threads),
        # Idle threads that spin beside another busy process cost it its core.
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def run_contestant(contestant: Contestant, job: Job, rival_python: Path) -> Report:
    """Run one contestant to its end and read its report.

    Waits for the process, at most `job.deadline_s`. Whatever ends the wait, no process of the run is left
    behind.

    Raises:
        RunFailed: it ran past the deadline, failed, or did another number of updates than asked for.
    """
    job.folder.mkdir(parents=True)
    launch = contestant.launch(job, rival_python)
    log = job.folder / "log.txt"
    outcome = run_group(launch.command, {**os.environ, **launch.environment}, log, job.deadline_s)
    if outcome:
        raise RunFailed(
            f"{contestant.title} on {job.workload.name} {outcome}; the end of {log}:\n{tail(log)}\n"
            f"command: {' '.join(launch.command)}"
        )
    report = read_report(launch.report)
    if report.updates != job.workload.steps:
        raise RunFailed(
            f"{contestant.title} on {job.workload.name} did {report.updates} updates, expected "
            f"{job.workload.steps} (status {report.status!r}); see {log}"
        )
    return report


def run_group(command: list[str], environment: Mapping[str, str], log: Path, deadline_s: float) -> str:
    """Run a command as a process group of its own, both outputs into `log`.

    Returns:
        "" if it succeeded, else what happened, as the end of a sentence.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            return f"did not end within {deadline_s:.0f} s"
        finally:
            end_group(process)
    return f"ended with exit code {code}" if code else ""


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing of a process group alive: ask the leader, give it a moment, then kill the whole group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERMINATION_S)
    # The leader may be gone and workers of its group alive; after a clean end the group is empty.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_report(path: Path) -> Report:
    """Read a runner's report, or headway's summary of the same keys.

    Raises:
        RunFailed: no such file, or a key is missing or of another type.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except FileNotFoundError as error:
        raise RunFailed(f"the run ended well but left no report at {path}") from error
    except msgspec.DecodeError as error:
        raise RunFailed(f"{path} is not a report: {error}") from error


def tail(log: Path) -> str:
    """The last lines of a log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LOG_LINES_SHOWN:])
