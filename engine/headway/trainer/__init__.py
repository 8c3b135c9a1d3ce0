"""The learning step."""

from headway.trainer.agreement import check_agreement
from headway.trainer.batch import LossRow, TrainBatch, prepare
from headway.trainer.optimizer import FlatOptimizer, FlatState, UpdateResult
from headway.trainer.schedule import learning_rate
from headway.trainer.trainer import StepStats, Trainer, TrainerState, score_row

__all__ = [
    "FlatOptimizer",
    "FlatState",
    "LossRow",
    "StepStats",
    "TrainBatch",
    "Trainer",
    "TrainerState",
    "UpdateResult",
    "check_agreement",
    "learning_rate",
    "prepare",
    "score_row",
]
