"""The control routes of lake pins: readers' promises that a lake snapshot is not expired.

A pin belongs to the token that made it. Others see that a snapshot is pinned, and not by whom.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from streamhouse.storage_service.engine.tiering_desk.lake_pins import LakePin
from streamhouse.storage_service.server.access.grants import SERVICE, Caller, Level
from streamhouse.storage_service.server.control.request_bodies import PinSnapshot, TableName
from streamhouse.storage_service.server.http.http_exchange import exchange_of
from streamhouse.storage_service.server.service import Service

__all__ = ["lake_pin_routes"]


def lake_pin_routes(service: Service) -> APIRouter:
    """Return the routes below `/v1/tables/{path}/lake/pins`."""
    routes = APIRouter(prefix="/v1/tables/{path}/lake/pins")

    @routes.get("", summary="The lake snapshots that readers have pinned.")
    async def pinned_snapshots(request: Request, path: TableName) -> dict[str, list[Any]]:
        caller = exchange_of(request).caller
        pins = enumerate(service.table(path).lake_pins.current(), 1)
        return {"pins": [_shown(pin, number, caller) for number, pin in pins]}

    @routes.put("/{holder}", summary="Pin a lake snapshot for a while, or pin it for longer.")
    async def pin_snapshot(
        request: Request, path: TableName, holder: str, body: PinSnapshot
    ) -> dict[str, Any]:
        caller = exchange_of(request).caller
        pin = await service.table(path).lake_pins.pin(
            holder, owner=caller.name, snapshot_id=int(body.snapshot_id), ttl_ms=body.ttl_ms
        )
        return _shown(pin, 0, caller)

    @routes.delete("/{holder}", summary="End a pin.", status_code=204)
    async def unpin_snapshot(request: Request, path: TableName, holder: str) -> None:
        caller = exchange_of(request).caller
        await service.table(path).lake_pins.unpin(
            holder, owner=caller.name, of_others=_may_see_all(caller)
        )

    return routes


def _may_see_all(caller: Caller) -> bool:
    return caller.may(Level.ADMIN, SERVICE)


def _shown(pin: LakePin, number: int, caller: Caller) -> dict[str, Any]:
    """Return the JSON form; who does not own the pin gets a number for its holder."""
    shown = pin.to_json()
    owner = shown.pop("owner")
    if owner != caller.name and not _may_see_all(caller):
        shown["holder"] = f"(hidden {number})"
    return shown
