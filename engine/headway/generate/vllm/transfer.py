"""Pushes into a vLLM that somebody else runs, through vLLM's own weight-transfer API under the name "headway".

    vLLM's processes    register()                                 entry point of vllm.general_plugins
    whoever starts it   weight_transfer_config={"backend": "headway"}
    whoever drives it   llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info(...)})
                        version = await push_newest(llm)           an AsyncLLM
                        version = push_newest_sync(llm)            an LLMEngine, between two steps

Staging overlaps generation: the driver pauses when a version is staged, and not before. Tokens go out with the label
of the weights that sampled them. The worker's part is headway.generate.vllm.transfer_engine.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from headway.errors import ConfigError, DeadlineExceeded, UnsupportedOption, WeightError
from headway.generate.vllm.library import call_core, has_batches, is_known
from headway.types import PolicyVersion

if TYPE_CHECKING:
    from headway.weights import WeightPublisher

_log = logging.getLogger(__name__)
NAME = "headway"
NEWEST = "newest"
STATUS = "headway_weights"
"""The method that workers get, for collective_rpc."""
LOOK_S = (0.001, 0.05)
Answer = TypeVar("Answer")


def register() -> None:
    """Make the back-end known to this process's vLLM; again does nothing. vLLM calls it in each of its processes."""
    try:
        version = str(importlib.import_module("vllm").__version__)
        if not is_known(version):
            _log.info("weight transfer %r is not registered: vllm %s is not supported", NAME, version)
            return
        module: Any = importlib.import_module("vllm.distributed.weight_transfer.factory")
        factory = module.WeightTransferEngineFactory
        if NAME not in getattr(factory, "_registry", ()):
            factory.register_engine(NAME, "headway.generate.vllm.transfer_engine", "HeadwayTransferEngine")
    except Exception as error:  # a plugin must not take somebody's vLLM down
        _log.warning("weight transfer %r is not registered: %s", NAME, error)


def parse_version(text: str) -> PolicyVersion | None:
    """ "EPOCH.STEP", or None for "newest".

    Raises:
        UnsupportedOption: neither.
    """
    if text == NEWEST:
        return None
    epoch, _, step = str(text).partition(".")
    if not (epoch.isdecimal() and step.isdecimal()):
        raise UnsupportedOption(f"version = {text!r}: allowed: {NEWEST!r}, or EPOCH.STEP as in '0.12'")
    return PolicyVersion(int(epoch), int(step))


# Where the weights come from ----------------------------------------------------------------------------------


def init_info(publisher: WeightPublisher, run_id: str, **here: Any) -> dict[str, Any]:
    """vLLM's init_info for a publisher of one's own (headway.weights.publish_through).

    Args:
        run_id: as it was opened with.
        here: learner_host, keys, insecure, store, deadline_s, as vLLM's host needs them
            (headway.generate.vllm.transfer_engine.HeadwayInit).
    """
    manifest = publisher.manifest
    named = {"address": publisher.address, "run_id": run_id}
    return {**named, "manifest_digest": manifest.digest, "dtype": manifest.dtype, **here}


def init_info_of_run(run_dir: str | Path, **here: Any) -> dict[str, Any]:
    """vLLM's init_info for a headway run that is going on.

    Args:
        run_dir: its folder. here: as for `init_info`; stream.insecure and push.store are the recipe's if not given.

    Raises:
        ConfigError: no folder of a run, or its learner has not opened its channel yet.
    """
    from headway.config import open_run  # not for every vLLM of the environment

    folder, config = open_run(Path(run_dir))
    try:
        found: dict[str, Any] = json.loads(folder.weights.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            [("", f"{folder.weights}: the run's learner publishes no weights yet ({error})")]
        ) from None
    recipes: dict[str, Any] = {}
    channel = str(found["address"]).partition(":")[0]
    if channel in ("tcp", "collective") and config.stream.insecure:
        recipes["insecure"] = True
    if channel == "store":
        recipes["store"] = config.push.store
    return {**found, "run_id": folder.run_id, **recipes, **here}


# The driver ---------------------------------------------------------------------------------------------------


async def push_newest(
    llm: Any, *, version: str = NEWEST, kv: str = "recompute", salted: bool = False, deadline_s: float = 60.0
) -> PolicyVersion:
    """Put a version in force in an AsyncLLM, weights and label together; requests in flight go on with it.

    Args:
        llm: vllm.AsyncLLM whose init_weight_transfer_engine has been called.
        version: "newest": the newest that is staged, once it is newer than what is in force; or "EPOCH.STEP".
        kv: of requests in flight: "recompute" it under the new weights (the prefix cache is dropped with it), or
            "keep" it.
        salted: the prompts carry a cache_salt that changes with the version, so that "keep" leaves no prefix of
            older weights to new requests.
        deadline_s: for the version to be staged.

    Returns:
        the version in force, which is also the label of every token sampled from now on.

    Raises:
        UnsupportedOption: kv = "keep" with a prefix cache and prompts that are not salted; another value.
        DeadlineExceeded: it was not staged in time; nothing has changed, and nothing was paused.
        WeightError: it could not be put in force. Generation goes on under the old version; or, if the message says
            that the weights are torn, it stays paused.
    """
    _check_kv(llm, kv, salted)
    client, end = _Async(llm), time.monotonic() + deadline_s
    found = await _await_staged(client, parse_version(version), end, deadline_s)
    # A cancelled caller must not leave an engine paused, nor weights under another's label.
    return found or await asyncio.shield(_put(client, version, kv == "recompute", end))


def push_newest_sync(
    llm: Any, *, version: str = NEWEST, kv: str = "recompute", salted: bool = False, deadline_s: float = 60.0
) -> PolicyVersion:
    """As push_newest, for an LLMEngine (the llm_engine of an LLM), between two steps."""
    _check_kv(llm, kv, salted)
    client, end = _Sync(llm), time.monotonic() + deadline_s
    found = _at_once(_await_staged(client, parse_version(version), end, deadline_s))
    return found or _at_once(_put(client, version, kv == "recompute", end))


def staged(llm: Any) -> PolicyVersion | None:
    """The version that a push into an LLMEngine would put in force without waiting; None: none yet."""
    text = llm.collective_rpc(STATUS)[0]["staged"]
    return parse_version(text) if text else None


def _check_kv(llm: Any, kv: str, salted: bool) -> None:
    if kv not in ("recompute", "keep"):
        raise UnsupportedOption(f"kv = {kv!r}: allowed: 'recompute', 'keep'")
    if kv == "keep" and not salted and llm.vllm_config.cache_config.enable_prefix_caching:
        raise UnsupportedOption(
            "kv = 'keep': this vLLM has a prefix cache, and new requests would read prefixes of older weights in it; "
            "give each prompt a cache_salt that changes with the version and say salted=True, or take 'recompute'"
        )


class _Client(Protocol):
    """An engine, as the driver sees it."""

    async def call(self, method: str, **arguments: Any) -> Any: ...

    async def is_paused(self) -> bool: ...

    async def pause(self, clear_cache: bool) -> None: ...

    async def resume(self) -> None: ...

    async def label(self, version: str) -> None: ...

    async def sleep(self, seconds: float) -> None: ...


class _Async:
    """An AsyncLLM."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    async def call(self, method: str, **arguments: Any) -> Any:
        return (await self._llm.collective_rpc(method, kwargs=arguments))[0]

    async def is_paused(self) -> bool:
        return bool(await self._llm.is_paused())

    async def pause(self, clear_cache: bool) -> None:
        await self._llm.pause_generation(mode="keep", clear_cache=clear_cache)

    async def resume(self) -> None:
        await self._llm.resume_generation()

    async def label(self, version: str) -> None:
        await self._llm.update_weight_version(version)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _Sync:
    """An LLMEngine; nothing here suspends."""

    def __init__(self, llm: Any) -> None:
        if has_batches(llm):
            raise UnsupportedOption(
                "async_scheduling = True: an LLMEngine in this process has a batch in flight between two steps, whose "
                "tokens would get the label of newer weights; allowed: False"
            )
        self._llm = llm

    async def call(self, method: str, **arguments: Any) -> Any:
        return self._llm.collective_rpc(method, kwargs=arguments)[0]

    async def is_paused(self) -> bool:
        return bool(call_core(self._llm, "is_scheduler_paused"))

    async def pause(self, clear_cache: bool) -> None:
        call_core(self._llm, "pause_scheduler", "keep", clear_cache)

    async def resume(self) -> None:
        call_core(self._llm, "resume_scheduler")

    async def label(self, version: str) -> None:
        self._llm.set_weight_version(version)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def _at_once(coroutine: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a driver over _Sync suspended")


async def _put(client: _Client, version: str, clear_cache: bool, end: float) -> PolicyVersion:
    """Pause, update, resume; whatever happens, the label is that of the weights when generation goes on."""
    was_paused = await client.is_paused()
    try:
        await client.pause(clear_cache)
        await client.call("start_weight_update")
        left = max(end - time.monotonic(), LOOK_S[1])
        await client.call("update_weights", update_info={"version": version, "deadline_s": left})
        await client.call("finish_weight_update")
    finally:
        status = await client.call(STATUS)
        if not status["torn"]:
            if status["version"]:
                await client.label(status["version"])
            if not was_paused:
                await client.resume()
    return _in_force(status)


async def _await_staged(
    client: _Client, wanted: PolicyVersion | None, end: float, deadline_s: float
) -> PolicyVersion | None:
    """Wait until there is something to put in force, None; or the version wanted, which is in force already."""
    pause = LOOK_S[0]
    while True:
        status = await client.call(STATUS)
        if status["error"]:
            raise WeightError(status["error"])
        if wanted is not None and status["version"] == str(wanted) and not status["torn"]:
            return wanted
        staged = parse_version(status["staged"]) if status["staged"] else None
        if staged is not None and (wanted is None or staged >= wanted):
            return None
        if time.monotonic() > end:
            raise DeadlineExceeded(
                f"version {wanted or NEWEST} was not staged within {deadline_s:g} s: {status['waits']}"
            )
        await client.sleep(pause)
        pause = min(2 * pause, LOOK_S[1])


def _in_force(status: dict[str, Any]) -> PolicyVersion:
    version = parse_version(status["version"])
    assert version is not None
    return version
