"""A study: which settings were tried, what they did, and which to try next (Optuna's TPE).

Its state is one SQLite file, so that a study that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from headway.config import RunConfig
from headway.errors import ConfigError, HeadwayError, UnsupportedOption
from headway.tune.outcome import Outcome, measure
from headway.tune.space import Limits, Space, with_values

By = Literal["tokens", "reward"]
_BEYOND = -1e9  # the score of a setting beyond a limit, less what it is beyond it: below that of any other
_NUM_RANDOM = 4  # settings before the sampler looks at outcomes


@dataclass(frozen=True)
class Trial:
    """One setting that was tried.

    Attributes:
        values: by key; outcome: None where it failed, with the fault. score: higher is better.
    """

    number: int
    values: dict[str, int]
    outcome: Outcome | None
    score: float
    fault: str

    @property
    def kept(self) -> bool:
        """Whether it was measured and keeps the limits."""
        return self.score > _BEYOND / 2


class Study:
    """Trials of a recipe, in a folder. Open it with `Study.open`."""

    def __init__(
        self,
        config: RunConfig,
        space: Space,
        limits: Limits,
        folder: Path,
        by: By,
        seconds: float,
        study: Any,
    ) -> None:
        self.config = config
        self._seconds = seconds
        self._space, self._limits, self._folder, self._by = space, limits, folder, by
        self._study = study

    @classmethod
    def open(
        cls, config: RunConfig, limits: Limits, folder: Path, by: By = "tokens", seconds: float = 30.0
    ) -> Study:
        """A new study, or the one that the folder holds.

        Args:
            by: what is best: "tokens" trained per second, or the "reward" after the same time.
            seconds: of each run after its first ticket.

        Raises:
            UnsupportedOption: Optuna is not installed.
            ConfigError: the folder holds something else, or a study of another recipe, limits, measure or length.
        """
        optuna = _optuna()
        if folder.is_dir() and any(folder.iterdir()) and not (folder / "study.db").exists():
            raise ConfigError([("--out", f"{folder} holds no study and is not empty; give another folder")])
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError([("--out", f"{folder}: {error.strerror}")]) from None
        space = Space.of(config, limits)
        study = _open_study(
            optuna,
            storage=_url(folder),
            study_name="headway",
            direction="maximize",
            load_if_exists=True,
        )
        # A study that goes on must not draw what it drew first again.
        study.sampler = optuna.samplers.TPESampler(
            seed=config.seed + len(study.trials), n_startup_trials=_NUM_RANDOM
        )
        about = msgspec.json.encode(
            {
                "recipe": config.model_dump(exclude={"run_dir"}),
                "limits": limits,
                "by": by,
                "seconds": seconds,
            },
            enc_hook=repr,
        ).decode()
        held = study.user_attrs.get("about")
        if held is None:
            study.set_user_attr("about", about)
            study.enqueue_trial(space.own(config))
        elif held != about:
            fault = (
                f"{folder} holds a study of another recipe, limits, --by or --seconds; give another folder"
            )
            raise ConfigError([("--out", fault)])
        for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)  # its process was killed
            queued = trial.system_attrs.get("fixed_params")  # the recipe's own setting, or the plan's
            if queued is not None:
                study.enqueue_trial(queued)
        return cls(config, space, limits, folder, by, seconds, study)

    def suggest(self, values: Mapping[str, int]) -> None:
        """Try these values, or the choices nearest to them, before others; once."""
        wanted = self._space.nearest({**self._space.own(self.config), **values})
        if self._study.user_attrs.get("suggested") != wanted:
            self._study.set_user_attr("suggested", wanted)
            if wanted != self._space.own(self.config):
                self._study.enqueue_trial(wanted)

    def run(self, num_trials: int, say: Callable[[str], None]) -> None:
        """Try settings until so many were tried, those of earlier times included.

        Args:
            say: told of each trial.
        """
        while len(self.trials()) < num_trials:
            trial = self._study.ask()
            values = {
                key: trial.suggest_categorical(key, choices) for key, choices in self._space.choices.items()
            }
            same = next(
                (each for each in self.trials() if each.values == values and each.outcome is not None), None
            )
            if same is not None and same.outcome is not None:
                self._told(trial, same.outcome)  # a run of it again would say the same
                say(f"trial {trial.number}: the same as trial {same.number}, which is not run again")
                continue
            try:
                self._told(trial, self._measure(trial.number, values))
            except HeadwayError as error:
                trial.set_user_attr("fault", str(error)[:500])
                self._study.tell(trial, state=_optuna().trial.TrialState.FAIL)
            say(describe(self.trials()[-1]))

    def trials(self) -> list[Trial]:
        """What was tried, in order; a trial whose process was killed counts as none."""
        found: list[Trial] = []
        for trial in self._study.trials:
            told, fault = trial.user_attrs.get("outcome"), trial.user_attrs.get("fault", "")
            if told is None and not fault:
                continue
            outcome = None if told is None else msgspec.convert(told, Outcome)
            score = float("-inf") if outcome is None else self._score(outcome)
            found.append(Trial(trial.number, dict(trial.params), outcome, score, fault))
        return found

    def best(self) -> Trial | None:
        """The best that keeps the limits; None: no trial did."""
        kept = [trial for trial in self.trials() if trial.kept]
        return max(kept, key=lambda trial: trial.score, default=None)

    def _measure(self, number: int, values: dict[str, int]) -> Outcome:
        run_dir = self._folder / "trials" / f"{number:03d}"
        shutil.rmtree(run_dir, ignore_errors=True)  # left by a study that was killed
        config = with_values(self.config, values)
        checkpoint = config.checkpoint.model_copy(update={"interval": 0})
        return measure(
            config.model_copy(update={"run_dir": str(run_dir), "save": False, "checkpoint": checkpoint}),
            self._seconds,
        )

    def _told(self, trial: Any, outcome: Outcome) -> None:
        trial.set_user_attr("outcome", msgspec.to_builtins(outcome))
        self._study.tell(trial, self._score(outcome))

    def _score(self, outcome: Outcome) -> float:
        if self._limits.lag is not None and outcome.lag_mean > self._limits.lag:
            return _BEYOND + self._limits.lag - outcome.lag_mean
        return outcome.tokens_per_s if self._by == "tokens" else outcome.reward


def describe(trial: Trial) -> str:
    """A line for people."""
    settings = ", ".join(f"{key} {value}" for key, value in trial.values.items())
    if trial.outcome is None:
        return f"trial {trial.number}: {settings}: {trial.fault}"
    found = trial.outcome
    return (
        f"trial {trial.number}: {settings}: {found.tokens_per_s:,.0f} tokens/s, mean lag {found.lag_mean:.2f}, reward "
        f"{found.reward:.3f}, idle: learner {found.learner_idle:.0%}, generators {found.generator_idle:.0%}"
        + (" (a limit is not kept)" if not trial.kept else "")
    )


def _url(folder: Path) -> str:
    path = str(folder.absolute() / "study.db")
    if any(sign in path for sign in "?%#"):
        raise ConfigError([("--out", f"{folder}: a study's folder has no '?', '%' or '#' in its path")])
    return f"sqlite:///{path}"


def _open_study(optuna: Any, **options: Any) -> Any:
    try:
        return optuna.create_study(**options)
    except importlib.import_module("sqlalchemy.exc").SQLAlchemyError as error:
        raise ConfigError([("--out", f"study.db cannot be read: {str(error).splitlines()[0]}")]) from None


def _optuna() -> Any:
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        raise UnsupportedOption(
            "headway tune needs optuna, which is not installed: pip install 'headway[tune]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
