"""A rule that spans several keys of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headway.config.schema import RunConfig


class Rule(NamedTuple):
    """One rule.

    The keys it reads, the first of which the fault is reported at, and what it says when broken.
    """

    keys: tuple[str, ...]
    broken: Callable[[RunConfig], str]
