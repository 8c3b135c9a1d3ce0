"""What a simulated run counts, and the forecast that it makes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from headway.planner.fleet import Ended, SimulatedGenerator
from headway.planner.forecast import Forecast
from headway.planner.scenario import Scenario


class Tally:
    """Counts of one run; what `forget` leaves out is its warm-up.

    Attributes:
        train_s, push_s, idle_s, turn_s: of the learner: updates, publishing, waiting for groups, everything else.
        tickets: issued, trained, and dropped by reason, the warm-up's too.
        ended_s: end of the last optimizer step; steps: made.
    """

    def __init__(self) -> None:
        self.train_s = self.push_s = self.idle_s = self.turn_s = 0.0
        self.tickets: Counter[str] = Counter()
        self.ended_s = 0.0
        self.steps = 0
        self._warm_s = self._queue_s = 0.0
        self._lags: Counter[int] = Counter()
        self._num_members = self._num_trained = self._num_masked = 0

    def forget(self, now: float) -> None:
        """The warm-up is over: rates, shares and lags begin here."""
        self._warm_s = now
        self.train_s = self.push_s = self.idle_s = self.turn_s = self._queue_s = 0.0
        self._lags.clear()
        self._num_members = self._num_trained = self._num_masked = 0

    def consumed(self, members: Sequence[Ended], step: int, oldest: int, waited_s: float) -> None:
        """A group's members are trained with weights of `step`; tokens of older weights than `oldest` are masked.

        Args:
            waited_s: from the group's reward until now.
        """
        self.tickets["trained"] += 1
        self._queue_s += waited_s * len(members)
        self._num_members += len(members)
        for member in members:
            for sampled_by, tokens in member.spans:
                if sampled_by >= oldest:
                    self._lags[step - sampled_by] += tokens
                    self._num_trained += tokens
                else:
                    self._num_masked += tokens

    def forecast(self, scenario: Scenario, generators: Sequence[SimulatedGenerator]) -> Forecast:
        """The run as counted; the generators' times are up to its end."""
        counted_s = max(1e-9, self.ended_s - self._warm_s)
        learner = (self.train_s, self.push_s, self.idle_s, self.turn_s)
        learner_s = max(1e-9, sum(learner))
        work = sum(generator.work_s for generator in generators) / len(generators) / counted_s
        push = sum(generator.push_s for generator in generators) / len(generators) / counted_s
        num_counted = max(1, self._lags.total())
        per_hour = scenario.replicas * scenario.generator_price + scenario.ranks * scenario.rank_price
        return Forecast(
            wall_s=self.ended_s,
            steps=self.steps,
            tokens_per_s=self._num_trained / counted_s,
            samples_per_s=self._num_members / counted_s,
            lag_histogram=[self._lags[lag] / num_counted for lag in range(max(self._lags, default=0) + 1)],
            learner=tuple(seconds / learner_s for seconds in learner),
            generator=(work, push, max(0.0, 1.0 - work - push)),
            queue_s=self._queue_s / max(1, self._num_members),
            tickets=dict(self.tickets),
            masked_tokens=self._num_masked,
            price=self.ended_s / 3600 * per_hour,
        )
