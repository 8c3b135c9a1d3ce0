"""Seeds: 63 bits, and different inputs give different streams."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headway.generate import mix


@given(st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=4))
def test_a_seed_fits_a_signed_64_bit_integer_and_repeats(values: list[int]) -> None:
    assert 0 <= mix(*values) < 2**63
    assert mix(*values) == mix(*values)


def test_neighbouring_runs_tickets_and_members_never_meet() -> None:
    seeds = [
        mix(mix(run, ticket), member) for run in range(8) for ticket in range(200) for member in range(16)
    ]
    assert len(set(seeds)) == len(seeds)
    assert mix(1, 2) != mix(2, 1)
    ones = sum(seed >> bit & 1 for seed in seeds for bit in range(63))
    assert abs(ones / (63 * len(seeds)) - 0.5) < 0.005
