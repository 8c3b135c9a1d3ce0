"""Back-ends that enter themselves: who is chosen, what is said, what is refused."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from headway_kernels import registry
from headway_kernels.errors import BackendUnavailable, UnsupportedOption
from headway_kernels.head import head_logp
from headway_kernels.objective import Objective
from headway_kernels.policy_loss import PolicyLoss, policy_loss
from headway_kernels.registry import ORDER, Backend


@pytest.fixture
def providers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The table of providers, to be changed; nothing but the reference is there at first."""
    table = dict.fromkeys(ORDER, "headway_kernels.no_such_module")
    table["reference"] = registry.PROVIDERS["reference"]
    monkeypatch.setattr(registry, "PROVIDERS", table)
    registry.reset()
    yield table
    registry.reset()


def provide(
    monkeypatch: pytest.MonkeyPatch,
    providers: dict[str, str],
    name: str,
    *backends: Backend,
    missing: str = "",
) -> None:
    module = ModuleType(f"fake_{name}")

    def offer() -> tuple[Backend, ...]:
        if missing:
            raise BackendUnavailable(missing)
        return backends

    module.backends = offer  # type: ignore[attr-defined]
    module.__spec__ = sys.__spec__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    providers[name] = module.__name__
    registry.reset()


def loss(backend: str = "auto", **fields: Any) -> PolicyLoss:
    ones = torch.ones(3)
    return policy_loss(ones, ones, ones, ones, objective=Objective(**fields), segments=None, backend=backend)


def no_cap(arguments: Any) -> str | None:
    return "it has no CAP family" if arguments["objective"].name == "cispo" else None


def fake(name: str, seen: list[Any], **options: Any) -> Backend:
    def function(**arguments: Any) -> Any:
        seen.append(arguments)
        return name

    return Backend(name, "policy_loss", no_cap, function, **options)


def test_auto_takes_the_first_that_supports_the_call_and_says_so_once(
    providers: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []
    provide(monkeypatch, providers, "triton", missing="no GPU")
    provide(monkeypatch, providers, "cpu", fake("cpu", seen))
    with caplog.at_level(logging.INFO, "headway.kernels"):
        assert loss(name="grpo") == "cpu"
        assert loss(name="grpo") == "cpu"
        assert isinstance(loss(name="cispo"), PolicyLoss)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith(
        "policy_loss on cpu runs on the cpu back-end (not cuda: not part of this build"
    )
    assert "not triton: no GPU" in lines[0]
    assert "reference back-end" in lines[1]
    assert "not cpu: it has no CAP family" in lines[1]
    assert len(lines) == 2
    # All arguments of the public function, defaults filled in, none but `backend` left out.
    assert set(seen[0]) == {
        "logp", "behaviour", "advantage", "token_weight", "objective", "segments", "reference", "proximal",
        "entropy", "m2_limit", "first_index",
    }  # fmt: skip


def test_a_named_back_end_never_falls_back(
    providers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    provide(monkeypatch, providers, "triton", missing="no GPU")
    provide(monkeypatch, providers, "cpu", fake("cpu", []))
    with pytest.raises(UnsupportedOption, match=r"'cpu' lacks this call: it has no CAP family"):
        loss("cpu", name="cispo")
    with pytest.raises(BackendUnavailable, match="no GPU"):
        loss("triton")
    with pytest.raises(BackendUnavailable, match="not part of this build"):
        loss("cuda")
    with pytest.raises(UnsupportedOption, match="unknown; choose 'auto' or one of cuda, triton"):
        loss("metal")
    with pytest.raises(UnsupportedOption, match="it has no head_logp"):
        head_logp(
            torch.ones(1, 2), torch.ones(3, 2), torch.zeros(1, dtype=torch.int64), inv_temperature=torch.ones(1),
            backend="cpu",
        )  # fmt: skip


def test_what_is_not_automatic_runs_only_by_name(
    providers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    provide(monkeypatch, providers, "triton", fake("triton", [], automatic=False))
    assert isinstance(loss(name="grpo"), PolicyLoss)
    assert loss("triton", name="grpo") == "triton"
    assert registry.available("policy_loss") == {
        "cuda": "not part of this build", "triton": "", "cpu": "not part of this build", "reference": "",
    }  # fmt: skip


def test_the_reference_has_every_op() -> None:
    registry.reset()
    for op in (
        "head_logp", "head_loss_step", "head_masked", "head_masked_loss_step", "policy_loss", "segment_scan",
    ):  # fmt: skip
        assert registry.available(op)["reference"] == ""
