"""Packing: groups of trajectories -> rows for the forward pass, common prefixes once. No torch."""

from headway.packing.pack import num_forwarded, pack, too_long
from headway.packing.row import PackGroup, Packing, Row, TokenSequence

__all__ = ["PackGroup", "Packing", "Row", "TokenSequence", "num_forwarded", "pack", "too_long"]
