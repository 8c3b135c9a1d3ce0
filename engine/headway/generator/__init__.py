"""Generators: the rollout loop and the process around it."""

from headway.generator.outbox import Outbox
from headway.generator.rollout import Rollout, WeightSource
from headway.generator.setup import build_engine, build_rewards

__all__ = ["Outbox", "Rollout", "WeightSource", "build_engine", "build_rewards"]
