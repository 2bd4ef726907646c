"""The control routes of backups: stage one, and give a staged one up."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from streamhouse.storage_service.engine.directory.backup import (
    STAGING,
    clear_staging,
    stage_running,
)
from streamhouse.storage_service.errors import UnsupportedError
from streamhouse.storage_service.server.control.request_bodies import TakeBackup
from streamhouse.storage_service.server.service import Service

__all__ = ["backup_routes"]


def backup_routes(service: Service) -> APIRouter:
    """Return the routes at `/v1/admin/backup`."""
    routes = APIRouter(prefix="/v1/admin/backup")
    manager = service.manager

    @routes.post("", summary="Stage a backup in the data directory.", status_code=201)
    async def stage_backup(body: TakeBackup) -> dict[str, Any]:
        if body.with_lake and service.config.catalog_properties:
            raise UnsupportedError(
                "the lake's catalog is not the service's own: back it up where it is, after this"
            )
        # Nobody creates or drops tables, or deletes segments, until all have a second name.
        async with manager.changing_files:
            tables = list(manager.open_tables())
            damaged = manager.damaged_tables()
            staged = await stage_running(
                manager.directory,
                tables,
                damaged=[table.table_id for table in damaged],
                with_lake=body.with_lake,
                run=service.run_blocking,
            )
        return {
            "staged": STAGING,
            "service_id": manager.service_id,
            "tables": {
                str(table.path): {
                    "table_id": table.info.table_id,
                    "buckets": staged[table.info.table_id],
                }
                for table in tables
            },
            "damaged_tables": [table.to_json() for table in damaged],
        }

    @routes.delete("", summary="Remove what was staged.", status_code=204)
    async def discard_backup() -> None:
        await service.run_blocking(clear_staging, manager.directory)

    return routes
