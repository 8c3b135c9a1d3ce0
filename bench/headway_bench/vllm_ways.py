"""Ways of getting new weights into a vLLM engine of this process: headway's two, and vLLM's own two.

    headway          published to shared memory; staged on a thread, written along the slice table between two steps,
                     read back and proved on that thread
    headway back-end staged as above, in an engine as somebody else makes it; then as `vllm update`
    vllm update      pause (keep), start_weight_update, update_weights, finish_weight_update, resume
    vllm reload      pause (keep), reload_weights, resume

vLLM brings no weight-transfer back-end that runs without a GPU. The one registered here is handed its tensors in this
process and loads them as vLLM's own do, layerwise: it costs what any of them must cost after the transport.
"""

from __future__ import annotations

import importlib
import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from headway.errors import RunFailed
from headway.generate.vllm import open_vllm, transfer
from headway.generate.vllm.engine import Limits, VLLMEngine
from headway.generate.vllm.library import engine_arguments, load_vllm, num_kv_tokens
from headway.generate.vllm.start import BLOCK_TOKENS, Sizes
from headway.types import Manifest, PolicyVersion
from headway.weights import Stager, WeightPublisher, publish_through
from headway.weights.shm import SCHEME, ShmReceiver, ShmSender
from headway.weights.stager_thread import StagerThread

BACK_END = "headway-bench-memory"
DEADLINE_S = 60.0


class Way(Protocol):
    """One way, and the engine that it pushes into."""

    engine: VLLMEngine

    def prepare(self, flat: Tensor, version: PolicyVersion) -> None:
        """What happens at the learner, beside generation."""
        ...

    def push(self) -> bool:
        """What happens at the generator between two steps; whether all of the push is over."""
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


@dataclass
class Nothing:
    """What the back-end below needs to begin."""


@dataclass
class Named:
    """What it is handed: every tensor by its name in the model folder, tied ones by each name."""

    tensors: list[tuple[str, Tensor]]


def no_text(_ids: Iterable[int]) -> str:
    """No request here has a stop string."""
    return ""


def memory_engine() -> type[Any]:
    """vLLM's weight-transfer engine whose transport is a reference; vLLM must be importable."""
    base: Any = importlib.import_module("vllm.distributed.weight_transfer.base")
    reload: Any = importlib.import_module("vllm.model_executor.model_loader.reload")
    parent: Any = base.WeightTransferEngine[Nothing, Named]

    class MemoryTransfer(parent):  # pyright: ignore[reportUntypedBaseClass]
        init_info_cls = Nothing
        update_info_cls = Named

        def init_transfer_engine(self, init_info: Nothing) -> None:
            pass

        def start_weight_update(self) -> None:
            reload.initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # Without the base class's synchronisation of an accelerator, which a CPU build has not.
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Named) -> None:
            self.model.load_weights(update_info.tensors)

        def finish_weight_update(self) -> None:
            reload.finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            pass

    return MemoryTransfer


class HeadwayWay:
    """Publisher, shared memory and stager as in a run: stage and proof on a thread of their own."""

    def __init__(self, folder: Path, sizes: Sizes, kv: str, max_model_len: int) -> None:
        self.engine = open_vllm(
            folder,
            published_dtype="float32",
            sizes=sizes,
            kv=kv,
            options={"max_model_len": max_model_len},
            decode=no_text,
        )
        manifest = self.engine.manifest
        sender = ShmSender(f"headway-bench-{uuid.uuid4().hex[:12]}-{os.getpid()}", manifest)
        self._publisher = WeightPublisher(sender, manifest, anchor=1 << 30, merged=0)
        address = sender.address.removeprefix(SCHEME)
        self._stager = StagerThread(
            lambda: Stager(ShmReceiver(address, manifest, whole_only=False), self.engine.served, manifest),
            DEADLINE_S,
        )
        self._digest = ""

    def prepare(self, flat: Tensor, version: PolicyVersion) -> None:
        """See Way."""
        self._digest = self._publisher.publish(flat, version).digest

    def push(self) -> bool:
        """See Way.

        Raises:
            RunFailed: another state is in force than was published.
        """
        if self._stager.staged() is not None:
            self._stager.commit()
        proofs = [proof.digest for proof in self._stager.proofs()]
        if proofs not in ([], [self._digest]):
            raise RunFailed(f"{proofs} was proved, {self._digest} published")
        return bool(proofs)

    def close(self) -> None:
        """See Way."""
        self._stager.close()
        self._publisher.close()


class OwnEngine:
    """A vLLM engine as vLLM made it, packed layers and all, with the same engine arguments.

    Args:
        back_end: of its weight transfer.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, like: VLLMEngine, kv: str, back_end: str = BACK_END
    ) -> None:
        vllm = load_vllm()
        config: Any = importlib.import_module("vllm.config")
        if back_end == BACK_END:
            factory: Any = importlib.import_module("vllm.distributed.weight_transfer.factory")
            factory.WeightTransferEngineFactory.register_engine(BACK_END, memory_engine())
        theirs: Any = like._llm.vllm_config  # pyright: ignore[reportPrivateUsage]
        arguments: dict[str, Any] = {
            "model": str(folder),
            "dtype": "float32",
            "enforce_eager": theirs.model_config.enforce_eager,
            "max_model_len": theirs.model_config.max_model_len,
            "block_size": BLOCK_TOKENS,
            "enable_prefix_caching": True,
            "skip_tokenizer_init": True,
            "logprobs_mode": "processed_logprobs",
            "max_num_seqs": theirs.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": theirs.scheduler_config.max_num_batched_tokens,
            "async_scheduling": False,
            "distributed_executor_backend": "uni",
            "disable_log_stats": True,
            "enable_chunked_prefill": False,
            "kv_cache_memory_bytes": theirs.cache_config.kv_cache_memory_bytes,
            "weight_transfer_config": config.WeightTransferConfig(backend=back_end),
        }
        self.llm: Any = vllm.LLMEngine.from_engine_args(engine_arguments(vllm, arguments))
        limits = Limits(
            theirs.model_config.max_model_len,
            like._limits.vocab_size,  # pyright: ignore[reportPrivateUsage]
            num_kv_tokens(self.llm),
            theirs.scheduler_config.max_num_seqs,
        )
        self.engine = VLLMEngine(vllm, self.llm, manifest=manifest, limits=limits, kv=kv, decode=no_text)
        self.manifest = manifest
        self.clear_cache = kv == "recompute"


class TransferWay:
    """Headway's back-end of vLLM's weight transfer, in an engine of its own."""

    def __init__(self, own: OwnEngine) -> None:
        self.engine = own.engine
        self._own = own
        run_id = f"bench-{uuid.uuid4().hex[:12]}"
        self._publisher = publish_through("shm", own.manifest, run_id)
        info = transfer.init_info(self._publisher, run_id)
        own.llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": info})

    def prepare(self, flat: Tensor, version: PolicyVersion) -> None:
        """See Way."""
        self._publisher.publish(flat, version)

    def push(self) -> bool:
        """See Way: staged beside decoding, then paused for the write and its proof."""
        llm: Any = self._own.llm
        if transfer.staged(llm) is None:
            return False
        kv = "recompute" if self._own.clear_cache else "keep"
        put = transfer.push_newest_sync(llm, kv=kv, salted=True)
        self.engine._version = put  # pyright: ignore[reportPrivateUsage]
        return True

    def close(self) -> None:
        """See Way."""
        self._own.llm.collective_rpc("shutdown_weight_transfer_engine")
        self._publisher.close()


class OwnWay:
    """vLLM's own.

    Args:
        own: the engine; both ways may share it. reload: with reload_weights instead of the update calls.
    """

    def __init__(self, own: OwnEngine, *, reload: bool) -> None:
        self.engine = own.engine
        self._own, self._reload = own, reload
        self._named: list[tuple[str, Tensor]] = []
        self._version = PolicyVersion(0, 0)

    def prepare(self, flat: Tensor, version: PolicyVersion) -> None:
        """See Way: the tensors lie in this process already, so a transport costs nothing."""
        copy = flat.clone()
        self._named = [
            (name, copy[spec.offset : spec.offset + spec.size].view(spec.shape))
            for spec in self._own.manifest.tensors
            for name in (spec.name, *spec.aliases)
        ]
        self._version = version

    def close(self) -> None:
        """See Way: nothing."""

    @torch.inference_mode()
    def push(self) -> bool:
        """See Way. AsyncLLM's pause_generation sleeps 20 ms more; this calls what it calls."""
        llm: Any = self._own.llm
        core = llm.engine_core.engine_core
        core.pause_scheduler(mode="keep", clear_cache=self._own.clear_cache)
        if self._reload:
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(self._named)})
        else:
            llm.collective_rpc("start_weight_update")
            llm.collective_rpc("update_weights", kwargs={"update_info": {"tensors": self._named}})
            llm.collective_rpc("finish_weight_update")
            core.set_weight_version(str(self._version.step))
        core.resume_scheduler()
        self.engine._version = self._version  # pyright: ignore[reportPrivateUsage]
        return True
