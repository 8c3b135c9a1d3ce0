"""Weights in place: how one policy version gets from the learner into running generators."""

from headway.weights.segment import segment_name
from headway.weights.shm import Published, ShmPublisher, ShmReceiver, weights_digest

__all__ = ["Published", "ShmPublisher", "ShmReceiver", "segment_name", "weights_digest"]
