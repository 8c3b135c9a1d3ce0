"""Short real runs around a plan's optimum, and the best of them: `headway tune`.

study = Study.open(config, Space.of(config, Limits()), Path("tuned"), by="tokens")
study.run(num_trials=12, seconds=30.0, say=print)
study.best().config
"""

from headway.tune.outcome import Outcome, measure
from headway.tune.picture import draw
from headway.tune.space import Limits, Space
from headway.tune.study import Study, Trial

__all__ = ["Limits", "Outcome", "Space", "Study", "Trial", "draw", "measure"]
