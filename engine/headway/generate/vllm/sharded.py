"""Pushes into an engine whose model is split over worker processes, from the generator's process.

The workers hand their parameters' memory over once (headway.generate.vllm.worker); one slice table leads into those
of all ranks. A push is then what it is for one process, copies between two steps, and no message: between two steps
no worker reads a weight, because the output that ended the last step was computed from all of them.

Workers die together: one that ends takes the others along, so that a step that waits for them fails at once.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing.connection
import os
import re
import threading
import uuid
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.errors import WeightError
from headway.generate.vllm.weights import (
    EngineSide,
    ReloadServed,
    VLLMServed,
    prove_copies,
    rules_over,
)
from headway.generate.vllm.worker import Place, Slot, Split, WeightWorker, WorkerModel
from headway.types import Manifest
from headway.weights.digest import byte_view, tensor_over
from headway.weights.segment import SharedSegment
from headway.weights.served import published_dtype
from headway.weights.slices import Rule, Target, build_table
from headway_kernels.slice_table import FIELDS, Run
from headway_kernels.weight_delta import Delta, SliceTable, apply_slices

_log = logging.getLogger(__name__)
EXTENSION = f"{WeightWorker.__module__}.{WeightWorker.__qualname__}"
CALL_DEADLINE_S = 300.0
DEATH_WAIT_S = 2.0


class Workers:
    """The worker processes of an engine.

    Args:
        llm: an LLMEngine whose core runs here, over vLLM's multiprocessing executor; opened by a thread that lives
            as long as the engine shall.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        handles = llm.engine_core.engine_core.model_executor.workers
        self._processes: list[Any] = [handle.proc for handle in handles]
        self._ended = threading.Event()
        self._fault = ""
        threading.Thread(target=self._watch, name="vllm workers", daemon=True).start()
        self.models: list[WorkerModel] = self.call("headway_describe", os.getpid())

    @property
    def pids(self) -> list[int]:
        """Of the ranks, in order."""
        return [process.pid for process in self._processes]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Run a method of WeightWorker in every worker; its results by rank. Waits at most CALL_DEADLINE_S.

        Raises:
            WeightError: one failed, or did not answer.
        """
        try:
            return self._llm.collective_rpc(method, timeout=CALL_DEADLINE_S, args=arguments)
        except (RuntimeError, TimeoutError) as error:
            raise WeightError(f"vLLM's workers, {method}: {self.fault() or error}") from error

    def fault(self) -> str:
        """Which worker has ended, and how; empty while all live. Waits a little, for a death just now."""
        self._ended.wait(DEATH_WAIT_S)
        return self._fault

    def _watch(self) -> None:
        """Waits for: the end of a worker, or of this process."""
        by_sentinel = {process.sentinel: rank for rank, process in enumerate(self._processes)}
        ended = multiprocessing.connection.wait(list(by_sentinel))
        rank = by_sentinel[int(ended[0])]  # pyright: ignore[reportArgumentType]
        process = self._processes[rank]
        self._fault = f"vLLM's worker {rank} (process {process.pid}) has ended"
        if process.exitcode != 0:
            for other in self._processes:
                other.kill()  # it waits for the dead one, deep in a collective
        self._ended.set()


def sharded_rules(rules: Sequence[Rule], manifest: Manifest, slots: Sequence[Slot], ranks: int) -> list[Rule]:
    """Rules of one process, each with the way that the ranks share what it leads to.

    Raises:
        WeightError: a published tensor cannot be cut as its target is.
    """
    by_name = {slot.name: slot for slot in slots}
    groups: dict[tuple[Rule, Rule], list[str]] = {}
    for spec in manifest.tensors:
        for name in (spec.name, *spec.aliases):
            rule = next(rule for rule in rules if re.fullmatch(rule.source, name))
            slot = by_name.get(re.sub(rule.source, rule.target, name, count=1))
            split = Split() if slot is None else slot.split
            if slot is not None and split.dimension is not None:
                shared = _shared(rule, split, slot, name, tuple(spec.shape))
            else:
                shared = rule
            groups.setdefault((rule, shared), []).append(name)
    return [
        replace(shared, source=f"(?=(?:{'|'.join(map(re.escape, names))})$){rule.source}")
        for (rule, shared), names in groups.items()
    ]


def _shared(rule: Rule, split: Split, slot: Slot, name: str, shape: tuple[int, ...]) -> Rule:
    axis = split.dimension
    assert axis is not None
    if split.padded:
        return replace(rule, shard=axis, padded=split.padded)
    local = slot.shape[axis]
    if rule.stack is not None:
        part, parts = rule.stack
        local = split.parts[parts.index(part)] if len(split.parts) == len(parts) else 0
    if not local or axis >= len(shape) or shape[axis] % local:
        raise WeightError(f"{name} {list(shape)} cannot be cut into shares of {slot.name} {list(slot.shape)}")
    return replace(rule, shard=axis, shards=shape[axis] // local)


def sharded_table(models: Sequence[WorkerModel], manifest: Manifest) -> SliceTable:
    """The table into the parameters of every rank, rank by rank, those without an element left out.

    Raises:
        WeightError: see build_table.
    """
    first, ranks = models[0], len(models)
    rules = rules_over(first.fused, {slot.name for slot in first.slots}, manifest)
    targets = [
        Target(slot.name, slot.shape, rank, ranks)
        for rank, model in enumerate(models)
        for slot in model.slots
        if 0 not in slot.shape
    ]
    return build_table(manifest, targets, sharded_rules(rules, manifest, first.slots, ranks))


def apart(table: SliceTable, keys: Sequence[Any]) -> list[tuple[list[int], SliceTable]]:
    """A table as one for each distinct key of its destinations: their indices, and the table into them alone."""
    parts: list[tuple[list[int], SliceTable]] = []
    for key in dict.fromkeys(keys):
        chosen = [index for index, other in enumerate(keys) if other == key]
        rows = table.runs[np.isin(table.runs[:, FIELDS.index("destination")], chosen)].tolist()
        runs = [Run(**dict(zip(FIELDS, row, strict=True))) for row in rows]
        runs = [replace(run, destination=chosen.index(run.destination)) for run in runs]
        sizes = table.destination_elements[chosen].tolist()
        parts.append((chosen, SliceTable.build(table.num_elements, sizes, runs)))
    return parts


class WorkersServed(VLLMServed):
    """Served along one slice table into the memory of several processes, on one device or several."""

    def __init__(
        self, table: SliceTable, tensors: Sequence[Tensor], manifest: Manifest, engine: EngineSide
    ) -> None:
        super().__init__(table, tensors, manifest, engine)
        self._parts = [
            (part, [tensors[index] for index in chosen])
            for chosen, part in apart(table, [tensor.device for tensor in tensors])
        ]

    def _apply(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self.apply_delta(delta)

    def apply_delta(self, delta: Delta) -> None:
        """Write one delta; returns when every device has it, for another process reads it next."""
        for part, tensors in self._parts:
            apply_slices(delta, part, tensors, cast=True)
        for _, tensors in self._parts:
            if tensors[0].is_cuda:
                torch.cuda.synchronize(tensors[0].device)


class WorkersReloadServed(ReloadServed):
    """Served through vLLM's layerwise reload in every worker, from a published state that all of them map."""

    def __init__(self, workers: Workers, manifest: Manifest, folder: Tensor, engine: EngineSide) -> None:
        super().__init__(None, manifest, folder, engine)
        self._workers = workers
        with _segments([max(1, self._state.numel() * self._state.element_size())]) as (segment,):
            state = tensor_over(memoryview(segment.memory)[: len(byte_view(self._state))], self._state.dtype)
            state.copy_(self._state)
            self._state = state
            workers.call("headway_attach", segment.path.name, manifest)

    def _reload(self) -> None:
        self._workers.call("headway_reload", self._manifest)


def serve_workers(
    workers: Workers, manifest: Manifest, folder: Tensor, engine: EngineSide
) -> WorkersServed | WorkersReloadServed:
    """As weights.serve, for a model that is split over worker processes.

    Raises:
        WeightError: the table and vLLM's loader disagree, or shared memory is short.
    """
    models = workers.models
    try:
        table = sharded_table(models, manifest)
    except WeightError as error:
        _log.warning("weights go through vLLM's layerwise reload, which is slower: %s", error)
        return WorkersReloadServed(workers, manifest, folder, engine)
    slots = [[slot for slot in model.slots if slot.num_bytes] for model in models]
    opened = _share(workers, models)
    tensors: list[Tensor] = []
    fresh: list[bool] = []
    for slot, tensor in zip(itertools.chain(*slots), opened, strict=True):
        if 0 not in slot.shape:
            tensors.append(tensor[: slot.shape[0]] if slot.split.padded else tensor)
            fresh.append(slot.fresh)
    served = WorkersServed(table, tensors, manifest, engine)
    prove_copies(served.apply_delta, tensors, fresh, folder.to(published_dtype(manifest)))
    wrong = [fault for fault in workers.call("headway_prove") if fault]
    if wrong:
        raise WeightError(wrong[0])
    _log.info(
        "weights are written in place: %d tensors into %d of %d workers of vLLM's, proved against its loader",
        len(manifest.tensors), len(tensors), len(models),
    )  # fmt: skip
    return served


def _share(workers: Workers, models: Sequence[WorkerModel]) -> list[Tensor]:
    """Every rank's parameters, rank by rank, in this process."""
    if torch.cuda.is_available():
        shared: list[list[Place]] = workers.call("headway_share", [])
        return [place.open(None) for places in shared for place in places]
    with _segments([max(1, model.num_bytes) for model in models]) as segments:
        shared = workers.call("headway_share", [segment.path.name for segment in segments])
        return [
            place.open(segment) for segment, places in zip(segments, shared, strict=True) for place in places
        ]


@contextlib.contextmanager
def _segments(sizes: Sequence[int]) -> Generator[list[SharedSegment]]:
    """Segments for the workers to map, whose names go before anything else can happen: nothing is left behind."""
    stem, made = f"headway-vllm-{os.getpid()}-{uuid.uuid4().hex[:8]}", list[SharedSegment]()
    try:
        for rank, size in enumerate(sizes):
            made.append(SharedSegment(f"{stem}-{rank}", size))
        yield made
    finally:
        for segment in made:
            segment.path.unlink(missing_ok=True)
