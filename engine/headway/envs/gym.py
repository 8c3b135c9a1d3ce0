"""reasoning-gym data sets as environments: generated problems with the data set's own scorer.

The package is an extra (`pip install headway[envs]`) and is imported only when an environment is built.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from headway.envs.answer import AnswerReader, Extract
from headway.envs.arguments import ArgumentValue, unknown_argument
from headway.envs.protocol import Completion, Prompt
from headway.envs.template import PromptTemplate
from headway.errors import EnvironmentFailure

NUM_REMEMBERED = 64


class _Dataset(Protocol):
    def __getitem__(self, idx: int) -> dict[str, Any]: ...
    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float: ...


class GymEnvironment:
    """Problems of one reasoning-gym data set.

    Problem i is generated from seed + i: environments whose seeds differ by less than `size` share problems.

    Args:
        dataset: its name, as reasoning_gym.create_dataset takes it.
        seed, size: of the data set; `size` is also num_prompts.
        template: the prompt. Fields: `question`, and what the data set puts into a problem's metadata, such
            as `expression`.
        system, chat: make the prompt a chat (see PromptTemplate).
        extract, marker: where the answer stands in a completion (see AnswerReader).
        threshold: scores below it count as 0; None keeps the data set's own partial scores.
        config: everything else goes to the data set's own configuration.

    Raises:
        EnvironmentFailure: reasoning-gym is not installed; no such data set; an argument that the data set
            does not have or does not accept; a template field that its problems lack.
    """

    num_prompts: int | None

    def __init__(
        self,
        dataset: str,
        *,
        seed: int = 0,
        size: int = 10_000,
        template: str = "{question}",
        system: str | None = None,
        chat: bool = False,
        extract: Extract = "all",
        marker: str | None = None,
        threshold: float | None = None,
        **config: ArgumentValue,
    ) -> None:
        self._template = PromptTemplate(template, system=system, chat=chat)
        self._reader = AnswerReader(extract, marker)
        self._threshold = threshold
        self._dataset = create_dataset(dataset, {"seed": seed, "size": size, **config})
        self._entries: dict[int, dict[str, Any]] = {}
        self.num_prompts = size
        self.prompt(0)

    def prompt(self, index: int) -> Prompt:
        """The rendered template."""
        entry = self._entry(index)
        return self._template.render({**entry["metadata"], "question": entry["question"]})

    def reward(self, index: int, completion: Completion) -> float:
        """The data set's score of the extracted answer; 0 where there is none to extract."""
        answer = self._reader.read(completion.text)
        if answer is None:
            return 0.0
        score = float(self._dataset.score_answer(answer, self._entry(index)))
        return 0.0 if self._threshold is not None and score < self._threshold else score

    def _entry(self, index: int) -> dict[str, Any]:
        """The problem, generated once for all members of a group."""
        entry = self._entries.get(index)
        if entry is None:
            if len(self._entries) >= NUM_REMEMBERED:
                del self._entries[next(iter(self._entries))]
            entry = self._entries[index] = self._dataset[index]
        return entry


def create_dataset(name: str, config: dict[str, ArgumentValue]) -> _Dataset:
    """reasoning_gym.create_dataset with faults that say what to do.

    Raises:
        EnvironmentFailure: see GymEnvironment.
    """
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise EnvironmentFailure(
            f"gym:{name} needs reasoning-gym ({error}); install it: pip install 'headway[envs]'"
        ) from error
    if name not in DATASETS:
        raise EnvironmentFailure(unknown_argument("reasoning-gym data set", name, sorted(DATASETS)))
    dataset_class, config_class = DATASETS[name]
    allowed = sorted(field.name for field in dataclasses.fields(config_class))
    for key in config:
        if key not in allowed:
            own = ["template", "system", "chat", "extract", "marker", "threshold"]
            raise EnvironmentFailure(unknown_argument(f"argument of gym:{name}", key, own + allowed))
    try:
        built = config_class(**config)
        built.validate()
        return dataset_class(built)
    except (AssertionError, TypeError, ValueError) as error:
        raise EnvironmentFailure(f"gym:{name} refuses {config}: {error}") from error
