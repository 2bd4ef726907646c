"""The control route of a table's bytes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from streamhouse.storage_service.engine.upkeep.disk_budget import bytes_below
from streamhouse.storage_service.model.table_sizes import BucketSizes, TableSizes
from streamhouse.storage_service.server.control.request_bodies import TableName
from streamhouse.storage_service.server.service import Service

__all__ = ["size_routes"]


def size_routes(service: Service) -> APIRouter:
    """Return the route `/v1/tables/{path}/sizes`."""
    routes = APIRouter(prefix="/v1/tables/{path}")

    @routes.get("/sizes", summary="How many bytes the service keeps of the table.")
    async def table_sizes(path: TableName) -> dict[str, Any]:
        table = service.table(path)
        log_bytes = [tablet.size_bytes for tablet in table.tablets]
        positions = table.positions()
        key_bytes = [0] * len(log_bytes)
        if table.key_writer is not None:
            directory, table_id = service.manager.directory, table.info.table_id
            folders = [directory.key_rows(table_id, bucket) for bucket in positions]
            key_bytes = await service.run_blocking(bytes_below, folders)
        sizes = {
            bucket: BucketSizes.of_log(
                log_bytes[bucket],
                start=position.log_start_offset,
                tiered=position.tiered_offset,
                end=position.high_watermark,
                key_bytes=key_bytes[bucket],
            )
            for bucket, position in positions.items()
        }
        return TableSizes(sizes).to_json()

    return routes
