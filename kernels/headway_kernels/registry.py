"""Which back-end runs an op: a table that back-ends enter themselves, read at the first use of an op.

For who adds a back-end. A back-end called NAME is the module that PROVIDERS names, with one function

    def backends() -> Sequence[Backend]

which is called once, at the first use of any op, and returns one Backend for each op that it has. It raises
BackendUnavailable with the reason (no GPU, no library) where it cannot run on this machine; importing the module
must be cheap and must not fail. A module that is not installed counts as unavailable. A Backend is

    Backend(
        name="triton",
        op="head_loss_step",
        supports=...,   # Mapping of the call's arguments -> a reason why not, or None
        function=...,   # called with exactly these arguments by keyword; returns what the public function returns
        automatic=True, # False: only if asked for by name (interpreters, emulations)
    )

The public function (headway_kernels.head.head_loss_step, ...) has checked the arguments when `supports` is called:
shapes, dtypes, ranges and needed inputs are right, so `supports` answers only for what this back-end lacks (device,
dtype, an objective's family, bias, softcap, ...), from the arguments' metadata: it must not read tensor values.
The arguments are those of the public function without `backend`, all of them, with defaults filled in.

"auto" takes the first of ORDER that is available, automatic and supports the call, and logs the choice once per op
and device; asked by name, a back-end that lacks something raises UnsupportedOption with its reason, one that is
missing BackendUnavailable. Nothing falls back.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from headway_kernels.errors import BackendUnavailable, UnsupportedOption

logger = logging.getLogger("headway.kernels")

BackendName = Literal["auto", "triton", "cuda", "cpu", "reference"]
ORDER = ("cuda", "triton", "cpu", "reference")
PROVIDERS: Mapping[str, str] = {
    "cuda": "headway_kernels.cuda_backend",
    "triton": "headway_kernels.triton_backend",
    "cpu": "headway_kernels.cpu_backend",
    "reference": "headway_kernels.reference_backend",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """One back-end's implementation of one op; see the module's docstring."""

    name: str
    op: str
    supports: Callable[[Mapping[str, Any]], str | None]
    function: Callable[..., Any]
    automatic: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class _Provider:
    """What a provider module offered: its ops, or why it is not available."""

    ops: Mapping[str, Backend]
    missing: str


def choose(op: str, backend: str, arguments: Mapping[str, Any]) -> Backend:
    """The back-end that runs this call.

    Args:
        op: the op's name. backend: "auto" or one of ORDER.
        arguments: the call's arguments, checked.

    Raises:
        UnsupportedOption: an unknown name, or the named back-end lacks the op or an option of the call.
        BackendUnavailable: the named back-end cannot run here.
    """
    if backend == "auto":
        return _automatic(op, arguments)
    if backend not in ORDER:
        raise UnsupportedOption(
            f"{op}: backend {backend!r} is unknown; choose 'auto' or one of {', '.join(ORDER)}"
        )
    entry, reason = _entry(op, backend)
    if entry is None:
        kind = BackendUnavailable if _provider(backend).missing else UnsupportedOption
        raise kind(f"{op}: backend {backend!r} is not available: {reason}; use 'auto' or 'reference'")
    reason = entry.supports(arguments)
    if reason is not None:
        raise UnsupportedOption(
            f"{op}: backend {backend!r} lacks this call: {reason}; use 'auto' or 'reference'"
        )
    return entry


def run(op: str, backend: str, arguments: Mapping[str, Any]) -> Any:
    """Chooses a back-end and calls it; raises as choose() does."""
    return choose(op, backend, arguments).function(**arguments)


def available(op: str) -> dict[str, str]:
    """By back-end, why it cannot run `op` here at all; "" where it can."""
    return {name: _entry(op, name)[1] for name in ORDER}


def _automatic(op: str, arguments: Mapping[str, Any]) -> Backend:
    passed: list[str] = []
    for name in ORDER:
        entry, reason = _entry(op, name)
        if entry is not None:
            reason = entry.supports(arguments) if entry.automatic else "only if asked for by name"
            if reason is None:
                device = next((str(v.device.type) for v in arguments.values() if hasattr(v, "device")), "")
                _report(op, name, device, passed)
                return entry
        passed.append(f"not {name}: {reason}")
    raise BackendUnavailable(f"{op}: no back-end takes this call: {'; '.join(passed)}")


_reported: set[tuple[str, str, str]] = set()


def _report(op: str, name: str, device: str, passed: Sequence[str]) -> None:
    """Logs a choice, once per op, device and back-end; the reasons are those of the first call."""
    key = (op, name, device)
    if key not in _reported:
        _reported.add(key)
        reasons = f" ({'; '.join(passed)})" if passed else ""
        logger.info("%s on %s runs on the %s back-end%s", op, device, name, reasons)


def _entry(op: str, name: str) -> tuple[Backend | None, str]:
    provider = _provider(name)
    if provider.missing:
        return None, provider.missing
    entry = provider.ops.get(op)
    return entry, "" if entry else f"it has no {op}"


@functools.cache
def _provider(name: str) -> _Provider:
    module = PROVIDERS[name]
    if importlib.util.find_spec(module) is None:
        return _Provider({}, "not part of this build")
    try:
        offered: Sequence[Backend] = importlib.import_module(module).backends()
    except BackendUnavailable as error:
        return _Provider({}, str(error))
    assert all(entry.name == name for entry in offered), f"{module} offers a back-end of another name"
    ops = {entry.op: entry for entry in offered}
    assert len(ops) == len(offered), f"{module} offers an op twice"
    return _Provider(ops, "")


def reset() -> None:
    """Forget what was found and said (tests: a back-end appears, the log starts anew)."""
    _provider.cache_clear()
    _reported.clear()
