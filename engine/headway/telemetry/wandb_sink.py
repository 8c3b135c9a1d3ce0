"""Rows to W&B: by default into files of the run's folder that `wandb sync` sends, else online."""

from __future__ import annotations

from pathlib import Path

import wandb

from headway.config import RunConfig
from headway.errors import ConfigError
from headway.telemetry.scalars import scalars
from headway.types import LearnerStatus, StepRecord

START_S = 60.0


class WandbSink:
    """One W&B run per attempt, in a W&B group named after the run; other runs of the program are left alone."""

    def __init__(self, config: RunConfig, folder: Path, run_id: str) -> None:
        """
        Args:
            config: the recipe, which W&B shows. folder: of W&B's files. run_id: of the run.

        Raises:
            ConfigError: W&B cannot start (without a login, or a network, where the mode is online).
        """
        folder.mkdir(parents=True, exist_ok=True)
        wanted = config.telemetry
        try:
            self._run = wandb.init(
                project=wanted.wandb_project,
                group=f"{config.name}-{run_id}",
                name=config.name,
                dir=str(folder),
                mode=wanted.wandb_mode,
                config=config.model_dump(mode="json"),
                reinit="create_new",
                save_code=False,
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    init_timeout=START_S,
                    x_disable_stats=True,
                    x_disable_meta=True,
                ),
            )
        except Exception as error:
            message = f"wandb cannot start with telemetry.wandb_mode = {wanted.wandb_mode!r}: {error}"
            raise ConfigError([("telemetry.sinks", message)]) from None

    def step(self, record: StepRecord) -> None:
        """Every number of an update; one that was skipped is left out, as it has no step of its own."""
        if not record.skipped:
            self._run.log(scalars(record), step=record.step)

    def note(self, text: str) -> None:
        """Notes are for people."""

    def finish(self, status: LearnerStatus) -> None:
        """How the run ended, as W&B's summary; waits until W&B has everything."""
        self._run.summary.update({"status": status.status, "cause": status.cause, "wall_s": status.wall_s})
        self._run.finish(exit_code=1 if status.status == "failed" else 0)
