"""The sinks that a recipe asks for (telemetry.sinks), each on a thread of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

from headway.config import RunConfig, RunFolder
from headway.errors import UnsupportedOption
from headway.telemetry.detached import Detached
from headway.telemetry.sink import MetricsSink

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "prometheus": "prometheus_client"}


def require_sinks(names: Sequence[str]) -> None:
    """Refuses what is not installed, before anything of a run exists.

    Raises:
        UnsupportedOption: names the sink, its package and what to install.
    """
    for name in names:
        package = PACKAGES[name]
        if importlib.util.find_spec(package) is None:
            raise UnsupportedOption(
                f"telemetry.sinks: {name!r} needs the package {package}, which is not installed: "
                f"pip install 'headway[{name}]', or take it out of telemetry.sinks"
            )


def open_sinks(config: RunConfig, folder: RunFolder, say: Callable[[str], None]) -> list[MetricsSink]:
    """The sinks of telemetry.sinks, open.

    Args:
        say: takes lines for people: where the endpoint is, and once each, what fails; on the feeding thread.

    Raises:
        UnsupportedOption: a package is missing. ConfigError: a sink cannot start.
    """
    wanted = dict.fromkeys(config.telemetry.sinks)
    require_sinks([*wanted])
    opened: list[tuple[str, MetricsSink]] = []
    # The endpoint first: what may be refused by the machine must not leave another sink half open.
    for name in sorted(wanted, key=lambda name: name != "prometheus"):
        opened.append((name, _open(name, config, folder, say)))
    return [Detached(name, sink, say) for name, sink in opened]


def _open(name: str, config: RunConfig, folder: RunFolder, say: Callable[[str], None]) -> MetricsSink:
    if name == "tensorboard":
        from headway.telemetry.tensorboard_sink import TensorBoardSink

        return TensorBoardSink(folder.path / "tensorboard")
    if name == "wandb":
        from headway.telemetry.wandb_sink import WandbSink

        return WandbSink(config, folder.path / "wandb", folder.run_id)
    from headway.telemetry.prometheus_sink import PrometheusSink

    sink = PrometheusSink(config.telemetry.prometheus_host, config.telemetry.prometheus_port, config.name)
    say(f"Prometheus scrapes {sink.url}")
    return sink
