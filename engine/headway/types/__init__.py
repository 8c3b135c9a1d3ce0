"""The words of headway as types: what crosses a boundary is one of these, frozen."""

from headway.types.drop import DropReason
from headway.types.manifest import Manifest, TensorSpec
from headway.types.record import LearnerStatus, SettingChange, StepRecord, TimeSplit
from headway.types.ticket import Sampling, Ticket
from headway.types.trajectory import (
    FinishReason,
    KeptSets,
    MemberFailure,
    Trajectory,
    VersionSpan,
    prompt_digest,
)
from headway.types.version import PolicyVersion

__all__ = [
    "DropReason",
    "FinishReason",
    "KeptSets",
    "LearnerStatus",
    "Manifest",
    "MemberFailure",
    "PolicyVersion",
    "Sampling",
    "SettingChange",
    "StepRecord",
    "TensorSpec",
    "Ticket",
    "TimeSplit",
    "Trajectory",
    "VersionSpan",
    "prompt_digest",
]
