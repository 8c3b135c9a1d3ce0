"""The section [agreement]: how far apart the two sides may score the same token at equal weights."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from headway.config.section import Section


class AgreementConfig(Section):
    """Bounds of the start-up check; empty ones follow the dtype in which the two sides compute."""

    mean_log_ratio: float | None = Field(
        default=None, gt=0.0, description="mean |pi - mu| of tokens at lag 0; empty: 1e-3, with bfloat16 0.03"
    )
    max_log_ratio: float | None = Field(
        default=None,
        gt=0.0,
        description="largest |pi - mu| of a token at lag 0; empty: 0.05, with bfloat16 1.0",
    )
    min_ess: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        description="effective sample size of the ratios at lag 0; empty: 0.99, with bfloat16 0.95",
    )


@dataclass(frozen=True)
class AgreementLimits:
    """The bounds in force.

    Attributes:
        mean_log_ratio, max_log_ratio: of |pi - mu|, in nats; min_ess: share of 1.
    """

    mean_log_ratio: float
    max_log_ratio: float
    min_ess: float


DEFAULT_LIMITS = {
    # The same op in fp32 on both sides: 1e-5 is usual, also between vLLM and the learner.
    "float32": AgreementLimits(1e-3, 0.05, 0.99),
    # Rounding to 8 bits in every layer, in another order on each side; docs/measured.md has what was seen.
    "bfloat16": AgreementLimits(0.03, 1.0, 0.95),
}
