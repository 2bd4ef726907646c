"""Idle connections make room for new ones; those in use stay."""

from __future__ import annotations

import pytest

from streamhouse.core.errors import OverloadedError
from streamhouse.storage_service.server.http.open_connections import OpenConnections


class _Connection:
    def __init__(self, all_of_them: OpenConnections, address: str) -> None:
        self._all = all_of_them
        self.is_open = True
        all_of_them.opened(self, address)

    def drop(self) -> None:
        self.is_open = False
        self._all.closed(self)

    def close(self) -> None:
        self._all.closed(self)


def test_the_one_that_is_idle_for_longest_is_closed_for_a_new_one() -> None:
    connections = OpenConnections(connections_max=3, address_connections_max=100)
    first, second, third = (_Connection(connections, a) for a in "abc")
    connections.in_use(first)
    connections.in_use(second)
    connections.idle(second)
    connections.idle(first)

    _Connection(connections, "d")
    assert (first.is_open, second.is_open, third.is_open) == (True, True, False)
    _Connection(connections, "d")
    assert (first.is_open, second.is_open) == (True, False)
    assert len(connections) == 3
    assert connections.closed_idle_count == 2


def test_connections_in_use_are_kept_and_the_new_one_is_refused() -> None:
    connections = OpenConnections(connections_max=2, address_connections_max=100)
    both = [_Connection(connections, "a") for _ in range(2)]
    for connection in both:
        connections.in_use(connection)

    with pytest.raises(OverloadedError, match=r"2 connections are in use \(connections_max\)"):
        _Connection(connections, "b")
    assert len(connections) == 2
    connections.idle(both[1])
    _Connection(connections, "b")
    assert [connection.is_open for connection in both] == [True, False]


def test_one_address_makes_room_among_its_own() -> None:
    connections = OpenConnections(connections_max=100, address_connections_max=2)
    other = _Connection(connections, "b")
    mine = [_Connection(connections, "a") for _ in range(5)]

    assert [connection.is_open for connection in mine] == [False] * 3 + [True] * 2
    assert other.is_open
    for connection in mine[3:]:
        connections.in_use(connection)
    with pytest.raises(OverloadedError, match=r"from a are in use \(address_connections_max\)"):
        _Connection(connections, "a")
    _Connection(connections, "b")


def test_what_is_closed_leaves_nothing_behind() -> None:
    connections = OpenConnections(connections_max=1, address_connections_max=1)
    for number in range(100):
        connection = _Connection(connections, str(number % 3))
        connections.in_use(connection)
        connection.close()
        # Late news of a closed connection change nothing.
        connections.idle(connection)
        connections.in_use(connection)
        connection.close()
    assert len(connections) == 0
    assert not connections._addresses
    assert not connections._idle
