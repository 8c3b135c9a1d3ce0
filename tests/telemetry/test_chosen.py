"""TensorBoard, W&B and Prometheus hold the numbers of metrics.jsonl; what is not installed is refused by name."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import socket
import struct
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.config import RunFolder
from headway.config.loading import validate
from headway.engine import start_run
from headway.errors import ConfigError, UnsupportedOption
from headway.telemetry import JsonlSink, MetricsSink, open_sinks, require_sinks, scalars
from headway.telemetry.prometheus_sink import PrometheusSink
from headway.types import LearnerStatus


def config(**telemetry: Any) -> Any:
    return validate(
        {"name": "told", "model": {"path": "builtin:sort5"}, "env": {"name": "sort"}, "telemetry": telemetry}
    )


def folder(path: Path) -> RunFolder:
    return RunFolder(path, "abc123")


def feed(sinks: list[MetricsSink], records: list[Any], status: LearnerStatus | None) -> None:
    for sink in sinks:
        for record in records:
            sink.step(record)
        if status is not None:
            sink.finish(status)


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl as flat numbers, by hand."""
    flat: list[dict[str, Any]] = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "step":
            numbers = {
                name: value for name, value in row.items() if not isinstance(value, (dict, list, str, bool))
            }
            for name in ("learner", "generator", "tickets", "trajectories", "tokens", "dropped"):
                numbers.update({f"{name}/{inner}": value for inner, value in row[name].items()})
            numbers.update({f"lag/{lag}": count for lag, count in enumerate(row["lag_histogram"])})
            flat.append(numbers)
    return flat


def feed_beside_jsonl(where: RunFolder, sink: str, records: list[Any], status: LearnerStatus) -> None:
    opened = [JsonlSink(where.metrics, where.summary), *open_sinks(config(sinks=[sink]), where, pytest.fail)]
    feed(opened, records, status)


def test_tensorboard_event_files_hold_the_numbers_of_the_rows(
    tmp_path: Path, make_record: Any, finished: LearnerStatus
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    where = folder(tmp_path)
    feed_beside_jsonl(where, "tensorboard", [make_record(step) for step in (1, 2, 3)], finished)
    board = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    expected = rows(where.metrics)
    names = set(expected[0]) - {"step", "epoch"}
    assert set(board.Tags()["scalars"]) == names
    for name in names:
        told = [(event.step, event.value) for event in board.Scalars(name)]
        assert told == [(row["step"], float(np.float32(row[name]))) for row in expected], name


def test_tensorboard_leaves_out_what_a_resume_rolled_back(
    tmp_path: Path, make_record: Any, finished: LearnerStatus
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    where, wanted = folder(tmp_path), config(sinks=["tensorboard"])
    feed(open_sinks(wanted, where, pytest.fail), [make_record(step) for step in (1, 2, 3)], finished)
    feed(open_sinks(wanted, where, pytest.fail), [make_record(step, reward=9.0) for step in (2, 3)], finished)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    rewards = [(event.step, event.value) for event in board.Scalars("reward")]
    assert rewards == [(1, float(np.float32(make_record(1).reward))), (2, 9.0), (3, 9.0)]


def test_the_scraped_endpoint_holds_the_numbers_of_the_newest_row(
    tmp_path: Path, make_record: Any, finished: LearnerStatus
) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    sink, jsonl = PrometheusSink("127.0.0.1", 0, "told"), JsonlSink(tmp_path / "m.jsonl", tmp_path / "s.json")
    empty = urllib.request.urlopen(sink.url, timeout=10).read().decode()
    assert "headway_reward" not in empty
    feed([sink, jsonl], [make_record(step) for step in (1, 2)], None)
    text = urllib.request.urlopen(sink.url, timeout=10).read().decode()
    jsonl.close()
    told = {
        (sample.name, sample.labels.get("lag") or sample.labels.get("reason")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels["run"] == "told"
    }
    expected: dict[tuple[str, str | None], float] = {}
    for name, value in rows(tmp_path / "m.jsonl")[-1].items():
        outer, _, inner = name.partition("/")
        if outer == "lag":
            expected["headway_lag_tokens", inner] = value
        elif outer == "dropped":
            expected["headway_dropped", inner] = value
        else:
            expected[f"headway_{re.sub('[^a-z0-9_]', '_', name)}", None] = value
    assert told == expected
    sink.finish(finished)
    with pytest.raises(OSError):
        urllib.request.urlopen(sink.url, timeout=10)


def test_a_taken_port_is_refused_by_name(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"telemetry\.prometheus_port.*127\.0\.0\.1:{port} cannot be served on"
        ):
            open_sinks(config(sinks=["prometheus"], prometheus_port=port), folder(tmp_path), pytest.fail)


def test_the_endpoint_is_told_and_is_this_machines(
    tmp_path: Path, make_record: Any, finished: LearnerStatus
) -> None:
    said: list[str] = []
    opened = open_sinks(config(sinks=["prometheus"], prometheus_port=0), folder(tmp_path), said.append)
    assert re.fullmatch(r"Prometheus scrapes http://127\.0\.0\.1:\d+/metrics", said[0])
    feed(opened, [make_record(1)], finished)


@pytest.mark.parametrize(
    ("sink", "package"),
    [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("prometheus", "prometheus_client")],
)
def test_what_is_not_installed_is_refused_before_a_folder_is_made(
    sink: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else object())
    target = tmp_path / "run"
    wanted = config(sinks=["prometheus", sink]).model_copy(update={"run_dir": str(target)})
    with pytest.raises(UnsupportedOption, match=rf"'{sink}' needs the package {package}.*headway\[{sink}\]"):
        start_run(wanted)
    assert not target.exists()


def test_what_is_not_asked_for_needs_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    require_sinks(())
    assert open_sinks(config(), folder(tmp_path), pytest.fail) == []


def test_numbers_that_are_not_finite_reach_every_sink(
    tmp_path: Path, make_record: Any, finished: LearnerStatus
) -> None:
    record = make_record(1, kl_behaviour=math.nan, ratio_max=math.inf)
    assert math.isnan(scalars(record)["kl_behaviour"])
    sink = PrometheusSink("127.0.0.1", 0, "told")
    sink.step(record)
    text = urllib.request.urlopen(sink.url, timeout=10).read().decode()
    sink.finish(finished)
    assert 'headway_kl_behaviour{run="told"} NaN' in text
    assert 'headway_ratio_max{run="told"} +Inf' in text


def offline_records(path: Path) -> list[bytes]:
    """The records of W&B's offline file: LevelDB's log format, 7 bytes of header first.

    Blocks of 32 KiB, each with pieces of checksum (4 bytes), length (2) and kind: whole, first, middle, last.
    """
    data, at, found, piece = path.read_bytes(), 7, list[bytes](), b""
    assert data[:4] in (b"", b":W&B")
    while at + 7 <= len(data):
        if (1 << 15) - at % (1 << 15) < 7:
            at += (1 << 15) - at % (1 << 15)
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if at + 7 + length > len(data):
            break  # still being written
        assert kind in (1, 2, 3, 4)
        piece = (b"" if kind in (1, 2) else piece) + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            found.append(piece)
    return found


@pytest.mark.slow
def test_the_offline_files_of_wandb_hold_the_numbers_of_the_rows(
    tmp_path: Path, make_record: Any, finished: LearnerStatus
) -> None:
    from wandb.proto import wandb_internal_pb2

    where = folder(tmp_path)
    feed_beside_jsonl(where, "wandb", [make_record(step) for step in (1, 2, 3)], finished)
    (file,) = (tmp_path / "wandb").rglob("run-*.wandb")
    end_s, written = time.monotonic() + 60.0, list[Any]()
    while not any(record.HasField("exit") for record in written):  # W&B's own process writes it
        assert time.monotonic() < end_s, [str(record)[:80] for record in written]
        written = [wandb_internal_pb2.Record.FromString(data) for data in offline_records(file)]
    recipe = {
        item.key: json.loads(item.value_json)
        for record in written
        if record.HasField("run")
        for item in record.run.config.update
    }
    told = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in written
        if record.HasField("history")
    ]
    assert recipe["env"]["name"] == "sort"
    expected = rows(where.metrics)
    assert [row["_step"] for row in told] == [1, 2, 3]
    for line, row in zip(told, expected, strict=True):
        assert {name: line[name] for name in row if name not in ("step", "epoch")} == {
            name: value for name, value in row.items() if name not in ("step", "epoch")
        }


def test_an_endpoint_needs_an_address_and_sinks_are_known() -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.prometheus_host.*expected an address.*'somewhere'"):
        config(prometheus_host="somewhere")
    with pytest.raises(ConfigError, match=r"telemetry\.sinks"):
        config(sinks=["tensorbord"])
