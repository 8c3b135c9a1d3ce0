"""The learning step."""

from headway.trainer.agreement import Agreement
from headway.trainer.batch import LossRow, TrainBatch, prepare
from headway.trainer.optimizer import FlatOptimizer, FlatState, UpdateResult
from headway.trainer.schedule import learning_rate
from headway.trainer.start_check import Distance, StartCheck
from headway.trainer.trainer import StepStats, Trainer, TrainerState, score_row

__all__ = [
    "Agreement",
    "Distance",
    "FlatOptimizer",
    "FlatState",
    "LossRow",
    "StartCheck",
    "StepStats",
    "TrainBatch",
    "Trainer",
    "TrainerState",
    "UpdateResult",
    "learning_rate",
    "prepare",
    "score_row",
]
