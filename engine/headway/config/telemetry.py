"""The section [telemetry]: where a run's numbers go besides its folder, and what each process writes of its time."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headway.config.section import Section

SinkName = Literal["tensorboard", "wandb", "prometheus"]


class TelemetryConfig(Section):
    """Who is told of a run, besides the files of its folder (docs/report.md)."""

    sinks: tuple[SinkName, ...] = Field(
        default=(),
        description="besides metrics.jsonl: tensorboard | wandb | prometheus; each needs the extra of its name",
    )
    wandb_project: str = Field(default="headway", min_length=1, description="of W&B")
    wandb_mode: Literal["offline", "online"] = Field(
        default="offline",
        description="offline: W&B files in the run's folder, for `wandb sync`; nothing is sent",
    )
    prometheus_host: str = Field(
        default="127.0.0.1",
        description="address of the Prometheus endpoint; another one lets other machines read it",
    )
    prometheus_port: int = Field(
        default=9464,
        ge=0,
        le=65535,
        description="of the Prometheus endpoint; 0: a free one, told at the start",
    )
    spans: bool = Field(
        default=True, description="each process writes what it did when, for the timeline of headway report"
    )
