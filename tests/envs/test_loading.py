"""Environments by name and from a user's file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from headway.envs import Completion, EnvSpec, check_prompt, load_environment
from headway.envs.arguments import ArgumentValue
from headway.errors import EnvironmentFailure

GOOD = """
import dataclasses
import neighbour

@dataclasses.dataclass
class Helper:
    x: int = 1

class Echo:
    num_prompts = 3
    def __init__(self, word: str = "a", scale: float = 1.0, pair: tuple[int, int] = (0, 0), *, loud=False):
        self.args = (word, scale, pair, loud)
    def prompt(self, index): return f"{self.args[0]}{index}"
    def reward(self, index, completion): return self.args[1] * len(completion.text)
"""
SECOND = """
class Other(Echo):
    def prompt(self, index): return [{"role": "user", "content": "hi"}]
"""


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    (folder / "neighbour.py").write_text("")
    (folder / name).write_text(text)
    return str(folder / name)


def test_the_one_class_of_a_file(tmp_path: Path) -> None:
    environment = load_environment(EnvSpec(write(tmp_path, GOOD), {"word": "w", "scale": 2, "pair": [1, 2]}))
    assert environment.prompt(2) == "w2"
    assert environment.reward(0, Completion("four", [], "stop")) == 8.0
    assert vars(environment)["args"] == ("w", 2.0, (1, 2), False)


def test_a_class_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + SECOND)
    assert load_environment(EnvSpec(f"{path}:Echo")).prompt(1) == "a1"
    assert load_environment(EnvSpec(f"{path}:Other")).prompt(1) == [{"role": "user", "content": "hi"}]


def test_relative_paths_are_relative_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    assert load_environment(EnvSpec("mine.py")).num_prompts == 3


def test_two_files_of_one_name_do_not_mix(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, GOOD.replace('word: str = "a"', f"word: str = {folder!r}"))
    first = load_environment(EnvSpec(str(tmp_path / "one" / "mine.py")))
    second = load_environment(EnvSpec(str(tmp_path / "two" / "mine.py")))
    assert (first.prompt(0), second.prompt(0)) == ("one0", "two0")


@pytest.mark.parametrize(
    ("text", "suffix", "args", "message"),
    [
        (GOOD + SECOND, "", {}, "several classes are environments: Echo, Other; name one"),
        (GOOD, ":Ecko", {}, "'Ecko'; did you mean 'Echo'"),
        (GOOD, ":Helper", {}, "class Helper lacks prompt, reward"),
        ("class A:\n  def prompt(self, i): ...", "", {}, "A lacks reward"),
        ("x = 1", "", {}, "it defines no class"),
        ("import nonsense_module", "", {}, "cannot be imported: ModuleNotFoundError"),
        ("def broken(:", "", {}, "cannot be imported: SyntaxError"),
        (GOOD.replace("num_prompts = 3", ""), "", {}, "lacks the attribute num_prompts"),
        (GOOD.replace("num_prompts = 3", "num_prompts = 0"), "", {}, "num_prompts: got 0"),
        (GOOD.replace('f"{self.args[0]}{index}"', "42"), "", {}, "returned int; expected text"),
        (GOOD.replace('f"{self.args[0]}{index}"', "1 / 0"), "", {}, "ZeroDivisionError"),
        (GOOD, "", {"wrod": "x"}, "'wrod'; did you mean 'word'.*allowed: word, scale, pair, loud"),
        (GOOD, "", {"word": 5}, "argument 'word': got 5"),
        (GOOD, "", {"word": [["nested"]]}, "argument 'word': got .*nested"),  # type: ignore[list-item]
        (GOOD.replace('word: str = "a"', "word"), "", {}, "needs the arguments: word"),
    ],
)
def test_faults_say_what_is_wrong(
    tmp_path: Path, text: str, suffix: str, args: dict[str, ArgumentValue], message: str
) -> None:
    with pytest.raises(EnvironmentFailure, match=message):
        load_environment(EnvSpec(write(tmp_path, text) + suffix, args))


@pytest.mark.parametrize(
    ("name", "message"),
    [("sorts", "did you mean 'sort'"), ("nowhere.py", "no such file"), ("", "path/to/file.py")],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(EnvironmentFailure, match=message):
        load_environment(EnvSpec(name))


def test_prompts_are_checked() -> None:
    check_prompt("text")
    check_prompt([{"role": "user", "content": "x"}])
    for bad in (None, 5, [{"role": "user"}], ["text"], [{"role": "user", "content": 5}]):
        with pytest.raises(EnvironmentFailure, match="expected text or a list"):
            check_prompt(bad)


def test_specs_travel() -> None:
    spec = EnvSpec(
        "gym:chain_sum", {"a": 1, "b": 0.5, "c": "x", "d": [1, "x", None], "e": None, "f": {"x": True}}
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=EnvSpec) == spec
