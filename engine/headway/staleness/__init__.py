"""Staleness: how many tickets go out, which groups a step may train, and where everything went."""

from headway.staleness.gate import Finished, Gate, Selection
from headway.staleness.ledger import Ledger, LedgerCounts, LedgerState
from headway.staleness.window import WindowPolicy

__all__ = ["Finished", "Gate", "Ledger", "LedgerCounts", "LedgerState", "Selection", "WindowPolicy"]
