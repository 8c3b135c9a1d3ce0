"""The region allocator: ranges never overlap, everything comes back, free space is whole again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headway.generate.slots import RegionAllocator

SIZE = 40


@given(st.lists(st.one_of(st.integers(1, 20), st.tuples(st.integers(0, 50))), max_size=60))
def test_regions_do_not_overlap_and_free_space_is_merged(actions: list[int | tuple[int]]) -> None:
    allocator = RegionAllocator(SIZE)
    taken: list[tuple[int, int]] = []
    used = [False] * SIZE

    def longest() -> int:
        text = "".join("x" if place else "." for place in used)
        return max(map(len, text.split("x")))

    for action in actions:
        if isinstance(action, int):
            start = allocator.take(action)
            assert (start is not None) == (action <= longest())
            if start is not None:
                assert 0 <= start <= SIZE - action
                assert not any(used[start : start + action])
                used[start : start + action] = [True] * action
                taken.append((start, action))
        elif taken:
            start, size = taken.pop(action[0] % len(taken))
            allocator.release(start, size)
            used[start : start + size] = [False] * size
        assert allocator.num_free == used.count(False)
    for start, size in taken:
        allocator.release(start, size)
    assert allocator.num_free == SIZE
    assert allocator.take(SIZE) == 0
