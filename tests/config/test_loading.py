"""Recipes are read strictly: every fault at once, each with its path, and the nearest key that exists."""

from pathlib import Path

import pytest

from headway.config import RunConfig, load_recipe, to_toml
from headway.config.loading import load_toml, parse_value
from headway.errors import ConfigError

MINIMAL = '[model]\npath = "builtin:sort"\n[env]\nname = "sort"\n'


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(MINIMAL)
    return path


def faults_of(path: Path | None, *words: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, words)
    return dict(caught.value.faults)


def test_defaults_come_from_the_schema(recipe: Path) -> None:
    config = load_recipe(recipe)
    assert config == RunConfig.model_validate({"model": {"path": "builtin:sort"}, "env": {"name": "sort"}})


@pytest.mark.parametrize("words", [("--learner.lr", "2e-6"), ("--learner.lr=2e-6",)])
def test_dotted_overrides_in_both_spellings(recipe: Path, words: tuple[str, ...]) -> None:
    assert load_recipe(recipe, words).learner.lr == 2e-6


def test_a_misspelt_option_is_refused_with_a_suggestion(recipe: Path) -> None:
    assert "did you mean learner.lr?" in faults_of(recipe, "--learnign.lr", "1e-6")["learnign.lr"]
    assert "did you mean steps?" in faults_of(recipe, "--stesp", "3")["stesp"]
    assert "did you mean sampling.temperature?" in faults_of(recipe, "--temperature", "1.0")["temperature"]


def test_a_misspelt_key_in_the_file_is_refused_with_a_suggestion(recipe: Path) -> None:
    recipe.write_text(MINIMAL + "[learner]\nlearning_rate = 1\nlrr = 1e-6\n[staleness]\nmax_lagg = 1\n")
    found = faults_of(recipe)
    assert set(found) == {"learner.learning_rate", "learner.lrr", "staleness.max_lagg"}
    assert "did you mean learner.lr?" in found["learner.lrr"]
    assert "did you mean staleness.max_lag?" in found["staleness.max_lagg"]


def test_a_misspelt_environment_variable_is_refused(recipe: Path) -> None:
    assert load_recipe(recipe, None, {"HEADWAY__LEARNER__LR": "3e-6"}).learner.lr == 3e-6
    with pytest.raises(ConfigError, match=r"did you mean learner\.lr\?"):
        load_recipe(recipe, None, {"HEADWAY__LEARNER__LRR": "3e-6"})


def test_the_command_line_wins_over_the_environment_over_the_file(recipe: Path) -> None:
    recipe.write_text(MINIMAL + "[learner]\nlr = 1e-3\nbeta1 = 0.5\n[batch]\nprompts = 3\n")
    environ = {"HEADWAY__LEARNER__LR": "1e-4", "HEADWAY__BATCH__PROMPTS": "5"}
    config = load_recipe(recipe, ["--learner.lr", "1e-5"], environ)
    assert (config.learner.lr, config.batch.prompts, config.learner.beta1) == (1e-5, 5, 0.5)


def test_all_faults_at_once_unknown_wrong_and_contradicting(recipe: Path) -> None:
    recipe.write_text(
        'steps = "ten"\n[model]\npath = "x"\n[env]\n[learner]\nlr = -1.0\nbeta3 = 1\n'
        "[sampling]\ntop_p = 0.9\n[push]\ninterval = 50\n[batch]\nsamples = 1\n"
    )
    found = faults_of(recipe, "--strem.transport", "tcp")
    assert set(found) == {
        "steps",
        "env.name",
        "learner.lr",
        "learner.beta3",
        "sampling.top_p",
        "push.interval",
        "batch.samples",
        "strem.transport",
    }
    assert "got 'ten'" in found["steps"]
    assert "did you mean stream.transport?" in found["strem.transport"]


def test_a_wrong_key_hides_only_the_rules_that_read_it(recipe: Path) -> None:
    found = faults_of(recipe, "--staleness.max_lag", "many", "--push.interval", "99", "--sampling.top_k", "5")
    assert set(found) == {"staleness.max_lag", "sampling.top_k"}


@pytest.mark.parametrize(
    ("word", "path"),
    [
        ("--steps=2.5", "steps"),
        ("--save=1", "save"),
        ("--learner.lr=true", "learner.lr"),
        ("--algo.objective=gpro", "algo.objective"),
        ("--sampling.stop_strings=[1]", "sampling.stop_strings.0"),
        ("--learner.lr=inf", "learner.lr"),
        ("--learner.beta1=nan", "learner.beta1"),
        ("--learner=3", "learner"),
    ],
)
def test_wrong_types_are_refused_at_their_path(recipe: Path, word: str, path: str) -> None:
    assert path in faults_of(recipe, word)


def test_values_are_toml_where_they_are_and_text_elsewhere() -> None:
    assert parse_value("learner.lr", "1e-6") == 1e-6
    assert parse_value("sampling.stop_strings", '["a", "b"]') == ["a", "b"]
    assert parse_value("sampling.ignore_eos", "true") is True
    assert parse_value("name", "2024") == "2024"
    assert parse_value("algo.clip_low", "none") is None
    assert parse_value("env.args.low", "3") == 3
    assert parse_value("env.args.op", "add") == "add"
    assert parse_value("env.args.x", "1\nlr = 2") == "1\nlr = 2"


def test_free_tables_take_any_key(recipe: Path) -> None:
    config = load_recipe(recipe, ["--env.args.digits", "5", "--env.args.range.low=1"])
    assert config.env.args == {"digits": 5, "range": {"low": 1}}


def test_sections_as_mappings(recipe: Path) -> None:
    config = load_recipe(
        recipe, {"learner": {"lr": 1e-4}, "batch.prompts": 2, "env": {"args": {"digits": 3}}}
    )
    assert (config.learner.lr, config.batch.prompts, config.env.args) == (1e-4, 2, {"digits": 3})


def test_files_that_are_no_recipes(tmp_path: Path, recipe: Path) -> None:
    assert "recipe.toml" in faults_of(tmp_path / "recipes.toml")[""]
    recipe.write_text("steps = \n")
    assert "is not TOML" in faults_of(recipe)[""]


def test_words_that_are_no_overrides(recipe: Path) -> None:
    assert "not an override" in faults_of(recipe, "lr", "1e-6")[""]
    assert "needs a value" in faults_of(recipe, "--learner.lr")["learner.lr"]
    assert "did you mean" in faults_of(recipe, "--learner.lrr")["learner.lrr"]


def test_a_section_inside_a_section(recipe: Path) -> None:
    with recipe.open("a") as file:
        file.write('\n[model.lora]\nrank = 8\ntargets = ["q_proj"]\n')
    config = load_recipe(recipe, ["--model.lora.alpha", "16"], {"HEADWAY__MODEL__LORA__RANK": "4"})
    assert (config.model.lora.rank, config.model.lora.alpha) == (4, 16.0)
    assert config.model.lora.targets == ("q_proj",)
    assert load_toml(to_toml(config)) == config
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, {"model": {"lora": {"rnk": 3, "rank": -1, "targets": "q_proj", "alpha": "x"}}})
    assert {path for path, _ in caught.value.faults} == {
        "model.lora.rnk",
        "model.lora.rank",
        "model.lora.targets",
        "model.lora.alpha",
    }
    assert dict(caught.value.faults)["model.lora.rnk"] == "unknown key; did you mean model.lora.rank?"
    with pytest.raises(ConfigError, match=r"model\.lora.*is a section"):
        load_recipe(None, {"model.path": "x", "env.name": "sort", "model.lora": 3})
