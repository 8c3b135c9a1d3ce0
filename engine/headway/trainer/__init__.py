"""The learning step."""

from headway.trainer.batch import LossRow, TrainBatch, prepare
from headway.trainer.optimizer import FlatOptimizer, UpdateResult
from headway.trainer.schedule import learning_rate
from headway.trainer.trainer import StepStats, Trainer, score_row

__all__ = [
    "FlatOptimizer",
    "LossRow",
    "StepStats",
    "TrainBatch",
    "Trainer",
    "UpdateResult",
    "learning_rate",
    "prepare",
    "score_row",
]
