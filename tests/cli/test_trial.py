"""What a dry run tries: the model's folder, the environment, its arguments, and the first prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.cli.trial import try_parts
from headway.config import load_recipe
from headway.errors import EnvironmentFailure, HeadwayError, ModelError

ODD = """
class Odd:
    num_prompts = 3
    def prompt(self, index): return "^sQQ="
    def reward(self, index, completion): return 0.0
"""


def tried(model: str, env: str, **arguments: object) -> list[str]:
    return try_parts(load_recipe(None, {"model.path": model, "env.name": env, "env.args": arguments}))


@pytest.mark.parametrize(
    ("model", "env", "arguments", "error", "text"),
    [
        ("nowhere", "sort", {}, ModelError, "'nowhere' is not a model folder"),
        ("builtin:sort9", "sort", {}, ModelError, "no builtin model 'sort9'"),
        ("builtin:sort3", "none.py", {}, EnvironmentFailure, "no such file"),
        ("builtin:sort3", "sort", {"digit": 3}, EnvironmentFailure, "did you mean 'digits'"),
    ],
)
def test_what_cannot_work_is_said(
    model: str, env: str, arguments: dict[str, object], error: type[HeadwayError], text: str
) -> None:
    with pytest.raises(error, match=text):
        tried(model, env, **arguments)


def test_the_first_prompt_is_shown_and_unknown_characters_are_counted(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    lines = tried("builtin:sort3", str(tmp_path / "odd.py"))
    assert lines[1].endswith("3 prompts; the first has 5 tokens: '^sQQ='")
    assert "40% of its tokens are unknown" in lines[2]
    assert len(tried("builtin:sort3", "sort", digits=3)) == 2
