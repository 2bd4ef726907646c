"""The control routes that move a table to another shard."""

from __future__ import annotations

from fastapi import Request

from streamhouse.core.errors import UnsupportedError
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.server.control._request_bodies import (
    MoveTable,
    ReceiveTable,
)
from streamhouse.storage_service.server.control.control_routes import ControlRoutes, TableName
from streamhouse.storage_service.server.http.http_exchange import exchange_of
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.server.shards._moves import MoveDesk

__all__ = ["move_routes"]


def move_routes(routes: ControlRoutes, service: Service) -> None:
    """Make the routes `/v1/tables/{path}/move` and `/v1/tables/{path}/arrival`."""

    @routes.answers("Move a table to another shard; ask again until it is done.")
    async def move_table(request: Request, path: TableName, body: MoveTable) -> dict[str, bool]:
        desk, parsed = _desk(service), TablePath.parse(path)
        if not desk.is_moving(parsed):
            service.table(path)
        headers = exchange_of(request).scope["headers"]
        return {"is_done": await desk.move(parsed, body.to, headers)}

    @routes.answers("Receive a table from another shard, which repeats this until it is done.")
    async def receive_table(path: TableName, body: ReceiveTable) -> dict[str, bool]:
        desk, parsed = _desk(service), TablePath.parse(path)
        is_done = await desk.receive(
            parsed,
            body.ticket,
            catalog=body.catalog,
            passes=body.rounds,
            is_whole=body.is_whole,
        )
        return {"is_done": is_done}


def _desk(service: Service) -> MoveDesk:
    if service.moves is None:
        raise UnsupportedError(
            "the service is one process: it has no shards to move tables between"
        )
    return service.moves
