"""Restarts are few, and ever further apart."""

from headway.launch.restarts import Restarts


def test_each_pause_is_longer_until_there_are_no_more() -> None:
    restarts = Restarts(most=7)
    now, pauses = 100.0, []
    while restarts.ended(now):
        assert not restarts.due(now)
        began = now
        while not restarts.due(now):
            now += 0.25
        pauses.append(now - began)
        assert not restarts.due(now)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_none_allowed() -> None:
    assert not Restarts(most=0).ended(0.0)
