"""Checkpoints: a run's complete state on disk, whole or not at all.

    store   the folder: write, verify, find, prune          tensors   safetensors files
    saver   when a checkpoint is taken, and the thread that writes it

What a checkpoint contains is the learner's business (headway.learner.state). Nothing here imports torch.
"""

from headway.checkpoint.disk import CheckpointDisk
from headway.checkpoint.saver import Saver, Snapshot
from headway.checkpoint.store import Checkpoint, CheckpointStore, Marker, Pieces, Search
from headway.checkpoint.tensors import load, pieces

__all__ = [
    "Checkpoint",
    "CheckpointDisk",
    "CheckpointStore",
    "Marker",
    "Pieces",
    "Saver",
    "Search",
    "Snapshot",
    "load",
    "pieces",
]
