"""What a dry run tries: the model's folder, the environment, its arguments, and the first prompt."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from headway.cli.trial import BUILTIN_HEAD_DIM, try_parts
from headway.config import load_recipe
from headway.errors import EnvironmentFailure, HeadwayError, ModelError
from headway.model.policy import head_dim_of
from headway_kernels.errors import BackendUnavailable

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
    assert "attention" in lines[3]
    assert len(tried("builtin:sort3", "sort", digits=3)) == 3


def test_what_the_recipe_names_and_this_machine_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def trial(**keys: object) -> list[str]:
        given = {key.replace("__", "."): value for key, value in keys.items()}
        return try_parts(load_recipe(None, {"model.path": "builtin:sort3", "env.name": "sort", **given}))

    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(HeadwayError, match=r"headway\[tensorboard\]"):
        trial(telemetry__sinks=["tensorboard"])
    with pytest.raises(BackendUnavailable, match=r"push\.backend = 'nccl' needs a CUDA device"):
        trial(push__channel="collective", push__backend="nccl")
    with pytest.raises(HeadwayError, match=r"learner.attention = 'flash'|learner.attention: 'flash'"):
        trial(learner__attention="flash")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(HeadwayError, match=r"generator.gpus: 1: CUDA_VISIBLE_DEVICES = '3' shows 1"):
        trial(generator__gpus=[1], generator__engine="vllm")
    with pytest.raises(HeadwayError, match=r"generator.gpus: \[1\] has no effect: the embedded engine"):
        trial(generator__gpus=[1])
    with pytest.raises(HeadwayError, match=r"learner.gpu: 0 has no effect with learner.device = 'cpu'"):
        trial(learner__gpu=0)


def test_a_builtin_models_heads_are_as_large_as_is_assumed(tiny_model: Path) -> None:
    assert head_dim_of(AutoConfig.from_pretrained(str(tiny_model))) == BUILTIN_HEAD_DIM
