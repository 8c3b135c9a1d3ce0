"""The lines that a user reads before a run."""

from typing import Any

from headway.config import RunConfig, derived, describe, load_recipe

BASE: dict[str, Any] = {"model.path": "builtin:sort", "env.name": "sort"}


def load(**keys: Any) -> RunConfig:
    return load_recipe(None, {**BASE, **{key.replace("__", "."): value for key, value in keys.items()}})


def test_one_line_says_what_the_batch_words_mean() -> None:
    config = load(
        batch__prompts=4, batch__samples=8, staleness__max_lag=4, sampling__max_new_tokens=100,
        batch__tokens_per_row=1000,
    )  # fmt: skip
    assert (
        "per update: 4 prompts x 8 samples = 32 sequences, about 4 rows of 1000 tokens (prompts not "
        "counted), max lag 4 => at most 96 sequences in flight"
    ) in describe(config, cores=2)


def test_a_bound_out_of_reach_is_said() -> None:
    few = describe(load(batch__prompts=4, staleness__max_lag=8, staleness__slots=8), cores=2)
    assert "the bound max_lag = 8 cannot be reached: with slots = 8 no lag exceeds 5" in few
    short = describe(load(steps=3, staleness__max_lag=8), cores=2)
    assert any("cannot be reached: with 3 updates no lag exceeds 2" in line for line in short)
    narrow = describe(load(staleness__max_lag=8, generator__max_running=16), cores=2)
    assert any(
        "lags stay near 0, below max_lag = 8: 16 sequences are decoded at once" in line for line in narrow
    )
    assert not any("cannot be reached" in line for line in describe(load(staleness__max_lag=2), cores=2))


def test_cores_are_shared_fairly() -> None:
    assert derived.threads(load(), "learner", cores=8) == 4
    assert derived.threads(load(generator__replicas=3), "generator", cores=8) == 2
    assert derived.threads(load(generator__replicas=3), "generator", cores=2) == 1
    assert derived.threads(load(learner__threads=5), "learner", cores=2) == 5
    assert any("torch threads share 2 cores" in line for line in describe(load(learner__threads=5), cores=2))


def test_adapters_are_said() -> None:
    assert "adapters" not in describe(load(), cores=2)[0]
    some = load(model__lora__rank=4, model__lora__alpha=8.0, model__lora__targets=["q_proj", "v_proj"])
    assert describe(some, cores=2)[0].endswith(", adapters of rank 4, alpha 8, on q_proj, v_proj")
    assert describe(load(model__lora__rank=4), cores=2)[0].endswith("on every linear layer but the head")
