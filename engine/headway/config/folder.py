"""The folder of one run: what lies in it, and how it is made and found again.

config.toml      the resolved recipe          run.json       run id, creation time, headway version
metrics.jsonl    one row per optimizer step   summary.json   how it ended
logs/NAME.log    of every process             policy/        the final policy, when `save` is set
attempts/        every start and resume       checkpoints/   the state to go on from
journal/         tickets and trajectories     lock           who works on the run now
spans/           what each process did when   weights.json   the weight channel, for who else reads it
"""

from __future__ import annotations

import json
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from headway.config.loading import load_recipe
from headway.config.schema import RunConfig
from headway.config.write import save
from headway.errors import ConfigError


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run, and its id: short, unique on this host, part of the names of its shared memory."""

    path: Path
    run_id: str

    @property
    def config(self) -> Path:
        """The resolved recipe."""
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """One JSON row per optimizer step."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """How the run ended."""
        return self.path / "summary.json"

    @property
    def logs(self) -> Path:
        """One log per process."""
        return self.path / "logs"

    @property
    def policy(self) -> Path:
        """The final policy, a transformers folder."""
        return self.path / "policy"

    @property
    def journal(self) -> Path:
        """What happened to every ticket and trajectory."""
        return self.path / "journal"

    @property
    def weights(self) -> Path:
        """Where the run's weights are published now: address, manifest digest and dtype."""
        return self.path / "weights.json"

    @property
    def abandoned(self) -> Path:
        """The rows of steps that a resume has rolled back."""
        return self.path / "metrics.abandoned.jsonl"

    @property
    def spans(self) -> Path:
        """What each process did when, a file per process."""
        return self.path / "spans"

    def checkpoints(self, config: RunConfig) -> Path:
        """The folder of the run's checkpoints."""
        return Path(config.checkpoint.dir) if config.checkpoint.dir else self.path / "checkpoints"


def create_run(config: RunConfig) -> RunFolder:
    """Makes the folder of a new run and saves the recipe in it.

    Raises:
        ConfigError: run_dir is taken by another run, or cannot be written.
    """
    run_id = uuid.uuid4().hex[:8]
    try:
        folder = RunFolder(_claim(config), run_id)
        folder.logs.mkdir()
        save(config, folder.config)
        facts = {"run_id": run_id, "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "name": config.name}
        (folder.path / "run.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError([("run_dir", f"the folder of the run cannot be made: {error}")]) from None
    return folder


def open_run(path: Path) -> tuple[RunFolder, RunConfig]:
    """The run of an existing folder, and its recipe: what a learner or generator starts from.

    Raises:
        ConfigError: the folder is not that of a run.
    """
    try:
        run_id = json.loads((path / "run.json").read_text(encoding="utf-8"))["run_id"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError([("", f"{path} is not the folder of a run (run.json: {error})")]) from None
    folder = RunFolder(path, str(run_id))
    return folder, load_recipe(folder.config)


def _claim(config: RunConfig) -> Path:
    """A folder that did not exist, or was empty, before this call."""
    if config.run_dir:
        chosen = Path(config.run_dir)
        chosen.mkdir(parents=True, exist_ok=True)
        if any(chosen.iterdir()):
            raise ConfigError(
                [("run_dir", f"{chosen} is not empty: give a new folder, or none for runs/NAME-DATE-TIME")]
            )
        return chosen.absolute()
    stem = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in range(1000):
        chosen = Path("runs") / (stem if attempt == 0 else f"{stem}-{attempt}")
        try:
            os.makedirs(chosen)
        except FileExistsError:
            continue
        return chosen.absolute()
    raise ConfigError([("run_dir", f"a thousand runs named {stem} exist in {Path('runs').absolute()}")])
