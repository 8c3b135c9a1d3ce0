"""Environments: prompts and rewards. Imports neither torch nor transformers."""

from headway.envs.loading import EnvSpec, check_prompt, load_environment
from headway.envs.protocol import Completion, Environment, Message, Prompt
from headway.envs.rewards import RewardPool
from headway.envs.verdict import FailureReason, RewardCounters, RewardResult

__all__ = [
    "Completion",
    "EnvSpec",
    "Environment",
    "FailureReason",
    "Message",
    "Prompt",
    "RewardCounters",
    "RewardPool",
    "RewardResult",
    "check_prompt",
    "load_environment",
]
