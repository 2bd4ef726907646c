"""The control routes of consumers: where the readers of a table stand, as they report it.

A consumer belongs to the token that reports it. Others see it, and not whose it is.
"""

from __future__ import annotations

from typing import Any

from fastapi import Request

from streamhouse.storage_service.engine.upkeep.consumer_lag import ConsumerLag, consumer_lags
from streamhouse.storage_service.errors import BucketNotFoundError
from streamhouse.storage_service.server.caller import SERVICE, Caller, Level
from streamhouse.storage_service.server.control.control_routes import ControlRoutes
from streamhouse.storage_service.server.control.request_bodies import ReportPosition, TableName
from streamhouse.storage_service.server.http.http_exchange import exchange_of
from streamhouse.storage_service.server.service import Service

__all__ = ["consumer_routes"]


def consumer_routes(routes: ControlRoutes, service: Service) -> None:
    """Make the routes below `/v1/tables/{path}/consumers`."""
    runtime = service.manager.runtime

    @routes.answers("Where the readers of a table stand, and how far behind they are.")
    async def list_consumers(request: Request, path: TableName) -> dict[str, list[Any]]:
        caller = exchange_of(request).caller
        lags = await consumer_lags(service.readable(path), runtime)
        return {"consumers": [_shown(lag, caller) for lag in lags]}

    @routes.answers("Report how far a consumer has read.")
    async def report_position(
        request: Request, path: TableName, name: str, body: ReportPosition
    ) -> dict[str, Any]:
        table, caller = service.table(path), exchange_of(request).caller
        for bucket in body.offsets:
            if bucket >= len(table.tablets):
                raise BucketNotFoundError(
                    f"table '{table.path}' has no bucket {bucket}; its buckets are"
                    f" 0..{len(table.tablets) - 1}"
                )
        said = await table.consumers.report(
            name,
            owner=caller.name,
            offsets=body.offsets,
            reads_lake=body.reads_lake,
            ttl_ms=table.properties.log_consumers_ttl_ms,
        )
        lags = await consumer_lags(table, runtime)
        found = next((lag for lag in lags if lag.consumer.key == said.key), None)
        # Another report may have come, or the table may just have been dropped.
        return {"lag_rows": found and found.rows, "lag_ms": found and found.lag_ms}

    @routes.answers("Forget a consumer; it may report again.", status_code=204)
    async def forget_consumer(request: Request, path: TableName, name: str) -> None:
        caller = exchange_of(request).caller
        await service.table(path).consumers.forget(
            name, owner=caller.name, of_others=_may_see_all(caller)
        )


def _may_see_all(caller: Caller) -> bool:
    return caller.may(Level.ADMIN, SERVICE)


def _shown(lag: ConsumerLag, caller: Caller) -> dict[str, Any]:
    """Return the JSON form; whose it is only says who may know."""
    shown = lag.to_json()
    if lag.consumer.owner != caller.name and not _may_see_all(caller):
        del shown["owner"]
    return shown
