"""Seeds: one stream of random numbers per member, derived and never shared."""

from __future__ import annotations

_MASK = 2**64 - 1


def mix(*values: int) -> int:
    """A 63-bit seed from any integers: splitmix64's finaliser, chained (Steele, Lea, Flood 2014)."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state + (value & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1
