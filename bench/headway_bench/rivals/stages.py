"""Wall seconds spent inside named stages of somebody else's object, measured from outside."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any


class StageClock:
    """Wraps methods of an instance and adds up the wall seconds spent in each; a nested one counts twice."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def watch(self, owner: Any, method: str, stage: str) -> None:
        """Replace `owner.method` by a timed call of itself, booked under `stage`."""
        original: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[stage] += time.perf_counter() - began

        setattr(owner, method, timed)

    def as_details(self) -> dict[str, float | str]:
        """Seconds by stage, keys `<stage>_s`."""
        return {f"{stage}_s": seconds for stage, seconds in sorted(self.seconds.items())}
