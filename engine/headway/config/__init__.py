"""Recipes: the schema, how it is read, the rules that span several keys, and what follows from it.

load_recipe(path, overrides) -> RunConfig      reading; ConfigError holds every fault
save(config, path)                             writing it back
describe(config) -> list[str]                  the plan in lines for people
derived                                        the values that keys left open take
"""

from headway.config import derived
from headway.config.agreement import AgreementConfig, AgreementLimits
from headway.config.derived import threads
from headway.config.folder import RunFolder, create_run, open_run
from headway.config.loading import load_recipe, load_toml
from headway.config.plan import describe
from headway.config.push import PushConfig
from headway.config.schema import (
    AlgoConfig,
    BatchConfig,
    CheckpointConfig,
    EnvConfig,
    GeneratorConfig,
    JournalConfig,
    LearnerConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
    StalenessConfig,
    StreamConfig,
)
from headway.config.telemetry import TelemetryConfig
from headway.config.write import save, to_toml

__all__ = [
    "AgreementConfig",
    "AgreementLimits",
    "AlgoConfig",
    "BatchConfig",
    "CheckpointConfig",
    "EnvConfig",
    "GeneratorConfig",
    "JournalConfig",
    "LearnerConfig",
    "ModelConfig",
    "PushConfig",
    "RewardConfig",
    "RunConfig",
    "RunFolder",
    "SamplingConfig",
    "StalenessConfig",
    "StreamConfig",
    "TelemetryConfig",
    "create_run",
    "derived",
    "describe",
    "load_recipe",
    "load_toml",
    "open_run",
    "save",
    "threads",
    "to_toml",
]
