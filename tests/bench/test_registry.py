"""Benches are found by name, and a wrong name is answered with the right ones."""

import subprocess
import sys

import pytest

from headway.errors import UnsupportedOption
from headway_bench import rival
from headway_bench.__main__ import main
from headway_bench.registry import BENCHES, listing, run


def test_every_bench_has_a_module_with_a_main():
    for bench in BENCHES.values():
        code = f"import importlib.util; assert importlib.util.find_spec({bench.module!r})"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_bench_gets_its_arguments_and_gives_its_exit_code(monkeypatch: pytest.MonkeyPatch):
    seen: list[list[str]] = []

    def fake(arguments: list[str]) -> int:
        seen.append(arguments)
        return 1

    monkeypatch.setattr(rival, "main", fake)
    assert run("rival", ["--rounds", "2"]) == 1
    assert seen == [["--rounds", "2"]]


def test_a_near_miss_is_answered_with_the_name():
    with pytest.raises(UnsupportedOption, match=r"'rivals'; did you mean 'rival'\? The benches are: .*rival"):
        run("rivals", [])


def test_a_far_miss_is_answered_with_the_list():
    with pytest.raises(UnsupportedOption, match=r"'zzz'\. The benches are: .*rival") as caught:
        run("zzz", [])
    assert "did you mean" not in str(caught.value)


def test_the_module_lists_benches_and_refuses_unknown_ones(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    assert capsys.readouterr().out.strip() == listing()
    assert main(["rivl"]) == 2
    assert "did you mean 'rival'?" in capsys.readouterr().err
