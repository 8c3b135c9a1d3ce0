"""`headway watch`: to this machine only, and always what the folder holds now."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError
from headway.report import Watch


@pytest.fixture
def watched(make_run: Any) -> Iterator[tuple[Any, Watch]]:
    folder = make_run(5, ended=False)
    watch = Watch(folder.path)
    thread = threading.Thread(target=watch.serve)
    thread.start()
    yield folder, watch
    watch.stop()
    thread.join(10)
    watch.close()
    assert not thread.is_alive()


def get(watch: Watch, path: str, host: str = "") -> tuple[int, str]:
    address = watch.url.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(address, timeout=10)
    connection.request("GET", path, headers={"Host": host or address})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_a_row_written_later_is_in_the_next_answer(watched: tuple[Any, Watch]) -> None:
    folder, watch = watched
    code, text = get(watch, "/")
    assert code == 200
    assert 'data-live="2000"' in text
    assert "connect-src 'self'" in text
    assert len(json.loads(get(watch, "/data.json")[1])["columns"]["step"]) == 5
    last = folder.metrics.read_bytes().splitlines()[-1].replace(b'"step":5', b'"step":6')
    with folder.metrics.open("ab") as file:
        file.write(last + b"\n")
    assert json.loads(get(watch, "/data.json?x=1")[1])["columns"]["step"][-1] == 6


def test_other_paths_and_other_names_for_this_machine_are_refused(watched: tuple[Any, Watch]) -> None:
    _, watch = watched
    assert get(watch, "/../config.toml")[0] == 404
    for host in ("evil.example", "evil.example:80", "10.0.0.1", "localhost.evil.example"):
        assert get(watch, "/data.json", host)[0] == 403
    for host in ("localhost", "localhost:1", "[::1]:80", "127.9.9.9"):
        assert get(watch, "/data.json", host)[0] == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "192.168.1.5", "example.com", ""])
def test_addresses_beyond_this_machine_are_refused(make_run: Any, host: str) -> None:
    with pytest.raises(ConfigError, match="--host"):
        Watch(make_run(1).path, host)


def test_a_taken_port_is_named(make_run: Any) -> None:
    folder = make_run(1)
    first = Watch(folder.path)
    port = int(first.url.rstrip("/").rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} cannot be served on"):
        Watch(folder.path, port=port)
    first.close()


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        Watch(tmp_path)
