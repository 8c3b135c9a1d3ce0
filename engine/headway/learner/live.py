"""Settings that can be changed while a run goes on: by people, by programs, and by the loop of target_ess."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from headway.config import RunConfig
from headway.config.checks import value_of
from headway.config.live_keys import LIVE_KEYS, as_text, changed
from headway.config.loading import parse_value
from headway.errors import ConfigError, HeadwayError
from headway.learner.desk import Desk
from headway.learner.intake import Intake
from headway.learner.publisher import PushInterval
from headway.learner.setup import recipe_of
from headway.staleness import EssController, StalenessUnit
from headway.staleness.ess import EssLimits, EssState
from headway.stream import LearnerControl
from headway.trainer import Trainer
from headway.types import SettingChange, StepRecord
from headway.wire.messages import Command, Event

_log = logging.getLogger(__name__)
USER, TARGET_ESS = "user", "target_ess"


class Settings:
    """The config in force, and its changes since the last row.

    Args:
        config: of the run. desk, trainer, interval: what the changes act on; the caller holds the desk.
        note: told what people should know.
        on_change: told each change as it takes effect, with the step whose weights are in force.

    Attributes:
        config: in force. asked: without the moves of target_ess: what a resume starts from.
    """

    def __init__(
        self,
        config: RunConfig,
        desk: Desk,
        trainer: Trainer,
        interval: PushInterval,
        note: Callable[[str], None],
        on_change: Callable[[int, SettingChange], None] = lambda step, change: None,
    ) -> None:
        self.config = self.asked = config
        self._desk = desk
        self._trainer = trainer
        self._interval = interval
        self._note = note
        self._on_change = on_change
        self._recent: list[SettingChange] = []
        self._said_exhausted = False
        self._controller = self._make_controller()

    def set(self, key: str, value: Any, source: str = USER) -> None:
        """Change one key; it is in force when this returns.

        Args:
            key: one of config.live_keys.LIVE_KEYS. value: as in a recipe. source: who wants it.

        Raises:
            ConfigError: the key cannot be changed, or the value is impossible; nothing has changed.
        """
        config = changed(self.config, key, value)
        section, _, leaf = key.partition(".")
        if key == "staleness.unit":
            self._desk.gate.change(unit=StalenessUnit(config.staleness.unit))
        elif key in ("staleness.max_lag", "staleness.slots", "staleness.window"):
            self._desk.gate.change(**{leaf: getattr(config.staleness, leaf)})
        elif key == "push.interval":
            self._desk.gate.change(push_interval=config.push.interval)
            self._interval.steps = config.push.interval
        elif key == "learner.lr":
            self._trainer.lr = config.learner.lr
        elif section == "algo":
            self._trainer.recipe = recipe_of(config.algo)
        self.config = config
        if source != TARGET_ESS:  # the loop's limits are what people ask for
            self.asked = changed(self.asked, key, value)
            self._controller = self._make_controller()
        change = SettingChange(key, as_text(value), source)
        self._recent.append(change)
        self._on_change(self._desk.gate.step, change)
        _log.info("set %s = %s (%s)", key, value, source)

    def observe(self, record: StepRecord) -> None:
        """One step's row: the loop of target_ess may move something."""
        controller = self._controller
        if controller is None or record.skipped:
            return
        for key, value in controller.observe(record.ess).items():
            self.set(key, value, TARGET_ESS)
        if controller.exhausted and not self._said_exhausted:
            self._note(
                f"staleness.target_ess = {controller.target:g} is out of reach: ess is {controller.measured:.2f} with "
                "the fewest slots, a push every step and the tightest clip bound; lower learner.lr or the target"
            )
        self._said_exhausted = controller.exhausted

    @property
    def ess_state(self) -> EssState | None:
        """Of the loop, None when it is off."""
        return None if self._controller is None else self._controller.state()

    def restore(self, asked: RunConfig, in_force: RunConfig, ess: EssState | None) -> None:
        """Go on with what target_ess had moved, where the recipe still asks for the same.

        Args:
            asked, in_force: of the checkpoint.
        """
        if self._controller is None or ess is None:
            return
        same = [key for key in LIVE_KEYS if value_of(self.config, key) == value_of(asked, key)]
        for key in same:
            if value_of(in_force, key) != value_of(asked, key):
                self.set(key, value_of(in_force, key), TARGET_ESS)
        if len(same) == len(LIVE_KEYS):
            self._controller.restore(ess)

    def take_changes(self) -> list[SettingChange]:
        """What has changed since the last call."""
        taken, self._recent = self._recent, []
        return taken

    def _make_controller(self) -> EssController | None:
        target = self.config.staleness.target_ess
        if not target:
            return None
        policy = self._desk.gate.policy
        limits = EssLimits(
            policy.groups_per_step, policy.slots, self.config.push.interval, _clip_bounds(self.config)
        )
        return EssController(target, limits)


def _clip_bounds(config: RunConfig) -> dict[str, float]:
    """The bounds that the objective reads, by key; a recipe is refused when it sets one of the others."""
    objective = recipe_of(config.algo).objective
    bounds: dict[str, float] = {}
    for name in ("cap", "clip_low", "clip_high", "correction_cap"):
        value: float = getattr(objective, name)
        try:
            changed(config, f"algo.{name}", 0.99 * value)
        except ConfigError:
            continue
        bounds[f"algo.{name}"] = value
    return bounds


class LiveSettings:
    """Serves the supervisor's commands from the learner's main thread.

    Args:
        control: None for a learner without a supervisor; on_stop: told why to stop.
    """

    def __init__(
        self,
        control: LearnerControl | None,
        intake: Intake,
        settings: Settings,
        on_stop: Callable[[str], None],
    ) -> None:
        self._control = control
        self._intake = intake
        self._settings = settings
        self._on_stop = on_stop

    def serve(self) -> None:
        """Carry out what has come; never waits. The caller may hold the intake's lock."""
        if self._control is None:
            return
        for command in self._control.poll(0.0):
            error = self._carry_out(command)
            self._control.send(Event(answered=command.command_id, error=error))

    def _carry_out(self, command: Command) -> str:
        if command.action == "stop":
            self._on_stop("asked to stop")
            return ""
        if command.action != "set":
            return f"unknown action {command.action!r}; there are: set, stop"
        try:
            with self._intake.lock:
                self._settings.set(command.key, parse_value(command.key, command.value))
        except HeadwayError as error:
            return str(error)
        return ""
