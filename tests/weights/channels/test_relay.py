"""The tree of relays: everybody has a way to the learner, nobody serves more than its share."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import UnsupportedOption
from headway.weights.relay import LEARNER, RelayTree


def depth(tree: RelayTree, name: str) -> int:
    steps = 0
    while name != LEARNER:
        name = tree.parent(name)
        steps += 1
        assert steps <= len(tree), "a cycle"
    return steps


@pytest.mark.parametrize("fan_out", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 8, 100])
def test_a_tree_is_as_flat_as_its_fan_out_allows(fan_out: int, count: int) -> None:
    tree = RelayTree(fan_out)
    for number in range(count):
        tree.join(str(number), can_relay=True)
    assert len(tree.children(LEARNER)) == min(count, fan_out)
    assert all(len(tree.children(str(number))) <= fan_out for number in range(count))
    deepest = max(depth(tree, str(number)) for number in range(count))
    if fan_out == 1:
        assert deepest == count
    else:
        assert deepest <= math.log(count * (fan_out - 1) + fan_out, fan_out) + 1e-9
    assert tree.num_rescues == 0


@given(st.integers(0, 10_000), st.integers(1, 3))
def test_joins_leaves_and_complaints_in_any_order_leave_a_tree(seed: int, fan_out: int) -> None:
    dice = random.Random(seed)
    tree = RelayTree(fan_out)
    present: dict[str, bool] = {}
    guests: set[str] = set()
    for _ in range(60):
        name = str(dice.randrange(12))
        what = dice.choice(["join", "join", "leave", "silent", "absent", "served", "heard"])
        if what == "join":
            can_relay = present.get(name, dice.random() < 0.8)
            tree.join(name, can_relay=can_relay)
            present[name] = can_relay
        elif what == "leave":
            for moved in tree.leave(name):
                assert tree.parent(moved) != name
            present.pop(name, None)
            guests.discard(name)
        elif name in tree:
            parent = tree.parent(name)
            if what == "silent" and parent != LEARNER:
                assert name in tree.complain(name, parent, silent=True)
                assert tree.children(parent) == []
                assert tree.parent(name) != parent
            elif what == "absent" and parent != LEARNER:
                assert tree.complain(name, parent, silent=False) == [name]
                assert tree.parent(name) == LEARNER
            elif what == "served":
                tree.served(name)
            elif what == "heard":
                tree.heard(name)
        for each, can_relay in present.items():
            depth(tree, each)
            assert can_relay or not tree.children(each)
            assert len(tree.children(each)) <= fan_out
            assert each in tree.children(tree.parent(each))
    for each in present:
        tree.heard(each)
        tree.served(each)
    assert len(tree) == len(present)


def test_a_complaint_about_a_parent_of_the_past_changes_nothing() -> None:
    tree = RelayTree(1)
    for name in "abc":
        tree.join(name, can_relay=True)
    assert tree.parent("c") == "b"
    assert tree.complain("c", "a", silent=True) == []
    assert tree.complain("c", LEARNER, silent=True) == []
    assert tree.parent("b") == "a"


def test_the_children_of_a_dead_relay_go_where_there_is_room_and_a_guest_comes_back() -> None:
    tree = RelayTree(2)
    for name in "abcdef":
        tree.join(name, can_relay=True)
    assert tree.children("a") == ["c", "d"]
    assert sorted(tree.leave("a")) == ["c", "d"]
    assert len(tree.children(LEARNER)) == 2, "one of them took the dead relay's place at the learner"
    assert tree.num_rescues == 0
    tree.complain("e", "b", silent=False)
    assert tree.parent("e") == LEARNER
    assert tree.num_rescues == 1
    assert tree.served("e")
    assert tree.parent("e") != LEARNER
    assert not tree.served("e")


def test_one_who_was_silent_relays_again_once_it_is_heard() -> None:
    tree = RelayTree(1)
    tree.join("a", can_relay=True)
    tree.join("b", can_relay=True)
    tree.complain("b", "a", silent=True)
    assert tree.parent("b") == LEARNER, "nobody else is left: a guest"
    tree.served("b")
    assert tree.parent("b") == LEARNER, "a is still not to be trusted"
    tree.heard("a")
    assert tree.served("b")
    assert tree.parent("b") == "a"


def test_a_fan_out_below_one_is_refused() -> None:
    with pytest.raises(UnsupportedOption, match="fan-out of 0"):
        RelayTree(0)
