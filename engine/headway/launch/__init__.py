"""Running a run: child processes, their supervision, and what a user sees of it."""

from headway.launch.closing import closing_lines
from headway.launch.supervisor import STOP_WITHIN_S, Supervisor, stop_within_s
from headway.launch.views import PlainView

__all__ = ["STOP_WITHIN_S", "PlainView", "Supervisor", "closing_lines", "stop_within_s"]
