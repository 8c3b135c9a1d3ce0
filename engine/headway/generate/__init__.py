"""Inference engines: what a generator decodes with."""

from headway.generate.engine import TorchEngine
from headway.generate.protocol import FinishedMember, GroupRequest, InferenceEngine, Unservable
from headway.generate.seeds import mix

__all__ = ["FinishedMember", "GroupRequest", "InferenceEngine", "TorchEngine", "Unservable", "mix"]
