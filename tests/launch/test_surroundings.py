"""What a child process is started with: the GPU that the recipe gives it, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headway.config import RunConfig
from headway.config.loading import validate
from headway.errors import ConfigError
from headway.launch.surroundings import check_gpus, child_environment

VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture
def config(tiny_config: Callable[..., RunConfig]) -> RunConfig:
    generator: dict[str, Any] = {"engine": "vllm", "replicas": 3, "gpus": [1, 2, 2]}
    return tiny_config(learner={"gpu": 0, "device": "cuda"}, generator=generator)


def test_each_process_sees_its_own_gpu(config: RunConfig) -> None:
    assert child_environment(config, "learner", inherited={})[VISIBLE] == "0"
    seen = [child_environment(config, "generator", index, inherited={})[VISIBLE] for index in range(3)]
    assert seen == ["1", "2", "2"]
    # a generator that another machine adds has no place in the list
    assert VISIBLE not in child_environment(config, "generator", 3, inherited={})


def test_gpus_are_counted_among_those_that_are_visible(config: RunConfig) -> None:
    environ = {VISIBLE: "GPU-a,7,5"}
    assert child_environment(config, "learner", inherited=environ)[VISIBLE] == "GPU-a"
    assert child_environment(config, "generator", 1, inherited=environ)[VISIBLE] == "5"
    check_gpus(config, environ)
    for hidden in ("", "4,5", "-1", "4,5,-1,6"):
        with pytest.raises(ConfigError, match=rf"{VISIBLE} = '{hidden}' shows"):
            check_gpus(config, {VISIBLE: hidden})


def test_a_generator_of_several_ranks_sees_as_many_gpus(tiny_config: Callable[..., RunConfig]) -> None:
    ranks: dict[str, Any] = {"engine": "vllm", "replicas": 2, "vllm": {"tensor_parallel_size": 2}}
    config = tiny_config(generator={**ranks, "gpus": [1, 2, 3, 4]})
    seen = [child_environment(config, "generator", index, inherited={})[VISIBLE] for index in range(2)]
    assert seen == ["1,2", "3,4"]
    environ = {VISIBLE: "a,b,c,d,e"}
    assert child_environment(config, "generator", 1, inherited=environ)[VISIBLE] == "d,e"
    with pytest.raises(ConfigError, match=r"generator\.gpus: 4: .* shows 4"):
        check_gpus(config, {VISIBLE: "a,b,c,d"})
    for gpus, fault in (
        ([1, 2], r"expected 2 \(generator\.vllm\.tensor_parallel_size\)"),
        ([1, 1, 2, 3], "twice"),
    ):
        with pytest.raises(ConfigError, match=fault):
            validate(tiny_config(generator={**ranks, "gpus": gpus}).model_dump())


def test_a_recipe_that_names_none_changes_nothing(tiny_config: Callable[..., RunConfig]) -> None:
    config = tiny_config()
    assert VISIBLE not in child_environment(config, "generator", inherited={})
    assert child_environment(config, "learner", inherited={VISIBLE: "2,3"})[VISIBLE] == "2,3"
