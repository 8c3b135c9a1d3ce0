"""Staleness: how many tickets go out, which groups a step may train, and where everything went."""

from headway.staleness.ess import EssController
from headway.staleness.free import CapacityPolicy, DropPolicy, WaitPolicy
from headway.staleness.gate import Gate, GateState, Selection
from headway.staleness.ledger import UNASSIGNED, Ledger, LedgerCounts, LedgerState
from headway.staleness.policies import POLICIES, make_policy
from headway.staleness.policy import StalenessPolicy
from headway.staleness.unit import Cut, Finished, StalenessUnit
from headway.staleness.window import WindowPolicy

__all__ = [
    "POLICIES",
    "UNASSIGNED",
    "CapacityPolicy",
    "Cut",
    "DropPolicy",
    "EssController",
    "Finished",
    "Gate",
    "GateState",
    "Ledger",
    "LedgerCounts",
    "LedgerState",
    "Selection",
    "StalenessPolicy",
    "StalenessUnit",
    "WaitPolicy",
    "WindowPolicy",
    "make_policy",
]
