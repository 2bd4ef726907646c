"""The open connections, and the order in which the idle connections became idle.

A new connection is always accepted while another connection is idle. At a limit, in total or for an
address, the connection with the longest idle time is closed for the new connection. A connection
without a request in progress is idle, even before its first whole head. Idle connections therefore
never lock out a client. Event loop only.
"""

from __future__ import annotations

from typing import Final, Protocol

from streamhouse.core.errors import OverloadedError
from streamhouse.storage_service.config import ServiceConfig

__all__ = ["BACKLOG", "OpenConnections"]

BACKLOG: Final = 2_048
"""How many connections to one port may wait until the process accepts them."""


class Connection(Protocol):
    """A connection that `OpenConnections` may close."""

    def drop(self) -> None:
        """Close at once, without sending buffered bytes."""


class _Address:
    """The connections from one address; `idle` is in the order of becoming idle."""

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
        """Return the empty set of connections with the limits of `config`."""
        return cls(
            connections_max=config.connections_max,
            address_connections_max=config.address_connections_max,
        )

    def __len__(self) -> int:
        return len(self._address_of)

    def opened(self, connection: Connection, address: str | None) -> None:
        """Add an idle connection; raises `OverloadedError` if all connections are in use."""
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
        # A second lookup: an address without connections has been removed.
        of_address = self._addresses.setdefault(address, _Address(address))
        of_address.count += 1
        self._address_of[connection] = of_address
        self.idle(connection)

    def idle(self, connection: Connection) -> None:
        """Mark a connection as waiting for its next request."""
        of_address = self._address_of.get(connection)
        if of_address is not None:
            for idle in (self._idle, of_address.idle):
                idle.pop(connection, None)
                idle[connection] = None

    def in_use(self, connection: Connection) -> None:
        """Mark a connection as having a request in progress."""
        of_address = self._address_of.get(connection)
        if of_address is not None:
            self._idle.pop(connection, None)
            of_address.idle.pop(connection, None)

    def closed(self, connection: Connection) -> None:
        """Remove a connection; an unknown connection is ignored."""
        self.in_use(connection)
        of_address = self._address_of.pop(connection, None)
        if of_address is not None:
            of_address.count -= 1
            if not of_address.count:
                del self._addresses[of_address.name]

    def _make_room(self, idle: dict[Connection, None], reason: str) -> None:
        connection = next(iter(idle), None)
        if connection is None:
            raise OverloadedError(f"{reason}; try again later")
        self.closed_idle_count += 1
        connection.drop()
