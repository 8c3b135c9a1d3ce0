"""reasoning-gym data sets: prompts from templates, rewards from the data set's own scorer."""

from __future__ import annotations

import pytest
import reasoning_gym

from headway.envs import Completion, EnvSpec, load_environment
from headway.envs.loading import EnvSpec as Spec
from headway.errors import EnvironmentFailure

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def completion(text: str) -> Completion:
    return Completion(text, [1], "stop")


def chain_sum(**args: str | int | float | bool | None) -> EnvSpec:
    return Spec("gym:chain_sum", {**ONE_DIGIT, "seed": 7, **args})


def test_questions_and_scores_are_the_data_sets() -> None:
    environment = load_environment(chain_sum(size=50))
    dataset = reasoning_gym.create_dataset("chain_sum", seed=7, size=50, **ONE_DIGIT)
    assert environment.num_prompts == 50
    for index in (0, 3, 49, 3):
        entry = dataset[index]
        assert environment.prompt(index) == entry["question"]
        for answer in (entry["answer"], entry["answer"] + ".0", entry["answer"] + " apples", "x"):
            expected = dataset.score_answer(answer, entry)
            assert environment.reward(index, completion(answer)) == expected


def test_templates_see_the_metadata() -> None:
    environment = load_environment(chain_sum(template="1 + 1 = 2\n{expression} ="))
    dataset = reasoning_gym.create_dataset("chain_sum", seed=7, size=50, **ONE_DIGIT)
    assert environment.prompt(4) == f"1 + 1 = 2\n{dataset[4]['metadata']['expression']} ="


def test_chat_prompts() -> None:
    question = load_environment(chain_sum()).prompt(0)
    assert load_environment(chain_sum(chat=True)).prompt(0) == [{"role": "user", "content": question}]
    assert load_environment(chain_sum(system="Be brief.")).prompt(0) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": question},
    ]


def test_extraction_and_threshold() -> None:
    dataset = reasoning_gym.create_dataset("chain_sum", seed=7, size=50, **ONE_DIGIT)
    answer = dataset[0]["answer"]
    first_line = load_environment(chain_sum(extract="first_line"))
    assert first_line.reward(0, completion(f" {answer}\n1 + 1 =")) == 1.0
    assert (
        first_line.reward(0, completion("\n5")) == 0.0
    )  # nothing to extract is a wrong answer, not a failure
    partial = first_line.reward(0, completion(f"{answer} or so"))
    assert 0 < partial < 1
    strict = load_environment(chain_sum(extract="first_line", threshold=1.0))
    assert strict.reward(0, completion(f"{answer} or so")) == 0.0
    assert strict.reward(0, completion(answer)) == 1.0


@pytest.mark.parametrize("name", ["basic_arithmetic", "letter_counting", "countdown"])
def test_other_data_sets_score_their_own_answers(name: str) -> None:
    environment = load_environment(EnvSpec(f"gym:{name}", {"seed": 3, "size": 20}))
    dataset = reasoning_gym.create_dataset(name, seed=3, size=20)
    for index in range(3):
        assert environment.prompt(index) == dataset[index]["question"]
        assert environment.reward(index, completion(dataset[index]["answer"])) == 1.0


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("gym:chain_summ", {}, "'chain_summ'; did you mean 'chain_sum'"),
        ("gym:", {}, "gym:<dataset>"),
        ("gym:chain_sum", {"max_digit": 3}, "'max_digit'; did you mean 'max_digits'"),
        ("gym:chain_sum", {"templat": "x"}, "'templat'; did you mean 'template'"),
        ("gym:chain_sum", {"min_terms": 5, "max_terms": 2}, "max_terms must be >= min_terms"),
        ("gym:chain_sum", {"min_terms": "two"}, "refuses"),
        ("gym:chain_sum", {"template": "{problem} ="}, "no field 'problem'.*expression"),
        ("gym:chain_sum", {"extract": "first"}, "'extract'.*'first'"),
        ("gym:chain_sum", {"extract": "after_marker"}, "marker"),
        ("gym:chain_sum", {"seed": "x"}, "'seed'"),
        ("gym:chain_sum", {"dataset": "gcd"}, "'dataset'"),
    ],
)
def test_faults_name_what_is_wrong(name: str, args: dict[str, str | int], message: str) -> None:
    with pytest.raises(EnvironmentFailure, match=message):
        load_environment(EnvSpec(name, {**args}))
