"""Making tickets: the sampling of the recipe, a seed of its own for each."""

from __future__ import annotations

from headway.config import RunConfig
from headway.generate import mix
from headway.learner.prompts import TokenisedPrompt
from headway.types import PolicyVersion, Sampling, Ticket


class TicketMaker:
    """Tickets of one run.

    Args:
        config: the recipe; eos_ids: of the model, which end a trajectory.
        vocab_size: rows of the model's head; ids beyond them are refused at ingest. 0: they are not.
    """

    def __init__(self, config: RunConfig, eos_ids: tuple[int, ...], vocab_size: int = 0) -> None:
        sampling = config.sampling
        self._sampling = Sampling(
            temperature=sampling.temperature,
            max_new_tokens=sampling.max_new_tokens,
            stop_ids=list(eos_ids),
            stop_strings=list(sampling.stop_strings),
            ignore_eos=sampling.ignore_eos,
            top_k=sampling.top_k or None,
            top_p=sampling.top_p if sampling.top_p < 1.0 else None,
            min_p=sampling.min_p or None,
            keep_sets=sampling.kept_sets == "carry",
        )
        self._num_members = config.batch.samples
        self._seed = config.seed
        self._vocab_size = vocab_size
        self._deadline_s = config.stream.rollout_deadline_s

    def make(self, ticket_id: int, prompt: TokenisedPrompt, admitted: PolicyVersion) -> Ticket:
        """The ticket with this id; its seed depends on the run's seed and the id only."""
        return Ticket(
            ticket_id=ticket_id,
            prompt_index=prompt.index,
            prompt_ids=prompt.token_ids,
            num_members=self._num_members,
            sampling=self._sampling,
            seed=mix(self._seed, ticket_id),
            admitted=admitted,
            deadline_s=self._deadline_s,
            vocab_size=self._vocab_size,
        )
