"""The control routes of lake pins: readers' promises that a lake snapshot is not expired."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from streamhouse.storage_service.server.request_bodies import PinSnapshot, TableName
from streamhouse.storage_service.server.service import Service

__all__ = ["lake_pin_routes"]


def lake_pin_routes(service: Service) -> APIRouter:
    """Return the routes below `/v1/tables/{path}/lake/pins`."""
    routes = APIRouter(prefix="/v1/tables/{path}/lake/pins")

    @routes.get("", summary="The lake snapshots that readers have pinned.")
    async def pinned_snapshots(path: TableName) -> dict[str, list[dict[str, Any]]]:
        return {"pins": [pin.to_json() for pin in service.table(path).lake_pins.current()]}

    @routes.put("/{holder}", summary="Pin a lake snapshot for a while, or pin it for longer.")
    async def pin_snapshot(path: TableName, holder: str, body: PinSnapshot) -> dict[str, Any]:
        pin = await service.table(path).lake_pins.pin(
            holder, snapshot_id=int(body.snapshot_id), ttl_ms=body.ttl_ms
        )
        return pin.to_json()

    @routes.delete("/{holder}", summary="End a pin.", status_code=204)
    async def unpin_snapshot(path: TableName, holder: str) -> None:
        await service.table(path).lake_pins.unpin(holder)

    return routes
