"""Recipes: the schema, how it is read, and the rules that span several keys."""

from headway.config.schema import (
    AlgoConfig,
    BatchConfig,
    EnvConfig,
    GeneratorConfig,
    LearnerConfig,
    ModelConfig,
    PushConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
    StalenessConfig,
    StreamConfig,
)

__all__ = [
    "AlgoConfig",
    "BatchConfig",
    "EnvConfig",
    "GeneratorConfig",
    "LearnerConfig",
    "ModelConfig",
    "PushConfig",
    "RewardConfig",
    "RunConfig",
    "SamplingConfig",
    "StalenessConfig",
    "StreamConfig",
]
