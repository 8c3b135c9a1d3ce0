"""Who fetches from whom: a tree of receivers under the learner, so that its cost does not grow with their number.

Pure: no clock, no socket. The tcp channel's learner side feeds it joins, leaves and complaints, and sends every
receiver the parent that it names. Each node has at most `fan_out` children, so the learner sends each byte at
most `fan_out` times, whatever the number of receivers, and depth grows with its logarithm (fan_out 1: a chain).

A guest is the exception that keeps a push going: a receiver whose parent is well but lacks what it wants asks
the learner itself until that payload has arrived, beyond the learner's fan-out if need be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from headway.errors import UnsupportedOption

LEARNER = ""


@dataclass
class _Node:
    parent: str
    can_relay: bool
    shunned: bool = False
    guest: bool = False
    children: list[str] = field(default_factory=list[str])


class RelayTree:
    """Parents of receivers; LEARNER ("") is the root.

    Args:
        fan_out: most children of the learner and of each receiver.

    Attributes:
        num_rescues: times a receiver was sent to the learner beyond its fan-out.

    Raises:
        UnsupportedOption: fan_out below 1.
    """

    def __init__(self, fan_out: int) -> None:
        if fan_out < 1:
            raise UnsupportedOption(f"a relay fan-out of {fan_out}; expected at least 1")
        self.fan_out = fan_out
        self.num_rescues = 0
        self._nodes: dict[str, _Node] = {LEARNER: _Node(LEARNER, can_relay=True)}

    def __contains__(self, name: str) -> bool:
        return name != LEARNER and name in self._nodes

    def __len__(self) -> int:
        return len(self._nodes) - 1

    def parent(self, name: str) -> str:
        """Whom `name` asks: another receiver, or LEARNER.

        Raises:
            KeyError: it has not joined.
        """
        return self._nodes[name].parent

    def children(self, name: str) -> list[str]:
        """Who asks `name`."""
        return list(self._nodes[name].children)

    def join(self, name: str, *, can_relay: bool) -> None:
        """Place a receiver; one that has joined already keeps its place and is no longer shunned."""
        if name in self:
            self._nodes[name].can_relay = can_relay
            self._nodes[name].shunned = False
            return
        self._nodes[name] = _Node(LEARNER, can_relay)
        self._attach(name)

    def leave(self, name: str) -> list[str]:
        """Forget a receiver; returns those whose parent has changed."""
        if name not in self:
            return []
        self._detach(name)  # and with it its subtree, so that no child is placed under it again
        moved = self._disown(name)
        del self._nodes[name]
        return moved

    def complain(self, child: str, parent: str, *, silent: bool) -> list[str]:
        """`child` gets nothing from `parent`; returns those whose parent has changed.

        Args:
            parent: who was asked; a complaint about anyone but the present parent is out of date, and ignored.
            silent: it does not answer: all its children leave it, and nobody is sent there until it is `heard`.
                Else only `child` is moved, to the learner, until it is `served`.
        """
        if child not in self or parent == LEARNER or self._nodes[child].parent != parent:
            return []
        if silent:
            self._nodes[parent].shunned = True
            return self._disown(parent)
        self._detach(child)
        self._adopt(LEARNER, child)
        self._make_guest(child)
        return [child]

    def heard(self, name: str) -> None:
        """A shunned receiver has shown that it is well."""
        if name in self:
            self._nodes[name].shunned = False

    def served(self, name: str) -> bool:
        """What `name` wanted has arrived: a guest goes back into the tree; True when its parent has changed."""
        if name not in self or not self._nodes[name].guest:
            return False
        self._nodes[name].guest = False
        self._detach(name)
        self._attach(name)
        return self._nodes[name].parent != LEARNER

    def _disown(self, name: str) -> list[str]:
        """Find new parents for all children of `name`."""
        children = self.children(name)
        for child in children:
            self._detach(child)
        for child in children:
            self._attach(child)
        return children

    def _attach(self, name: str) -> None:
        """Under the shallowest node outside its own subtree that has room; else to the learner, as a guest."""
        own = set(self._subtree(name))
        queue = deque([LEARNER])
        while queue:
            place = queue.popleft()
            node = self._nodes[place]
            # Guests do not use up the learner's room: they are few, and leave it.
            regular = sum(not self._nodes[child].guest for child in node.children)
            if node.can_relay and not node.shunned and regular < self.fan_out:
                self._adopt(place, name)
                return
            queue.extend(child for child in node.children if child not in own)
        self._adopt(LEARNER, name)
        self._make_guest(name)

    def _adopt(self, parent: str, child: str) -> None:
        self._nodes[child].parent = parent
        self._nodes[parent].children.append(child)

    def _detach(self, name: str) -> None:
        self._nodes[self._nodes[name].parent].children.remove(name)

    def _make_guest(self, name: str) -> None:
        self._nodes[name].guest = True
        self.num_rescues += 1

    def _subtree(self, name: str) -> Iterator[str]:
        queue = [name]
        while queue:
            place = queue.pop()
            yield place
            queue.extend(self._nodes[place].children)
