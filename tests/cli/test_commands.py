"""The commands as a user meets them: real processes, exit statuses, what is printed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FAKE = Path(__file__).parents[1] / "launch" / "fake_headway.py"
RECIPE = 'steps = 5\n[model]\npath = "none"\n[env]\nname = "none"\n'

# `headway` with the fake learner and generator in place of the real ones
HEADWAY = f"""
import sys
from headway.cli import running
from headway.cli import main
from headway.engine import Engine

class FakeEngine(Engine):
    def __init__(self, *given, **keywords):
        super().__init__(*given, **keywords, program=({sys.executable!r}, {str(FAKE)!r}))

running.Engine = FakeEngine
main()
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def headway(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "headway", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60, check=False)


def fake_run(*words: str, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", HEADWAY, "run", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd)


def test_help_lists_the_commands_and_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom headway.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'zmq', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("run", "learner", "generator", "doctor", "selfcheck", "bench"):
        assert f"\n  {command} " in done.stdout


def test_the_supervising_side_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "import headway, headway.engine, headway.launch.live, headway.cli.running, headway.cli.doctor\n"
        "headway.Engine, headway.RunConfig\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_dry_run_prints_the_plan_and_starts_nothing(tmp_path: Path, recipe: Path) -> None:
    done = headway(
        "run", "recipe.toml", "--dry-run", "--batch.prompts", "4", "--generator.replicas=2",
        "--model.path", "builtin:sort3", "--env.name", "sort", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "model: builtin:sort3 (made on first use)" in done.stdout
    assert "prompts without end; the first has" in done.stdout
    assert "per update: 4 prompts x 8 samples = 32 sequences" in done.stdout
    assert "+ 2 generators" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_a_wrong_recipe_is_one_block_without_a_traceback(tmp_path: Path, recipe: Path) -> None:
    done = headway("run", "recipe.toml", "--learnign.rate", "1", "--sampling.top_p", "0.9", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "headway: the recipe is wrong in 2 places:"
    assert "did you mean" in done.stderr or "unknown key" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in headway("run", "nothing.toml", "--debug", cwd=tmp_path).stderr


def test_unknown_commands_and_options_are_usage_errors(tmp_path: Path) -> None:
    assert headway("trian", cwd=tmp_path).returncode == 2
    assert headway("doctor", "--fix", cwd=tmp_path).returncode == 2


def test_doctor_reports_and_succeeds(tmp_path: Path) -> None:
    done = headway("doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in (
        "python",
        "torch",
        "cores",
        "memory",
        "shared memory",
        "compiler",
        "native library",
        "device",
    ):
        assert word in done.stdout


def test_a_run_from_start_to_end(tmp_path: Path, recipe: Path) -> None:
    done = fake_run("recipe.toml", "--view", "plain", "--name", "trial", "--logs", cwd=tmp_path)
    output, _ = done.communicate(timeout=60)
    assert done.returncode == 0, output
    lines = output.splitlines()
    assert sum(line.startswith("step ") for line in lines) == 5
    assert any(line.startswith("finished after 5 of 5 updates") for line in lines)
    assert "[generator-0] OMP_WAIT_POLICY passive" in lines
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("trial-")
    assert lines[-1] == f"run folder: {folder}"
    assert json.loads((folder / "summary.json").read_text())["updates"] == 5


def test_a_failed_run_exits_with_1_and_names_the_cause(tmp_path: Path, recipe: Path) -> None:
    done = fake_run("recipe.toml", "--env.args.learner", "raises", cwd=tmp_path)
    output, _ = done.communicate(timeout=60)
    assert done.returncode == 1
    assert "RuntimeError: the optimizer is gone" in output


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_in_order(tmp_path: Path, recipe: Path, number: int, status: int) -> None:
    running = fake_run("recipe.toml", "--env.args.learner", "waits", cwd=tmp_path)
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("step 2/"):
            break
    os.kill(running.pid, number)
    output, _ = running.communicate(timeout=5)
    assert running.returncode == status
    assert "stopped after 2 of 5 updates" in output
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "summary.json").read_text())["status"] == "stopped"
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["kind"] == "status"


def test_a_second_ctrl_c_kills(tmp_path: Path, recipe: Path) -> None:
    running = fake_run("recipe.toml", "--env.args.learner", "waits", "--env.args.deaf", "true", cwd=tmp_path)
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("step 2/"):
            break
    os.kill(running.pid, signal.SIGINT)
    os.kill(running.pid, signal.SIGTERM)
    output, _ = running.communicate(timeout=4)
    assert running.returncode in (130, 143)
    assert "stopped after 2 of 5 updates" in output


def test_no_process_outlives_a_killed_supervisor(tmp_path: Path, recipe: Path) -> None:
    running = fake_run("recipe.toml", "--env.args.learner", "waits", cwd=tmp_path)
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("step 2/"):
            break
    running.kill()
    running.wait()
    # standard output is inherited by nobody but the supervisor: its end says nothing of the children, so ask
    (folder,) = (tmp_path / "runs").iterdir()
    run_id = json.loads((folder / "run.json").read_text())["run_id"]
    (segment,) = Path("/dev/shm").glob(f"headway-{run_id}-*")
    learner = int(segment.name.rpartition("-")[2])
    descriptor = os.pidfd_open(learner) if Path(f"/proc/{learner}").exists() else None
    if descriptor is not None:
        import select

        assert select.select([descriptor], [], [], 10.0)[0], "the learner still runs"
        os.close(descriptor)
    segment.unlink(missing_ok=True)
    running.stdout.close()
