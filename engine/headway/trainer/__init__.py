"""The learning step."""

from headway.trainer.agreement import check_agreement
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
    "check_agreement",
    "learning_rate",
    "prepare",
    "score_row",
]
