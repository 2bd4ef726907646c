"""The control routes of consumers: the reported positions of a table's readers.

A consumer belongs to the token of its reports. Other callers see the consumer without its owner.
"""

from __future__ import annotations

from typing import Any

from fastapi import Request

from streamhouse.core.errors import BucketNotFoundError, OffsetOutOfRangeError
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.upkeep.consumer_lag import (
    ConsumerLag,
    consumer_lags,
    lag_now,
)
from streamhouse.storage_service.server.caller import Caller
from streamhouse.storage_service.server.control._request_bodies import ReportPosition
from streamhouse.storage_service.server.control.control_routes import ControlRoutes, TableName
from streamhouse.storage_service.server.http.http_exchange import exchange_of
from streamhouse.storage_service.server.service import Service

__all__ = ["consumer_routes"]


def consumer_routes(routes: ControlRoutes, service: Service) -> None:
    """Make the routes below `/v1/tables/{path}/consumers`."""
    runtime = service.manager.runtime

    @routes.answers("The positions and lags of a table's consumers.")
    async def list_consumers(request: Request, path: TableName) -> dict[str, Any]:
        caller = exchange_of(request).caller
        table = service.readable(path)
        lags = await consumer_lags(table, runtime)
        shown = [_shown(lag, caller) for lag in lags]
        return {"table_id": table.info.table_id, "consumers": shown}

    @routes.answers("Report how far a consumer has read.")
    async def report_position(
        request: Request, path: TableName, name: str, body: ReportPosition
    ) -> dict[str, Any]:
        table, caller = service.table(path), exchange_of(request).caller
        table.info.check_positions(body.offsets, table_id=body.table_id)
        for bucket, offset in body.offsets.items():
            _check_readable(table, bucket, offset)
        consumer = await table.consumers.report(
            name,
            owner=caller.name,
            offsets=body.offsets,
            reads_lake=body.reads_lake,
            is_durable=body.durable,
            is_part=body.part,
            ttl_ms=table.properties.log_consumers_ttl_ms,
        )
        lag = await lag_now(table, consumer, runtime)
        return {"lag_rows": lag.rows, "lag_ms": lag.lag_ms}

    @routes.answers("Forget a consumer; it may report again.", status_code=204)
    async def forget_consumer(request: Request, path: TableName, name: str) -> None:
        caller = exchange_of(request).caller
        await service.table(path).consumers.forget(
            name, owner=caller.name, of_others=caller.may_see_owners()
        )


def _check_readable(table: OpenTable, bucket: int, offset: int) -> None:
    """Raise if the offset is beyond the end of the bucket, or the bucket does not exist."""
    if bucket >= len(table.tablets):
        raise BucketNotFoundError(
            f"table '{table.path}' has no bucket {bucket}; its buckets are"
            f" 0..{len(table.tablets) - 1}"
        )
    end = table.tablets[bucket].high_watermark
    if offset > end:
        raise OffsetOutOfRangeError(
            f"table '{table.path}' ends at offset {end} of bucket {bucket}, so nobody has read"
            f" up to {offset}"
        )


def _shown(lag: ConsumerLag, caller: Caller) -> dict[str, Any]:
    """Return the JSON form, with the owner only for authorised callers."""
    shown = lag.to_json() | {"is_own": lag.consumer.owner == caller.name}
    if lag.consumer.owner != caller.name and not caller.may_see_owners():
        del shown["owner"]
    return shown
