"""Where a learner may listen: other machines only with keys, or by name without."""

from __future__ import annotations

from typing import Any

import pytest

from headway.config.address import is_loopback, split_tcp
from headway.config.loading import validate
from headway.errors import ConfigError

BASE: dict[str, Any] = {"model": {"path": "builtin:sort"}, "env": {"name": "sort"}}


@pytest.mark.parametrize(
    "stream",
    [
        {},
        {"transport": "tcp"},
        {"transport": "tcp", "bind": "tcp://127.0.0.1:0"},
        {"transport": "tcp", "bind": "tcp://[::1]:5700"},
        {"transport": "tcp", "bind": "tcp://0.0.0.0:5700", "keys": "k"},
        {"transport": "tcp", "bind": "tcp://10.0.0.5:5700", "insecure": True},
    ],
)
def test_possible(stream: dict[str, Any]) -> None:
    validate({**BASE, "stream": stream})


@pytest.mark.parametrize(
    ("stream", "path", "words"),
    [
        ({"bind": "tcp://127.0.0.1:0"}, "stream.bind", "nearest: transport = 'tcp'"),
        ({"transport": "tcp", "bind": "127.0.0.1:5700"}, "stream.bind", "expected tcp://HOST:PORT"),
        ({"transport": "tcp", "bind": "tcp://127.0.0.1:65535"}, "stream.bind", "nearest: 65534"),
        ({"transport": "tcp", "bind": "tcp://127.0.0.1:70000"}, "stream.bind", "expected tcp://HOST:PORT"),
        ({"transport": "tcp", "bind": "tcp://0.0.0.0:5700"}, "stream.bind", "headway keys new"),
        ({"transport": "tcp", "bind": "tcp://learner.lan:5700"}, "stream.bind", "headway keys new"),
        ({"keys": "k"}, "stream.keys", "nearest: transport = 'tcp'"),
        ({"transport": "tcp", "keys": "k", "insecure": True}, "stream.insecure", "take one of the two out"),
    ],
)
def test_impossible(stream: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate({**BASE, "stream": stream})
    assert [fault[0] for fault in caught.value.faults] == [path]
    assert words in caught.value.faults[0][1]


def test_addresses() -> None:
    assert split_tcp("tcp://[::1]:5") == ("[::1]", 5)
    assert split_tcp("tcp://h:*") == ("h", 0)
    assert [split_tcp(text) for text in ("h:5", "tcp://h", "tcp://a/b:5", "tcp://:5")] == [None] * 4
    assert [is_loopback(host) for host in ("localhost", "127.9.9.9", "[::1]", "0.0.0.0", "here", "10.0.0.1")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
