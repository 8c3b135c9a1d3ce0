"""The frozen-policy check finds nothing on a sound set-up, and finds what is planted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import headway.serial.selfcheck as module
from headway.config import RunConfig
from headway.serial.selfcheck import SelfCheck, selfcheck


@pytest.fixture
def config(tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    torch.set_num_threads(1)
    monkeypatch.setattr(module, "NUM_PUSHES", 20)
    return tiny_config(sampling={"max_new_tokens": 5})


def wrong(check: SelfCheck) -> list[str]:
    return [finding.name for finding in check.run() if not finding.passed]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sound_set_up_passes_every_check(config: RunConfig, dtype: str) -> None:
    push = config.push.model_copy(update={"dtype": dtype})
    findings = list(SelfCheck(config.model_copy(update={"push": push})).run())
    assert [finding.line() for finding in findings if not finding.passed] == []
    assert len(findings) == 13
    agreement = [finding for finding in findings if finding.name.startswith("temperature")]
    assert len(agreement) == 4
    assert max(finding.value for finding in agreement) < 1e-4


def test_the_command_says_so(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert selfcheck(config) == 0
    assert "the two sides agree" in capsys.readouterr().out


def test_a_temperature_missing_on_one_side_is_found(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = module.score_row

    def at_temperature_1(policy: Any, row: Any, chunk_bytes: int) -> torch.Tensor:
        object.__setattr__(row, "inv_temperature", torch.ones_like(row.inv_temperature))
        return score(policy, row, chunk_bytes)

    monkeypatch.setattr(module, "score_row", at_temperature_1)
    found = wrong(SelfCheck(config))
    assert [name for name in found if name.startswith("temperature")] == [
        f"temperature {t}: max |pi - mu|" for t in (0.3, 0.6, 1.3)
    ]


def test_weights_that_do_not_arrive_are_found(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    check = SelfCheck(config)
    first = check._policy.flat.clone()
    push = check._push

    def stale(engine: Any) -> None:
        push(engine)
        engine.policy.flat.copy_(first)

    monkeypatch.setattr(check, "_push", stale)
    assert wrong(check) == ["after A -> B: max |pi - mu|"]


def test_log_probs_shifted_by_one_are_found(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    behaviour = module._behaviour
    monkeypatch.setattr(
        module, "_behaviour", lambda groups: behaviour(groups)[list(range(-1, len(behaviour(groups)) - 1))]
    )
    assert any(name.startswith("temperature") for name in wrong(SelfCheck(config)))
