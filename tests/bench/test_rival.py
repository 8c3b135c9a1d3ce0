"""The bench as a whole, with contestants replaced by instant ones."""

from pathlib import Path

import msgspec
import pytest

from headway.errors import RunFailed
from headway_bench import rival
from headway_bench.contestants import Contestant, Job
from headway_bench.environment import version_faults
from headway_bench.harness import read_rows
from headway_bench.rivals.workload import Report
from headway_bench.verdict import Outcome

RATES = {"headway": 1000.0, "trl_async": 500.0, "trl_two": 300.0, "trl_default": 200.0}


class NoEnvironment:
    python = Path("python")

    def __init__(self, folder: Path, say: object) -> None:
        self.versions = {"torch": "2.13.0", "trl": "1.16.0"}


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Job]]:
    """Contestants that finish at once; what they were asked to do."""
    asked: list[tuple[str, Job]] = []

    def instant(contestant: Contestant, job: Job, python: Path) -> Report:
        asked.append((contestant.name, job))
        rate = RATES[contestant.name] * (1 + job.seed % 7)
        return Report("completed", job.workload.steps, 1.0, rate, 0.88, 1)

    monkeypatch.setattr(rival, "RivalEnvironment", NoEnvironment)
    monkeypatch.setattr(rival, "run_contestant", instant)
    return asked


def bench(folder: Path, *arguments: str) -> int:
    return rival.main(["--results", str(folder), "--checkpoint", str(folder / "model"), *arguments])


def test_defaults_are_five_rounds_of_everybody_on_both_workloads():
    options = rival.parse_options([])
    assert options.rounds == 5
    assert [workload.name for workload in options.workloads] == ["w1", "w2"]
    assert [contestant.name for contestant in options.contestants] == list(RATES)
    assert options.venv == Path(".venv-rivals")


def test_rounds_are_interleaved_and_share_a_seed(jobs: list[tuple[str, Job]], tmp_path: Path):
    assert bench(tmp_path, "--rounds", "2", "--workload", "w1", "--contestants", "trl_two,headway") == 0
    assert [name for name, _ in jobs] == ["trl_two", "headway", "headway", "trl_two"]
    assert [job.seed for _, job in jobs] == [42, 42, 43, 43]
    assert len({job.folder for _, job in jobs}) == 4


def test_rows_and_runs_are_saved(jobs: list[tuple[str, Job]], tmp_path: Path):
    assert bench(tmp_path, "--rounds", "3") == 0
    (folder,) = tmp_path.iterdir()
    rows = {row.case: row for row in read_rows(folder / "rows.jsonl")}
    assert set(rows) == {f"{workload}/{name}" for workload in ("w1", "w2") for name in RATES}
    ratios = {name: spread.p50 for name, spread in rows["w2/headway"].ratios.items()}
    assert ratios == {
        "over trl_async": pytest.approx(2.0),
        "over trl_two": pytest.approx(10 / 3),
        "over trl_default": pytest.approx(5.0),
    }
    assert rows["w1/trl_two"].ratios == {}
    assert rows["w1/trl_two"].versions["trl"] == "1.16.0"
    assert "trl" not in rows["w1/headway"].versions
    assert rows["w1/headway"].config["prompts"] == 8
    lines = (folder / "runs.jsonl").read_bytes().splitlines()
    assert len([msgspec.json.decode(line, type=Outcome) for line in lines]) == len(jobs) == 24


def test_steps_can_be_overridden_for_everybody(jobs: list[tuple[str, Job]], tmp_path: Path):
    assert bench(tmp_path, "--rounds", "1", "--steps", "3") == 0
    assert {job.workload.steps for _, job in jobs} == {3}


def test_a_missed_claim_ends_in_status_1(
    jobs: list[tuple[str, Job]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(RATES, "headway", 600.0)
    assert bench(tmp_path, "--rounds", "2") == 1


def test_rivals_alone_claim_nothing(jobs: list[tuple[str, Job]], tmp_path: Path):
    assert bench(tmp_path, "--rounds", "1", "--contestants", "trl_async,trl_default") == 0


def test_a_failed_run_ends_in_status_2_and_keeps_the_runs_before_it(
    jobs: list[tuple[str, Job]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    instant = rival.run_contestant

    def second_fails(contestant: Contestant, job: Job, python: Path) -> Report:
        if jobs:
            raise RunFailed("the second one fell over")
        return instant(contestant, job, python)

    monkeypatch.setattr(rival, "run_contestant", second_fails)
    assert bench(tmp_path, "--rounds", "2") == 2
    assert "the second one fell over" in capsys.readouterr().err
    (folder,) = tmp_path.iterdir()
    assert len((folder / "runs.jsonl").read_bytes().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--contestants", "headway,trl"], "no contestant is called 'trl'"),
        (["--rounds", "0"], "0 is less than 1"),
        (["--workload", "w3"], "invalid choice: 'w3'"),
    ],
)
def test_faults_of_the_command_line_are_named(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        rival.parse_options(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_an_environment_of_other_versions_is_described():
    versions = {
        "torch": "2.13.0+cpu",
        "trl": "1.15.0",
        "transformers": "5.24.0",
        "datasets": "5",
        "requests": "2",
    }
    assert version_faults(versions) == ["trl is 1.15.0, expected 1.16.0", "accelerate is missing"]
