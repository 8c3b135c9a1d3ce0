"""Triton kernels in the interpreter; collected only with TRITON_INTERPRET=1, in a process of its own.

The summary names the kernels that ran.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

collect_ignore_glob: list[str] = []
if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.runtime.interpreter as runtime

    import headway_kernels.proof.interpreter  # noqa: F401  (repairs the interpreter before any kernel is imported)

    @pytest.fixture(autouse=True)
    def _launched(monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]) -> None:
        """Notes which kernels the test launched."""
        call = runtime.GridExecutor.__call__
        names: list[str] = []  # recorded now and filled later: the report is made when the test ends

        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.fn.__name__ not in names:
                names.append(self.fn.__name__)
            return call(self, *args, **kwargs)

        monkeypatch.setattr(runtime.GridExecutor, "__call__", noted)
        record_property("kernels", names)

    def pytest_terminal_summary(terminalreporter: Any) -> None:
        """Says which of the back-end's kernels ran, and which did not."""
        from headway_kernels.triton.catalog import BOUNDS

        ran: dict[str, int] = {}
        for report in terminalreporter.getreports("passed"):
            for name in dict(report.user_properties).get("kernels", ()):
                ran[name] = ran.get(name, 0) + 1
        shown = ", ".join(f"{name} in {ran[name]} tests" for name in sorted(BOUNDS) if name in ran)
        missing = sorted(BOUNDS.keys() - ran.keys())
        terminalreporter.write_line(
            f"Triton kernels interpreted: {len(BOUNDS) - len(missing)} of {len(BOUNDS)}: {shown}"
        )
        if missing:
            terminalreporter.write_line(f"Triton kernels NOT interpreted: {', '.join(missing)}")
else:
    collect_ignore_glob.append("test_*.py")
