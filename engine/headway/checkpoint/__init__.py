"""Checkpoints: a run's complete state on disk, whole or not at all.

    store   the folder: write, verify, find, prune          tensors   safetensors files
    saver   when a checkpoint is taken, and the thread that writes it
    resume           what a run goes on from
    attempts, lock   the starts and resumes of a run, and who works on it now

What a checkpoint contains is the learner's business (headway.learner.state). Nothing here imports torch.
"""

from headway.checkpoint.attempts import Attempt, Attempts
from headway.checkpoint.disk import CheckpointDisk
from headway.checkpoint.lock import RunLock
from headway.checkpoint.resume import INITIAL, Resumed, resume_run
from headway.checkpoint.saver import Saver, Snapshot
from headway.checkpoint.store import Checkpoint, CheckpointStore, Marker, Pieces, Search
from headway.checkpoint.tensors import load, pieces

__all__ = [
    "INITIAL",
    "Attempt",
    "Attempts",
    "Checkpoint",
    "CheckpointDisk",
    "CheckpointStore",
    "Marker",
    "Pieces",
    "Resumed",
    "RunLock",
    "Saver",
    "Search",
    "Snapshot",
    "load",
    "pieces",
    "resume_run",
]
