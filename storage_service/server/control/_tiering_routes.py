"""The control routes of tiering: claims, rounds, and the lake snapshots that readers have pinned.

A pin keeps a lake snapshot from expiry while a reader uses the snapshot. A pin belongs to the token
of its request. Other callers see the pin without its holder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request

from streamhouse.core.errors import (
    NotFoundError,
    StreamhouseError,
    TableDamagedError,
)
from streamhouse.core.model.offsets import buckets_to_json
from streamhouse.core.model.table_state import EMBEDDED_WORKER_ID, TieringReport
from streamhouse.storage_service.engine.lake_pins import LakePin
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.tiering_desk.tiering_round import RoundProgress
from streamhouse.storage_service.server.caller import Caller
from streamhouse.storage_service.server.control._request_bodies import (
    ClaimTiering,
    CompareHistory,
    CompleteTiering,
    FailTiering,
    HeartbeatTiering,
    PinSnapshot,
)
from streamhouse.storage_service.server.control.control_routes import ControlRoutes, TableName
from streamhouse.storage_service.server.http.http_exchange import exchange_of
from streamhouse.storage_service.server.service import Service

__all__ = ["lake_pin_routes", "tiering_routes"]


def tiering_routes(routes: ControlRoutes, service: Service) -> None:
    coordinator = service.manager.tiering

    @routes.answers("The state of tiering, table by table.")
    async def tiering_status() -> dict[str, dict[str, Any]]:
        tables = sorted(service.manager.open_tables(), key=lambda table: table.path)
        return {"tables": {str(table.path): coordinator.status(table) for table in tables}}

    @routes.answers("Claim the most overdue table for a tiering round.")
    async def claim(body: ClaimTiering) -> dict[str, Any]:
        tables = None if body.tables is None else _served(service, body.tables)
        answer = await coordinator.claim(
            body.worker_id, tables=tables, force=body.force, include_idle=body.include_idle
        )
        shards = service.shards
        if shards is None or body.worker_id == EMBEDDED_WORKER_ID:
            return answer.to_json()
        # A worker gets the endpoints of all shards; an embedded worker serves only its own shard.
        return answer.to_json() | {"shards": await shards.endpoints()}

    @routes.answers("Keep a claim.")
    async def heartbeat(body: HeartbeatTiering) -> dict[str, Any]:
        progress = RoundProgress(
            step=body.step, rows_done=body.rows_done, rows_planned=body.rows_planned
        )
        await coordinator.heartbeat(
            service.table(body.table),
            table_id=body.table_id,
            epoch=body.epoch,
            progress=progress if body.step else None,
        )
        return {"lease_ms": service.config.tiering_lease_ms}

    @routes.answers("Register a committed lake snapshot.")
    async def complete(body: CompleteTiering) -> dict[str, Any]:
        report = TieringReport.from_json(body.model_dump())
        lake = await coordinator.complete(service.table(body.table), report)
        return lake.to_json()

    @routes.answers("Compare a lake table's history with the log's.")
    async def compare_history(body: CompareHistory) -> dict[str, dict[str, str]]:
        fingerprints = await coordinator.compare_history(
            service.table(body.table),
            table_id=body.table_id,
            covered=None if body.lake is None else body.lake.covered(),
            offsets=body.offsets,
        )
        return {"fingerprints": buckets_to_json(fingerprints)}

    @routes.answers("Give a claim back after a failed round.")
    async def fail(body: FailTiering) -> dict[str, Any]:
        table = service.table(body.table)
        pause_ms = await coordinator.fail(
            table, table_id=body.table_id, epoch=body.epoch, error=body.error
        )
        return {"paused_ms": pause_ms}


def _served(service: Service, paths: Sequence[str]) -> list[OpenTable]:
    """Return the tables that are not damaged; raises `TableDamagedError` if all are damaged."""
    served: list[OpenTable] = []
    failed: StreamhouseError | None = None
    # Without duplicates: a request may have more names than the service has tables.
    for path in dict.fromkeys(paths):
        try:
            served.append(service.table(path))
        except TableDamagedError as error:
            failed = error
        except NotFoundError as error:
            if service.shards is None:
                raise
            # Another shard may have the table; the worker claims the table from that shard.
            failed = failed or error
    if failed is not None and not served:
        raise failed
    return served


def lake_pin_routes(routes: ControlRoutes, service: Service) -> None:
    """Make the routes below `/v1/tables/{path}/lake`."""

    @routes.answers("The lake snapshots that readers have pinned.")
    async def pinned_snapshots(request: Request, path: TableName) -> dict[str, list[Any]]:
        caller = exchange_of(request).caller
        pins = enumerate(service.table(path).lake_pins.current(), 1)
        return {"pins": [_shown(pin, number, caller) for number, pin in pins]}

    @routes.answers("Pin a lake snapshot for a while, or pin it for longer.")
    async def pin_snapshot(
        request: Request, path: TableName, holder: str, body: PinSnapshot
    ) -> dict[str, Any]:
        caller = exchange_of(request).caller
        pin = await service.table(path).lake_pins.pin(
            holder, owner=caller.name, snapshot_id=int(body.snapshot_id), ttl_ms=body.ttl_ms
        )
        return _shown(pin, 0, caller)

    @routes.answers("End a pin.", status_code=204)
    async def unpin_snapshot(request: Request, path: TableName, holder: str) -> None:
        caller = exchange_of(request).caller
        await service.table(path).lake_pins.unpin(
            holder, owner=caller.name, of_others=caller.may_see_owners()
        )


def _shown(pin: LakePin, number: int, caller: Caller) -> dict[str, Any]:
    """Return the JSON form; callers other than the owner get a number in place of the holder."""
    shown = pin.to_json()
    owner = shown.pop("owner")
    if owner != caller.name and not caller.may_see_owners():
        shown["holder"] = f"(hidden {number})"
    return shown
