"""Settings changed while a run goes on: what takes effect, what is refused, and what the record says."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headway.config.live_keys import LIVE_KEYS
from headway.config.loading import parse_value
from headway.errors import ConfigError
from headway.learner.live import TARGET_ESS, USER, Settings
from headway.learner.publisher import PushInterval
from headway.learner.setup import recipe_of
from headway.types import PolicyVersion, SettingChange

MakeOffice = Callable[..., Any]


class Live:
    """Settings over a real desk; the trainer is what they may write to."""

    def __init__(self, office: MakeOffice, **changes: Any) -> None:
        self.office = office(staleness={"max_lag": 4, **changes.pop("staleness", {})}, **changes)
        config = self.office.config
        self.trainer = SimpleNamespace(lr=config.learner.lr, recipe=recipe_of(config.algo))
        self.interval = PushInterval(config.push.interval)
        self.notes: list[str] = []
        self.told: list[tuple[int, SettingChange]] = []
        self.settings = Settings(
            config,
            self.office.desk,
            cast("Any", self.trainer),
            self.interval,
            self.notes.append,
            lambda step, change: self.told.append((step, change)),
        )


def test_every_live_key_takes_effect_and_is_recorded(office: MakeOffice) -> None:
    live = Live(office)
    gate = live.office.desk.gate
    effects: dict[str, tuple[Any, Callable[[], Any]]] = {
        "algo.cap": (2.0, lambda: live.trainer.recipe.objective.cap),
        "learner.lr": (3e-3, lambda: live.trainer.lr),
        "push.interval": (2, lambda: (live.interval.steps, gate.policy.push_interval) == (2, 2) and 2),
        "staleness.max_lag": (6, lambda: gate.policy.max_lag),
        "staleness.slots": (3, lambda: gate.policy.slots),
        "staleness.target_ess": (0.5, lambda: live.settings.config.staleness.target_ess),
        "staleness.unit": ("token", lambda: gate.unit),
        "staleness.window": (2, lambda: gate.policy.window),
    }
    for key, (value, effect) in effects.items():
        assert effect() != value
        live.settings.set(key, value)
        assert effect() == value, key
    assert [change for _, change in live.told] == live.settings.take_changes()
    assert {change.key for _, change in live.told} == effects.keys()
    assert {change.source for _, change in live.told} == {USER}
    assert live.settings.take_changes() == []


def test_the_record_of_a_change_reads_back_as_the_value(office: MakeOffice) -> None:
    live = Live(office, algo={"objective": "ppo"})
    values: list[tuple[str, Any]] = [("algo.clip_high", 0.25), ("algo.clip_high", None), ("learner.lr", 1e-7)]
    for key, value in values:
        live.settings.set(key, value)
    told = [change for _, change in live.told]
    assert [(change.key, parse_value(change.key, change.value)) for change in told] == values


def test_clip_bounds_belong_to_objectives_that_clip(office: MakeOffice) -> None:
    clipped = Live(office, algo={"objective": "dapo", "correction": "tis", "proximal": "lag"})
    for key, value in (("algo.clip_low", 0.1), ("algo.clip_high", 0.15), ("algo.correction_cap", 2.0)):
        clipped.settings.set(key, value)
        assert getattr(clipped.trainer.recipe.objective, key.removeprefix("algo.")) == value
    with pytest.raises(ConfigError, match=r"algo\.clip_low"):
        Live(office).settings.set("algo.clip_low", 0.1)


def test_a_refused_change_changes_nothing(office: MakeOffice) -> None:
    live = Live(office)
    before = (live.settings.config, repr(live.office.desk.gate.policy))
    for key, value, message in (
        ("learner.beta1", 0.5, "cannot be changed while a run goes on"),
        ("staleness.maxlag", 1, "cannot be changed while a run goes on"),
        ("staleness.max_lag", -1, "greater than or equal to 0"),
        ("staleness.max_lag", "much", "expected"),
        ("staleness.window", 99, "nearest"),
        ("push.interval", 9, "nearest"),
    ):
        with pytest.raises(ConfigError, match=message):
            live.settings.set(key, value)
    assert (live.settings.config, repr(live.office.desk.gate.policy)) == before
    assert live.settings.take_changes() == []


def test_slots_and_window_go_back_to_their_defaults(office: MakeOffice) -> None:
    live = Live(office)
    policy = live.office.desk.gate.policy
    slots, window = policy.slots, policy.window
    live.settings.set("staleness.window", 1)
    live.settings.set("staleness.slots", 3)
    live.settings.set("staleness.window", 0)
    live.settings.set("staleness.slots", 0)
    assert (live.office.desk.gate.policy.slots, live.office.desk.gate.policy.window) == (slots, window)


def row(ess: float, skipped: bool = False) -> Any:
    return SimpleNamespace(ess=ess, skipped=skipped)


def test_the_loop_of_target_ess_moves_the_gate_and_says_when_it_is_at_its_end(office: MakeOffice) -> None:
    live = Live(office, staleness={"target_ess": 0.9})
    slots = live.office.desk.gate.policy.slots
    live.settings.observe(row(float("nan"), skipped=True))
    for _ in range(100):
        live.settings.observe(row(0.2))
    policy = live.office.desk.gate.policy
    assert policy.slots == policy.groups_per_step < slots
    assert live.trainer.recipe.objective.cap < 5.0
    assert {change.source for change in live.settings.take_changes()} == {TARGET_ESS}
    assert len(live.notes) == 1
    assert "out of reach" in live.notes[0]


def test_without_a_target_nothing_moves(office: MakeOffice) -> None:
    live = Live(office)
    for _ in range(20):
        live.settings.observe(row(0.01))
    assert live.told == []


def test_what_the_keys_say_is_what_the_settings_know(office: MakeOffice) -> None:
    """Each live key can be set to its own present value; none falls through without effect."""
    live = Live(office, algo={"objective": "dapo", "correction": "tis", "proximal": "lag"})
    values = {
        "algo.cap": None, "algo.clip_high": 0.2, "algo.clip_low": 0.2, "algo.correction_cap": 5.0,
        "learner.lr": 1e-5, "push.interval": 1, "staleness.max_lag": 4, "staleness.slots": 0,
        "staleness.target_ess": 0.0, "staleness.unit": "trajectory", "staleness.window": 0,
    }  # fmt: skip
    assert values.keys() == set(LIVE_KEYS)
    for key, value in values.items():
        if value is not None:
            live.settings.set(key, value)
    assert len(live.told) == len(values) - 1


def test_stale_groups_give_their_prompts_back(office: MakeOffice) -> None:
    """Lowering max_lag at once drops what is too old; its prompts come again in later tickets."""
    live = Live(office, staleness={"policy": "drop", "max_lag": 2})
    place = live.office
    generator = place.generator().join()
    place.tick()
    tickets = generator.granted()
    for ticket in tickets[:2]:
        generator.finish(ticket)
    assert len(place.train()) == 2
    generator.ack(PolicyVersion(0, 1))
    live.settings.set("staleness.max_lag", 0)
    for ticket in tickets[2:4]:
        generator.finish(ticket)
    assert place.desk.take().groups == []
    assert place.check()["dropped.stale"] == 2
    for ticket in tickets[4:]:
        generator.finish(ticket)
        place.desk.take()
    place.tick()
    stale = {ticket.prompt_index for ticket in tickets[2:]}
    assert {ticket.prompt_index for ticket in generator.granted()} <= stale
