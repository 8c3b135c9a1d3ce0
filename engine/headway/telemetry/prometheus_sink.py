"""The newest row, served to Prometheus: one gauge per number, named headway_OUTER_INNER, with the run as a label."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily

from headway.errors import ConfigError
from headway.telemetry.scalars import scalars
from headway.types import LearnerStatus, StepRecord

# Numbers whose inner name is a value, not a name: the gauge, and the label that takes it.
LABELLED = {"lag": ("headway_lag_tokens", "lag"), "dropped": ("headway_dropped", "reason")}


class PrometheusSink:
    """An HTTP endpoint at /metrics until the run ends."""

    def __init__(self, host: str, port: int, run: str) -> None:
        """
        Args:
            host, port: to serve on; port 0: a free one. run: the label's value.

        Raises:
            ConfigError: they cannot be served on.
        """
        self._run = run
        self._record: StepRecord | None = None
        registry = CollectorRegistry()
        registry.register(_Collector(self))
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            message = f"{host}:{port} cannot be served on: {error}; set another port, or 0 for a free one"
            raise ConfigError([("telemetry.prometheus_port", message)]) from None

    @property
    def url(self) -> str:
        """Where to scrape."""
        host, port = self._server.server_address[:2]
        return f"http://[{host!s}]:{port}/metrics" if ":" in str(host) else f"http://{host!s}:{port}/metrics"

    def step(self, record: StepRecord) -> None:
        """What the next scrape sees."""
        if not record.skipped:
            self._record = record

    def note(self, text: str) -> None:
        """Notes are for people."""

    def finish(self, status: LearnerStatus) -> None:
        """Gives the port back."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def families(self) -> Iterator[GaugeMetricFamily]:
        """The gauges of the newest row."""
        record = self._record
        if record is None:
            return
        families: dict[str, GaugeMetricFamily] = {}
        numbers = {"step": float(record.step), "epoch": float(record.epoch), **scalars(record)}
        for name, value in numbers.items():
            outer, _, inner = name.partition("/")
            plain = ("headway_" + re.sub(r"[^a-zA-Z0-9_]", "_", name), "")
            metric, label = LABELLED.get(outer, plain) if inner else plain
            labels = {"run": self._run, **({label: inner} if label else {})}
            if metric not in families:
                families[metric] = GaugeMetricFamily(metric, name, labels=list(labels))
            families[metric].add_metric(list(labels.values()), float(value))
        yield from families.values()


class _Collector:
    """What the registry asks at each scrape."""

    def __init__(self, sink: PrometheusSink) -> None:
        self._sink = sink

    def collect(self) -> Iterable[GaugeMetricFamily]:
        return self._sink.families()

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return []
