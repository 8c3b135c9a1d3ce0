"""The learner: intake, desk, main loop, and the process around them."""

from headway.learner.desk import Desk
from headway.learner.publisher import Publisher
from headway.learner.records import Recorder
from headway.learner.setup import LearnerParts, build_learner

__all__ = ["Desk", "LearnerParts", "Publisher", "Recorder", "build_learner"]
