"""Which connections are open, and which of them have been idle for longest.

A new connection always gets in while any other is idle: where there are too many, in all or from
one address, the one that has been idle for longest is closed for it. Idle is a connection without a
request in progress, also one that never sent a whole head. So connections that do nothing lock
nobody out. Event loop only.
"""

from __future__ import annotations

from typing import Protocol

from streamhouse.core.errors import OverloadedError
from streamhouse.storage_service.config import ServiceConfig

__all__ = ["OpenConnections"]


class Connection(Protocol):
    """What is closed when it is idle for too long."""

    def drop(self) -> None:
        """Close at once, whatever is unsent."""


class _Address:
    """The connections from one address; `idle` in the order in which they became idle."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.count = 0
        self.idle: dict[Connection, None] = {}


class OpenConnections:
    """All connections of a service."""

    def __init__(self, *, connections_max: int, address_connections_max: int) -> None:
        self._connections_max = connections_max
        self._address_max = address_connections_max
        self._addresses: dict[str | None, _Address] = {}
        self._address_of: dict[Connection, _Address] = {}
        self._idle: dict[Connection, None] = {}
        self.closed_idle_count = 0

    @classmethod
    def of(cls, config: ServiceConfig) -> OpenConnections:
        """Return those of a service that was just started."""
        return cls(
            connections_max=config.connections_max,
            address_connections_max=config.address_connections_max,
        )

    def __len__(self) -> int:
        return len(self._address_of)

    def opened(self, connection: Connection, address: str | None) -> None:
        """Add a connection, which is idle; raises `OverloadedError` if all others are in use."""
        of_address = self._addresses.get(address)
        if of_address is not None and of_address.count >= self._address_max:
            self._make_room(
                of_address.idle,
                f"{self._address_max} connections from {address} are in use"
                " (address_connections_max)",
            )
        if len(self._address_of) >= self._connections_max:
            self._make_room(
                self._idle, f"{self._connections_max} connections are in use (connections_max)"
            )
        # Looked up again: it goes with its last connection.
        of_address = self._addresses.setdefault(address, _Address(address))
        of_address.count += 1
        self._address_of[connection] = of_address
        self.idle(connection)

    def idle(self, connection: Connection) -> None:
        """Say that a connection waits for its next request."""
        of_address = self._address_of.get(connection)
        if of_address is not None:
            for idle in (self._idle, of_address.idle):
                idle.pop(connection, None)
                idle[connection] = None

    def in_use(self, connection: Connection) -> None:
        """Say that a connection has a request in progress."""
        of_address = self._address_of.get(connection)
        if of_address is not None:
            self._idle.pop(connection, None)
            of_address.idle.pop(connection, None)

    def closed(self, connection: Connection) -> None:
        """Forget a connection; one that is not known is fine."""
        self.in_use(connection)
        of_address = self._address_of.pop(connection, None)
        if of_address is not None:
            of_address.count -= 1
            if not of_address.count:
                del self._addresses[of_address.name]

    def _make_room(self, idle: dict[Connection, None], reason: str) -> None:
        longest = next(iter(idle), None)
        if longest is None:
            raise OverloadedError(f"{reason}; try again later")
        self.closed_idle_count += 1
        longest.drop()
