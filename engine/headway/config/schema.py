"""The recipe: one frozen tree. Every default of headway lives here, or in the module of its section.

Unknown keys are refused (headway.config.loading adds "did you mean"); rules that span several keys are in
headway.config.checks. A field's description is its documentation: docs/configuration.md is generated from it.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from headway.config.agreement import AgreementConfig
from headway.config.lora import LoraConfig
from headway.config.push import PushConfig
from headway.config.section import Section
from headway.config.telemetry import TelemetryConfig


class ModelConfig(Section):
    """The policy."""

    path: str = Field(
        description="folder in transformers format, or builtin:NAME for a tiny model made on the spot"
    )
    reference: str = Field(
        default="", description="frozen reference model for the KL term; empty: the starting policy"
    )
    head_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="of the product with the vocabulary head, on both sides: learner and generators",
    )
    lora: LoraConfig = LoraConfig()


class EnvConfig(Section):
    """Where prompts and rewards come from."""

    name: str = Field(description="sort | gym:DATASET | table | FILE.py | FILE.py:CLASS")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the environment")
    passes: int = Field(
        default=0,
        ge=0,
        description="times to go over a bounded prompt set; 0: wrap for as long as the run lasts",
    )
    shuffle: bool = Field(
        default=False, description="visit a bounded prompt set in a seeded random order, anew each pass"
    )


class BatchConfig(Section):
    """What one optimizer step trains on."""

    prompts: int = Field(default=8, ge=1, description="P: groups per optimizer step")
    samples: int = Field(default=8, ge=1, description="G: trajectories per group")
    tokens_per_row: int = Field(default=4096, ge=2, description="most tokens forwarded at once")
    share_prefix: Literal["auto", "tree", "prompt", "none"] = Field(
        default="auto",
        description="forward common prefixes of a group once; auto: the whole tree where it pays",
    )


class SamplingConfig(Section):
    """How trajectories are sampled."""

    temperature: float = Field(
        default=1.0, ge=0.0, le=100.0, description="of the softmax; travels with every trajectory"
    )
    max_new_tokens: int = Field(default=64, ge=0, description="budget of one trajectory")
    stop_strings: tuple[str, ...] = Field(
        default=(), description="texts that end a trajectory, besides the EOS ids"
    )
    ignore_eos: bool = Field(default=False, description="always run to max_new_tokens")
    top_k: int = Field(default=0, ge=0, description="0: off; see kept_sets")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="1: off; see kept_sets")
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0, description="0: off; see kept_sets")
    kept_sets: Literal["refuse", "carry", "ignore"] = Field(
        default="refuse",
        description="with top_k, top_p or min_p: refuse; carry: each token brings the ids that it was sampled from, "
        "and is trained over these; ignore: trained over the whole vocabulary, every ratio off by the kept mass",
    )


class AlgoConfig(Section):
    """The objective. Empty choices take the objective's own default (docs/objectives.md)."""

    objective: Literal[
        "cispo", "grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "ppo", "decoupled_ppo", "gspo", "sapo",
        "dppo_tv", "m2po", "vtrace",
    ] = Field(default="cispo", description="the loss")  # fmt: skip
    advantage: Literal["", "batch", "group", "mean", "loo"] = Field(
        default="", description="how rewards become advantages"
    )
    denominator: Literal["", "tokens", "sequences", "constant"] = Field(
        default="", description="what the loss is divided by"
    )
    clip_low: float | None = Field(default=None, gt=0.0, description="ratio clipped below at 1 - clip_low")
    clip_high: float | None = Field(default=None, gt=0.0, description="ratio clipped above at 1 + clip_high")
    dual_clip: float | None = Field(
        default=None, gt=1.0, description="bound of the ratio for negative advantages"
    )
    cap: float = Field(default=5.0, gt=0.0, description="cap of the importance weight (cispo, vtrace, KL)")
    correction: Literal["", "none", "tis", "icepop", "mis"] = Field(
        default="",
        description="weight of prox/behaviour: capped; rejected on both sides; rejected above. For clipped objectives "
        "and sapo",
    )
    correction_level: Literal["token", "sequence", "geometric"] = Field(
        default="token",
        description="prox/behaviour of a token, of the sequence (product), or its geometric mean",
    )
    correction_cap: float = Field(default=5.0, gt=0.0, description="upper bound of the correction's weight")
    correction_floor: float = Field(default=0.5, ge=0.0, description="lower bound of icepop's weight")
    proximal: Literal["", "learner", "lag"] = Field(
        default="",
        description="prox of a correction: the learner's own policy, or one step after the behaviour policy on the "
        "way to it",
    )
    gate_positive: float = Field(
        default=1.0, gt=0.0, description="sapo: gate's temperature, advantages above 0"
    )
    gate_negative: float = Field(
        default=1.05, gt=0.0, description="sapo: gate's temperature, the other advantages"
    )
    tv_bound: float = Field(
        default=0.15, gt=0.0, le=1.0, description="dppo_tv: largest change of the sampled token's probability"
    )
    m2_bound: float = Field(default=0.04, gt=0.0, description="m2po: bound of the mean squared log-ratio")
    trace_lambda: float = Field(default=1.0, ge=0.0, le=1.0, description="vtrace: lambda of the trace")
    trace_cap: float = Field(default=1.0, gt=0.0, description="vtrace: c-bar, cap of a later token's ratio")
    kl: Literal["none", "k1", "k2", "k3"] = Field(
        default="none", description="estimator of the KL to the reference model"
    )
    kl_coef: float = Field(default=0.0, ge=0.0, description="weight of the KL term")
    entropy_coef: float = Field(default=0.0, ge=0.0, description="weight of the entropy bonus")
    filter_zero_variance: bool = Field(default=True, description="replace groups whose rewards are all equal")
    max_replacements: float = Field(
        default=1.0,
        ge=0.0,
        description="replacements allowed per optimizer step, as a share of P; past it they are trained",
    )


class LearnerConfig(Section):
    """The optimizer and its process."""

    lr: float = Field(default=1e-6, ge=0.0, description="peak learning rate; 0 freezes the policy")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="after the warm-up"
    )
    warmup_steps: int = Field(default=0, ge=0, description="linear warm-up; a shorter run ends inside it")
    min_lr_share: float = Field(
        default=0.0, ge=0.0, le=1.0, description="of lr, at the end of linear and cosine"
    )
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0, description="AdamW")
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0, description="AdamW")
    eps: float = Field(default=1e-8, gt=0.0, description="AdamW")
    weight_decay: float = Field(default=0.0, ge=0.0, description="AdamW; biases and norms are never decayed")
    max_grad_norm: float = Field(
        default=1.0, gt=0.0, description="global norm above which gradients are scaled down"
    )
    max_skipped: int = Field(default=3, ge=1, description="stop after so many non-finite steps in a row")
    head_chunk_mib: int = Field(
        default=64, ge=1, description="memory for logits while the head's gradients are formed"
    )
    threads: int = Field(default=0, ge=0, description="torch threads; 0: a fair share of the cores")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="where the policy is trained")
    gpu: int = Field(
        default=-1,
        ge=-1,
        description="the GPU of the learner's process, counted among those that headway run sees; -1: it sees all",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="of the layers' products; weights, norms, the residual stream and gradients stay float32",
    )
    attention: Literal["auto", "native", "sdpa", "flash", "flex", "varlen"] = Field(
        default="auto",
        description="of packed rows: flash: flash-attn 2; varlen, flex, sdpa: torch's; native: headway's on the CPU; "
        "auto: the first that can run",
    )


class StalenessConfig(Section):
    """How far generators may run ahead."""

    policy: Literal["window", "capacity", "drop", "wait"] = Field(
        default="window", description="what is admitted, taken and dropped; see docs/staleness.md"
    )
    max_lag: int = Field(
        default=2, ge=0, description="bound on every trained token's lag, in optimizer steps; 0: synchronous"
    )
    window: int = Field(
        default=0,
        ge=0,
        description="W: 0 takes 1 + P * min(floor(max_lag / 2), max_lag - 2), at least 1; of policy `window` only",
    )
    slots: int = Field(default=0, ge=0, description="most tickets outstanding; 0 takes what max_lag allows")
    unit: Literal["trajectory", "token"] = Field(
        default="trajectory", description="what is too old: a trajectory by its oldest token, or each token"
    )
    target_ess: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="effective sample size that slots, push interval and clip bound are moved to keep; 0: off",
    )


class GeneratorConfig(Section):
    """The generators."""

    engine: Literal["torch", "vllm"] = Field(
        default="torch",
        description="torch: the embedded engine; vllm: vLLM's, stepped in the generator's process",
    )
    vllm: dict[str, Any] = Field(
        default_factory=dict,
        description="vLLM's own engine arguments; those that headway sets are refused by name",
    )
    replicas: int = Field(default=1, ge=1, le=64, description="generator processes")
    max_running: int = Field(default=256, ge=1, description="sequences decoded at once by one generator")
    kv_tokens: int = Field(
        default=0, ge=0, description="tokens of KV cache; 0: what max_running sequences need, at most 4 GiB"
    )
    prefill_tokens: int = Field(
        default=2048, ge=1, description="prompt tokens added to one decode step at most"
    )
    threads: int = Field(default=0, ge=0, description="torch threads; 0: a fair share of the cores")
    gpus: list[int] = Field(
        default_factory=list,
        description="one GPU per replica (with vLLM tensor_parallel_size of them), counted among those that headway "
        "run sees; several replicas may share one; empty: each sees all",
    )


class RewardConfig(Section):
    """The reward workers of one generator."""

    workers: int = Field(default=1, ge=1, le=64, description="processes that compute rewards")
    deadline_s: float = Field(
        default=10.0, gt=0.0, description="for one completion; past it the worker is replaced"
    )
    max_failure_share: float = Field(
        default=0.5, gt=0.0, le=1.0, description="of recent rewards; past it the run stops"
    )


class StreamConfig(Section):
    """The trajectory plane."""

    transport: Literal["ipc", "tcp"] = Field(
        default="ipc", description="ipc: sockets in a folder of this user; tcp: needed for other machines"
    )
    bind: str = Field(
        default="",
        description="tcp://HOST:PORT for the data, PORT + 1 for heartbeats; empty: loopback ports that are free",
    )
    keys: str = Field(
        default="",
        description="folder made by `headway keys new`; only generators on its list get in (docs/security.md)",
    )
    insecure: bool = Field(
        default=False, description="let other machines in without keys: anybody who reaches the port"
    )
    heartbeat_s: float = Field(
        default=2.0, gt=0.0, description="a generator silent for two of these is given up"
    )
    rollout_deadline_s: float = Field(
        default=600.0, gt=0.0, description="for one group, from grant to last member"
    )
    startup_deadline_s: float = Field(default=300.0, gt=0.0, description="for processes to load and connect")
    max_restarts: int = Field(default=5, ge=0, description="of each generator, before the run stops")


class JournalConfig(Section):
    """What is received, on the learner's disk before it is acknowledged (docs/journal.md)."""

    max_bytes: int = Field(
        default=4 << 30,
        ge=0,
        description="kept for replay and inspect; what the oldest checkpoint needs stays whatever its size",
    )
    full_wait_s: float = Field(
        default=60.0, gt=0.0, description="to wait for space on a full disk; then the run stops"
    )


class CheckpointConfig(Section):
    """The run's state on disk, to go on from after a crash (docs/checkpoints.md)."""

    interval: int = Field(
        default=50, ge=0, description="optimizer steps from one checkpoint to the next; 0: none"
    )
    keep: int = Field(default=2, ge=1, description="complete checkpoints that stay")
    dir: str = Field(
        default="", description="folder of the checkpoints; empty: checkpoints in the run's folder"
    )
    stop_within_s: float = Field(
        default=20.0,
        gt=0.0,
        description="from Ctrl-C or SIGTERM to the end: for the running step and a last checkpoint",
    )


class RunConfig(Section):
    """A recipe."""

    name: str = Field(
        default="run", pattern=r"^[A-Za-z0-9._-]{1,64}$", description="prefix of the run folder's name"
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="of prompts, sampling and initialisation")
    steps: int = Field(default=100, ge=1, description="optimizer steps")
    run_dir: str = Field(default="", description="folder of the run; empty: runs/NAME-DATE-TIME")
    save: bool = Field(default=True, description="write the final policy as a transformers folder")
    model: ModelConfig
    env: EnvConfig
    batch: BatchConfig = BatchConfig()
    sampling: SamplingConfig = SamplingConfig()
    algo: AlgoConfig = AlgoConfig()
    learner: LearnerConfig = LearnerConfig()
    agreement: AgreementConfig = AgreementConfig()
    staleness: StalenessConfig = StalenessConfig()
    push: PushConfig = PushConfig()
    generator: GeneratorConfig = GeneratorConfig()
    reward: RewardConfig = RewardConfig()
    stream: StreamConfig = StreamConfig()
    journal: JournalConfig = JournalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
