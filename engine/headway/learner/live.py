"""Settings that can be changed while a run goes on, and the commands that change them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from headway.errors import ConfigError, HeadwayError
from headway.learner.desk import Desk
from headway.learner.intake import Intake
from headway.stream import LearnerControl
from headway.trainer import Trainer
from headway.wire.messages import Command, Event

_log = logging.getLogger(__name__)
SETTABLE = ("learner.lr", "staleness.max_lag", "staleness.slots", "staleness.window")


def apply_setting(key: str, value: str, desk: Desk, trainer: Trainer) -> None:
    """Change one key of a running learner; the caller holds the desk.

    Raises:
        ConfigError: the key cannot be changed while a run goes on, or the value is impossible.
    """
    if key not in SETTABLE:
        raise ConfigError([(key, f"cannot be changed while a run goes on; these can: {', '.join(SETTABLE)}")])
    try:
        number = float(value) if key == "learner.lr" else int(value)
    except ValueError:
        raise ConfigError([(key, f"{value!r} is not a number")]) from None
    if number < 0:
        raise ConfigError([(key, f"{value} is negative")])
    if key == "learner.lr":
        trainer.lr = float(number)
        return
    desk.gate.change(**{key.removeprefix("staleness."): int(number)})


class LiveSettings:
    """Serves the supervisor's commands from the learner's main thread.

    Args:
        control: None for a learner without a supervisor; on_stop: told why to stop.
    """

    def __init__(
        self, control: LearnerControl | None, intake: Intake, trainer: Trainer, on_stop: Callable[[str], None]
    ) -> None:
        self._control = control
        self._intake = intake
        self._trainer = trainer
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
                apply_setting(command.key, command.value, self._intake.desk, self._trainer)
        except HeadwayError as error:
            return str(error)
        _log.info("set %s = %s", command.key, command.value)
        return ""
