"""vLLM's side of its weight-transfer API, "headway": a worker of a vLLM that somebody else runs receives pushes.

    model loaded                 table, unpacked matrices, proof against vLLM's loader: as for headway's own generator
    init_weight_transfer_engine  a Stager on the learner's channel, on a thread of its own, beside generation
    start_weight_update          nothing
    update_weights               wait until the version is staged, write it, read it back, compare its digest
    finish_weight_update         nothing; the caller gives vLLM the label (headway.generate.vllm.transfer)

Until something is written the old version serves on, whatever goes wrong. When writing or proving fails the weights
are torn: the error says so, and generation must stay paused until an update has gone through.

vLLM imports this module in a worker whose weight_transfer_config names "headway", and nowhere else.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.errors import DeadlineExceeded, HeadwayError, UnsupportedOption, WeightError
from headway.generate.vllm.library import layerwise_reload
from headway.generate.vllm.transfer import NEWEST, STATUS, parse_version
from headway.generate.vllm.weights import serve
from headway.model import load_policy
from headway.types import PolicyVersion
from headway.weights import Stager, StagerThread, receive_from
from headway.weights.served import TORCH_DTYPES

_log = logging.getLogger(__name__)
_base: Any = importlib.import_module("vllm.distributed.weight_transfer.base")
_worker: Any = importlib.import_module("vllm.v1.worker.worker_base")
POLL_S = 0.05
PROOF_S = 60.0


@dataclass
class HeadwayInit:
    """init_info: where the weights come from. headway.generate.vllm.transfer.init_info makes it.

    Attributes:
        address: of the learner's weight channel; run_id: of its run.
        manifest_digest, dtype: of what it publishes.
        learner_host: by which the learner is reached here, for an address that is bound to every interface.
        keys: a client's file of `headway keys new`; insecure: connect to other hosts without. store: where the store
            of a store: address is found here. deadline_s: for the channel to open.
    """

    address: str
    run_id: str
    manifest_digest: str
    dtype: str
    learner_host: str = "127.0.0.1"
    keys: str = ""
    insecure: bool = False
    store: str = ""
    deadline_s: float = 60.0


@dataclass
class HeadwayUpdate:
    """update_info: "newest", or EPOCH.STEP of one version and no other; deadline_s: for it to be staged."""

    version: str = NEWEST
    deadline_s: float = 60.0

    def __post_init__(self) -> None:
        parse_version(self.version)
        if not self.deadline_s > 0:
            raise UnsupportedOption(f"deadline_s = {self.deadline_s!r}: must be above 0")


@dataclass(frozen=True)
class _Live:
    """What headway.generate.vllm.weights.serve needs of a model runner."""

    model: Any
    model_config: Any

    def reload_weights(self, weights_iterator: Iterator[tuple[str, Tensor]]) -> None:
        layerwise_reload(self.model, self.model_config, weights_iterator)


class HeadwayTransferEngine(_base.WeightTransferEngine):  # pyright: ignore[reportUntypedBaseClass]
    """One worker's receiver of pushes; made by vLLM when its model is loaded.

    Raises:
        UnsupportedOption: this vLLM is set up in a way that pushes cannot follow; names the argument.
        ModelError: its model is no folder that headway can load. WeightError: table and loader disagree.
    """

    init_info_cls = HeadwayInit
    update_info_cls = HeadwayUpdate
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        dtype = str(self.model_config.dtype).removeprefix("torch.")
        check_servable(vllm_config, dtype)
        policy = load_policy(Path(self.model_config.model), published_dtype=dtype, with_grad=False)
        self._manifest = policy.manifest
        self._news = threading.Event()
        self._thread: StagerThread | None = None
        self._init: HeadwayInit | None = None
        self._version: PolicyVersion | None = None  # of the last push that was written, from this channel
        self._digest = ""  # as read back; "" until then
        self._torn = False
        self._session = ""  # "started", "updated"
        self._served = serve(_Live(model, self.model_config), policy.manifest, policy.flat, self)

    # EngineSide -----------------------------------------------------------------------------------------------

    def tear(self) -> None:
        """The weights are of no version from now on, until they are proved."""
        self._torn, self._digest = True, ""

    def put(self, version: PolicyVersion) -> None:
        """The weights are this version's."""
        self._version = version

    # vLLM's API -----------------------------------------------------------------------------------------------

    def init_transfer_engine(self, init_info: HeadwayInit) -> None:
        """Attach to a learner's channel; again: to another one's, whose first push is a whole state.

        Raises:
            WeightError: it publishes another model, or in another dtype than this one computes in.
            HeadwayError: the channel cannot be opened, or not in time.
        """
        manifest = self._manifest
        if init_info.dtype != manifest.dtype:
            raise WeightError(
                f"the learner publishes {init_info.dtype}, this vLLM computes in {manifest.dtype}: values cannot be "
                "rounded on arrival; set vLLM's dtype or the learner's push.dtype"
            )
        if init_info.manifest_digest != manifest.digest:
            raise WeightError(
                f"the learner's weights have manifest {init_info.manifest_digest}, the model of this vLLM "
                f"({self.model_config.model}) has {manifest.digest}: both must be the same model, loaded with the "
                "same library versions"
            )
        self.shutdown()
        self._init, self._version, self._digest = init_info, None, ""
        self._thread = StagerThread(lambda: self._open(init_info), init_info.deadline_s)

    def _open(self, info: HeadwayInit) -> Stager:
        receiver = receive_from(
            info.address,
            self._manifest,
            info.run_id,
            learner_host=info.learner_host,
            keys=info.keys,
            insecure=info.insecure,
            store=info.store,
        )
        return Stager(receiver, self._served, self._manifest, wake=self._news.set)

    def start_weight_update(self) -> None:
        """Begin; nothing is touched yet.

        Raises:
            WeightError: no channel is open.
        """
        self._opened()
        self._session = "started"

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Put a version in force, proved. As the base class does, where there is an accelerator to wait for."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: HeadwayUpdate) -> None:
        """Put a version in force, proved.

        Waits for: the version to be staged. Unblocked by: the stager; a version in force already needs no wait.

        Raises:
            DeadlineExceeded: it was not staged in time; the old version serves on.
            WeightError: out of order, or another version has replaced it: the old one serves on. Or torn.
        """
        if not self._session:
            raise WeightError("update_weights before start_weight_update")
        thread, wanted = self._opened(), parse_version(update_info.version)
        self._session = ""  # vLLM ends the session when this raises
        if wanted is None or wanted != self._version or self._torn:
            self._commit(thread, wanted, update_info.deadline_s)
            self._prove(thread)
        self._session = "updated"

    def finish_weight_update(self) -> None:
        """End.

        Raises:
            WeightError: nothing was updated.
        """
        if self._session != "updated":
            raise WeightError("finish_weight_update before update_weights: no version was put in force")
        self._session = ""

    def shutdown(self) -> None:
        """Let the channel go; what is in force stays."""
        thread, self._thread = self._thread, None
        self._session = ""
        if thread is not None:
            thread.close()

    def status(self) -> dict[str, str | bool]:
        """For the driver: versions of this channel in force and staged ("" for none), and what is wrong."""
        try:
            staged = self._opened().staged()
            why = ""
        except HeadwayError as error:
            staged, why = None, str(error)
        return {
            "version": str(self._version or ""),
            "digest": self._digest,
            "staged": str(staged or ""),
            "torn": self._torn,
            "error": why,
            "waits": self._waits(),
        }

    # ----------------------------------------------------------------------------------------------------------

    def _opened(self) -> StagerThread:
        if self._thread is None:
            raise WeightError("no weight channel is open: call init_weight_transfer_engine first")
        self._thread.check()
        return self._thread

    def _commit(self, thread: StagerThread, wanted: PolicyVersion | None, deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        while True:
            self._news.clear()
            staged = thread.staged()
            if wanted is not None and max(staged or wanted, self._version or wanted) > wanted:
                raise WeightError(f"version {wanted} was asked for and has been replaced: {self._waits()}")
            if staged is not None and wanted in (None, staged) and self._put_staged(thread, wanted):
                return
            left = end - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(
                    f"version {wanted or NEWEST} was not staged within {deadline_s:g} s: {self._waits()}"
                )
            self._news.wait(min(left, POLL_S))

    def _put_staged(self, thread: StagerThread, wanted: PolicyVersion | None) -> bool:
        try:
            return thread.commit(wanted) is not None
        except Exception as error:
            raise self._torn_by(error) from error

    def _prove(self, thread: StagerThread) -> None:
        """Waits for: the stager's thread to read back what was written."""
        end = time.monotonic() + PROOF_S
        while True:
            self._news.clear()
            try:
                thread.check()
            except HeadwayError as error:
                raise self._torn_by(error) from error
            for proof in thread.proofs():
                self._torn, self._digest = False, proof.digest
                _log.info("version %s is in force, digest %s", proof.version, proof.digest)
            if not self._torn:
                return
            if time.monotonic() > end:
                raise self._torn_by(DeadlineExceeded(f"it was not read back within {PROOF_S:g} s"))
            self._news.wait(POLL_S)

    def _torn_by(self, error: Exception) -> WeightError:
        self.shutdown()
        return WeightError(
            f"the weights are torn, of no version: {error}. Keep generation paused; init_weight_transfer_engine again, "
            "and an update brings a whole state"
        )

    def _waits(self) -> str:
        """What is in force, what is staged, and why nothing else is: for errors."""
        if self._thread is None or self._init is None:
            return "no channel is open"
        stager = self._thread.stager
        failure = f"; the last payload was refused: {stager.last_failure}" if stager.num_failures else ""
        return (
            f"{self._version or 'no version'} is in force, {stager.staged() or 'nothing newer'} is staged from "
            f"{self._init.address}{failure}"
        )


def check_servable(vllm_config: Any, dtype: str) -> None:
    """Refuse a set-up that pushes cannot follow.

    Raises:
        UnsupportedOption: names vLLM's argument.
    """
    parallel = vllm_config.parallel_config
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        value = getattr(parallel, name, 1)
        if value != 1:
            raise UnsupportedOption(
                f"{name} = {value}: weight_transfer_config backend 'headway' writes one worker's whole model; "
                "allowed: 1, and an engine of its own per GPU"
            )
    for name, value in (
        ("quantization", vllm_config.model_config.quantization),
        ("enable_lora", vllm_config.lora_config),
        ("speculative_config", vllm_config.speculative_config),
    ):
        if value:
            raise UnsupportedOption(
                f"{name}: given, but weight_transfer_config backend 'headway' pushes plain weights only; take it out"
            )
    if vllm_config.load_config.load_format == "dummy":
        raise UnsupportedOption(
            "load_format = 'dummy': where pushes land is proved by what vLLM has loaded of the model's folder; "
            "allowed: 'auto', 'safetensors'"
        )
    if dtype not in TORCH_DTYPES:
        raise UnsupportedOption(
            f"dtype = {dtype!r}: weight_transfer_config backend 'headway' serves {' and '.join(sorted(TORCH_DTYPES))}"
        )


def _status(worker: Any) -> dict[str, str | bool]:
    return worker.weight_transfer_engine.status()


# vLLM's workers answer what they have a method for, and an update's answer is None.
setattr(_worker.WorkerBase, STATUS, _status)
