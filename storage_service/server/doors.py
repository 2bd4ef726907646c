"""Doors: further protocols of a service, each in a room that the server does not import.

`storage_service/door_table.py` lists the doors, and makes the doors that a configuration asks for.
A door brings everything that belongs to its protocol: routes, the form of errors, a listening
socket, state beside the tables, entries of metrics and status. The server calls a door as follows:

1. Before the tables are open: the server binds `port` and opens each table with `sidecars`.
2. `open` once with the service, then `control_routes`.
3. `listen` on the bound socket, while this process owns the data; then requests are answered.
4. The end of the context of `listen` when the service stops, and `close` after the last request.

Each door that was opened is closed, the last one first, even if another door fails.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import ClassVar

from streamhouse.core.errors import NotFoundError, StreamhouseError
from streamhouse.storage_service.engine.sidecar import Sidecar
from streamhouse.storage_service.server.control.control_routes import ControlRoutes
from streamhouse.storage_service.server.http.http_exchange import HttpExchange
from streamhouse.storage_service.server.http.open_connections import OpenConnections
from streamhouse.storage_service.server.http.tls import Certificate
from streamhouse.storage_service.server.routes import (
    ANY,
    ANY_TOKEN,
    ROUTES,
    Answer,
    Route,
    RouteMatch,
    RouteTable,
)
from streamhouse.storage_service.server.service import Service

__all__ = ["ClosedDoor", "Door", "Doors"]


class Door:
    """One protocol; a door overrides what the protocol has. Event loop only."""

    path: str = ""
    """Errors of requests at this path and below are in the door's form; "" for no path."""
    routes: Sequence[Route] = ()
    """Rows of the table of routes; `answer` answers the rows with `Answer.DOOR`."""
    sidecars: ClassVar[Sequence[type[Sidecar]]] = ()
    """The state that the engine keeps beside each table for the door."""
    port: int | None = None
    """The port of a separate listening socket, on the same host; None for no socket."""
    port_option: ClassVar[str] = ""
    """The command line option of `port`."""

    def open(self, service: Service) -> None:
        """Keep the service, whose tables are open; add metrics and status entries."""

    def control_routes(self, routes: ControlRoutes) -> None:
        """Bind the functions of the rows with `Answer.CONTROL`."""

    def before_grants(self, exchange: HttpExchange) -> None:
        """Bring the path of a request into the form that `routes` and grants are for."""

    async def answer(self, exchange: HttpExchange, match: RouteMatch, /) -> None:
        """Answer a request of a row with `Answer.DOOR`."""
        raise NotImplementedError

    async def answer_error(self, exchange: HttpExchange, error: StreamhouseError) -> None:
        """Send an error in the protocol's form; also called on a door that is not open."""
        await exchange.answer_error(error)

    def listen(
        self,
        listening: socket.socket,
        *,
        connections: OpenConnections,
        certificate: Certificate | None,
    ) -> AbstractAsyncContextManager[str]:
        """Accept connections within the context; all connections have ended at its end.

        The context's value is the announcement, as in "serving Kafka clients on ...".
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release threads and connections of the door, also after an `open` that failed.

        Blocking; not on the event loop.
        """


class ClosedDoor(Door):
    """A protocol that is not served: every request is refused with the way to get the protocol."""

    def __init__(self, path: str, why: str) -> None:
        self.path = path
        self._why = why
        self.routes = (
            Route(
                method=ANY,
                path=f"{path}/...",
                need=ANY_TOKEN,
                name="closed_door",
                answer=Answer.DOOR,
                is_about_service=True,
            ),
        )

    async def answer(self, exchange: HttpExchange, _: RouteMatch) -> None:
        """Refuse the request."""
        raise NotFoundError(f"there is no route {exchange.path[:200]}: {self._why}")


class Doors:
    """The doors of one process, and the table of all routes."""

    def __init__(self, doors: Sequence[Door] = ()) -> None:
        self._doors = tuple(doors)
        self.routes = RouteTable([*ROUTES, *(row for door in doors for row in door.routes)])
        self._answering = {id(row): door for door in doors for row in door.routes}
        self._by_first_name = {door.path.split("/")[1]: door for door in doors if door.path}

    def __iter__(self) -> Iterator[Door]:
        return iter(self._doors)

    @property
    def sidecars(self) -> list[type[Sidecar]]:
        """The state that all doors keep beside each table."""
        return [kind for door in self._doors for kind in door.sidecars]

    def find(self, exchange: HttpExchange) -> RouteMatch:
        """Return the row of a request, and set what the row says of the request."""
        door = self._at(exchange.path)
        if door is not None:
            door.before_grants(exchange)
        match = self.routes.find(exchange.method, exchange.path)
        exchange.need, exchange.body = match.need, match.route.body
        exchange.takes_password = match.route.takes_password
        return match

    async def answer(self, exchange: HttpExchange, match: RouteMatch) -> None:
        """Answer a request of a row with `Answer.DOOR`."""
        exchange.route = match.route.name
        await self._answering[id(match.route)].answer(exchange, match)

    async def answer_error(self, exchange: HttpExchange, error: StreamhouseError) -> None:
        """Send an error in the form of the path's protocol."""
        door = self._at(exchange.path)
        if door is None:
            await exchange.answer_error(error)
        else:
            await door.answer_error(exchange, error)

    def _at(self, path: str) -> Door | None:
        first_name = path.split("/", 2)[1:2]
        door = self._by_first_name.get(first_name[0]) if first_name else None
        if door is None or not (path == door.path or path.startswith(f"{door.path}/")):
            return None
        return door
