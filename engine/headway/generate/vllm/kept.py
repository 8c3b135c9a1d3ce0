"""The ids that vLLM's sampler left to each sequence of a step: the kept sets that `sampling.kept_sets = "carry"` needs.

vLLM has two model runners. The second returns the sets with its outputs (engine argument `return_sampling_mask`).
The first, which every CPU build has, does not, but its sampler runs in this process and takes log-probs of what it
samples from: a row's kept set are the ids whose log-prob is not -inf, so it is read there. Which of the two runs is
vLLM's choice, known once its configuration is made.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headway.errors import UnsupportedOption
from headway.generate.vllm.library import live_runner


def returns_masks(engine_arguments: Any) -> bool:
    """Whether an engine of these arguments returns sampling masks, if it is asked to."""
    if not hasattr(engine_arguments, "return_sampling_mask"):
        return False
    return bool(getattr(engine_arguments.create_engine_config(), "use_v2_model_runner", False))


class SamplerTap:
    """Reads what the first runner's sampler samples from.

    Args:
        llm: an in-process LLMEngine with logprobs_mode "processed_logprobs".

    Raises:
        UnsupportedOption: its sampler is not known here.
    """

    def __init__(self, llm: Any) -> None:
        runner = live_runner(llm)
        sampler: Any = getattr(runner, "sampler", None)
        if not hasattr(sampler, "topk_topp_sampler") or not hasattr(runner, "input_batch"):
            raise UnsupportedOption(
                "sampling.kept_sets = 'carry': this vLLM neither returns sampling masks nor samples in a way that is "
                f"known here ({type(runner).__name__}); allowed: 'refuse' without top_k, top_p and min_p, or 'ignore'"
            )
        self._rows: dict[str, int] = {}
        self._logprobs: Tensor | None = None
        sample = sampler.sample

        def tapped(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
            sampled, logprobs = sample(*arguments, **options)
            names = runner.input_batch.req_ids
            # vLLM may append a suffix of its own to a request's name
            self._rows = {name.partition("-")[0]: row for row, name in enumerate(names)}
            whole = logprobs is not None and len(logprobs) == len(self._rows) == len(names)
            self._logprobs = logprobs if whole else None
            return sampled, logprobs

        sampler.sample = tapped

    def kept(self, name: str) -> NDArray[np.int32]:
        """Ascending ids that the last step's token of a request was sampled from.

        Args:
            name: as given to add_request, without a dash.

        Raises:
            UnsupportedOption: the sampler has no row of it.
        """
        if self._logprobs is None or name not in self._rows:
            raise UnsupportedOption(
                f"sampling.kept_sets = 'carry': vLLM's sampler has no row of its own for request {name}"
            )
        row = self._logprobs[self._rows[name]]
        return (row > float("-inf")).nonzero().flatten().cpu().numpy().astype(np.int32)
