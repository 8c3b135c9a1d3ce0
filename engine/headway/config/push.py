"""The section [push]: how new weights get into the generators."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from headway.config.section import Section


class PushConfig(Section):
    """How new weights reach the generators."""

    channel: Literal["auto", "shm", "tcp", "store", "collective"] = Field(
        default="auto",
        description="shm: shared memory of one host; tcp: any network; store: a directory or object store; "
        "collective: torch.distributed; auto: shm where every process is on this host, else tcp (docs/channels.md)",
    )
    bind: str = Field(
        default="",
        description="tcp://HOST:PORT of the tcp channel, PORT + 1 for its data; empty: stream.bind's host, free ports",
    )
    chunk_kib: int = Field(
        default=1024, ge=16, le=65536, description="of weights, per message (tcp); each has a digest"
    )
    chunks_in_flight: int = Field(
        default=16,
        ge=1,
        le=256,
        description="asked for and not yet there, per receiver (tcp with stream.keys)",
    )
    fan_out: int = Field(
        default=2,
        ge=1,
        le=64,
        description="generators served by the learner, and by each generator that relays (tcp); 1: a chain",
    )
    store: str = Field(
        default="", description="directory or fsspec URL of the store channel; runs get a folder each in it"
    )
    store_keep: int = Field(default=2, ge=2, description="whole states that stay in the store, and all since")
    backend: Literal["gloo", "nccl"] = Field(
        default="gloo", description="of the collective channel; nccl: through the current CUDA device"
    )
    mode: Literal["in_flight", "drain", "resume"] = Field(
        default="in_flight",
        description="sequences in flight at a push: go on with the new weights; end first, nothing new starting "
        "meanwhile; are aborted and go on from their prefix",
    )
    apply: Literal["auto", "copy", "swap", "double"] = Field(
        default="auto",
        description="copy: into the engine's weights, in the pause; swap: serve from the shared memory itself (shm and "
        "float32 only); double: into a second copy of them, which then takes their place; auto: swap where possible, "
        "else copy",
    )
    anchor: int = Field(
        default=8, ge=1, description="pushes from one whole state to the next; deltas between (tcp, store)"
    )
    compression: Literal["none", "zstd"] = Field(default="none", description="of deltas on the wire (tcp)")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of the published weights; both sides compute with it"
    )
    interval: int = Field(default=1, ge=1, description="K: optimizer steps per push")
    kv: Annotated[str, BeforeValidator(str)] = Field(
        default="keep",
        pattern=r"^(keep|recompute|\d{1,6})$",
        description="keep or recompute the KV cache of running sequences after a push; a number k: recompute what was "
        "written more than k optimizer steps before",
    )
