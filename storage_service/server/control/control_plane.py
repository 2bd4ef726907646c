"""The control routes: databases, tables, state, tiering; JSON with an OpenAPI page at /docs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Body, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.tiering_desk.tiering_round import RoundProgress
from streamhouse.storage_service.engine.wakeups import ANY_BUCKET
from streamhouse.storage_service.errors import (
    ForbiddenError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    StreamhouseError,
    TableDamagedError,
)
from streamhouse.storage_service.model.lake import (
    SERVICE_ID_PROPERTY,
    LakeDebt,
    SideLakeState,
)
from streamhouse.storage_service.model.secret_sources import without_secrets
from streamhouse.storage_service.model.table import TableDescriptor, TablePath
from streamhouse.storage_service.server.access.access import database_scope
from streamhouse.storage_service.server.access.grants import SERVICE, Level
from streamhouse.storage_service.server.control.adoption_route import adoption_routes
from streamhouse.storage_service.server.control.backup_routes import backup_routes
from streamhouse.storage_service.server.control.request_bodies import (
    AlterPartitioning,
    AlterProperties,
    AlterSchema,
    ClaimTiering,
    CompareHistory,
    CompletedSide,
    CompleteTiering,
    CreateDatabase,
    FailTiering,
    HeartbeatTiering,
    LakeHistory,
    TableName,
)
from streamhouse.storage_service.server.control.table_routes import size_routes
from streamhouse.storage_service.server.control.tiering_routes import lake_pin_routes
from streamhouse.storage_service.server.control.transaction_routes import transaction_routes
from streamhouse.storage_service.server.http.http_exchange import (
    HttpExchange,
    error_to_json,
    exchange_of,
)
from streamhouse.storage_service.server.http.parameters import integer, offsets
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.server.status.metrics import METRICS_CONTENT_TYPE
from streamhouse.storage_service.server.status.status_page import status_page

__all__ = ["build_control_plane"]


def build_control_plane(service: Service) -> FastAPI:
    """Return the FastAPI application of `service`."""
    app = FastAPI(
        title="Streamhouse storage service",
        description="Control routes. Data routes speak Arrow IPC: see docs/http_api.md.",
        redirect_slashes=False,
    )
    app.include_router(_service_routes(service), tags=["service"])
    app.include_router(_database_routes(service), tags=["databases"])
    app.include_router(_table_routes(service), tags=["tables"])
    app.include_router(adoption_routes(service), tags=["tables"])
    app.include_router(_state_routes(service), tags=["state"])
    app.include_router(size_routes(service), tags=["state"])
    app.include_router(lake_pin_routes(service), tags=["lake pins"])
    app.include_router(transaction_routes(service), tags=["transactions"])
    app.include_router(_tiering_routes(service), tags=["tiering"])
    app.include_router(backup_routes(service), tags=["backups"])
    _answer_errors(app, service)
    return app


def _service_routes(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health", summary="Whether the process is alive; needs no token.")
    async def health() -> dict[str, str]:
        return {"status": "alive"}

    @routes.get("/", summary="The status page, for people; needs no token.")
    async def page() -> Response:
        return status_page()

    @routes.get("/v1/status", summary="What the status page shows: tables, rates, lags, workers.")
    async def status() -> Response:
        return Response(await service.status.text(), media_type="application/json")

    @routes.get("/ready", summary="Whether the service takes requests.")
    async def ready() -> dict[str, str]:
        return {"status": "ready", "service_id": service.manager.service_id}

    @routes.get("/metrics", summary="Metrics in Prometheus' text format.")
    async def metrics() -> Response:
        text = await service.metrics.text(service.run_blocking)
        return Response(text, media_type=METRICS_CONTENT_TYPE)

    @routes.get("/v1/lake/catalog", summary="How to open the Iceberg catalog.")
    async def lake_catalog(request: Request) -> dict[str, Any]:
        caller = exchange_of(request).caller
        if not caller.has_tables():
            raise ForbiddenError(f"token '{caller.name}' has no grant on any table")
        catalog = service.config.offered_catalog()
        shown = catalog.properties
        if not caller.may_read_secrets():
            shown = without_secrets(shown)
        # Tiering marks lake tables with it, to know its own among those of other services.
        identity = {SERVICE_ID_PROPERTY: service.manager.service_id}
        return replace(catalog, properties={**shown, **identity}).to_json()

    return routes


def _database_routes(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v1/databases")
    manager = service.manager

    @routes.get("", summary="The names of all databases.")
    async def list_databases(request: Request) -> dict[str, list[str]]:
        sees = exchange_of(request).caller.sees_database
        return {"databases": [name for name in manager.databases() if sees(name)]}

    @routes.post("", summary="Create a database.", status_code=201)
    async def create_database(request: Request, body: CreateDatabase) -> dict[str, str]:
        service.access.require(exchange_of(request), Level.ADMIN, database_scope(body.name))
        await manager.create_database(body.name)
        return {"name": body.name}

    @routes.delete("/{name}", summary="Drop an empty database.", status_code=204)
    async def drop_database(name: str) -> None:
        await manager.drop_database(name)

    return routes


def _table_routes(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v1/tables")
    manager = service.manager

    @routes.get("", summary="The paths of all tables, or of one database's.")
    async def list_tables(request: Request, database: str | None = None) -> dict[str, list[str]]:
        may = exchange_of(request).caller.may
        paths = [str(path) for path in manager.list_tables(database)]
        return {"tables": [path for path in paths if may(Level.READ, path)]}

    @routes.post("", summary="Create a table.", status_code=201)
    async def create_table(
        request: Request, descriptor: Annotated[dict[str, Any], Body()]
    ) -> dict[str, Any]:
        parsed = TableDescriptor.from_json(descriptor)
        service.access.require(exchange_of(request), Level.ADMIN, str(parsed.path))
        table = await manager.create_table(parsed)
        return table.info.to_json()

    @routes.get("/{path}", summary="Describe a table.")
    async def describe_table(path: TableName) -> dict[str, Any]:
        return service.table(path).info.to_json()

    @routes.delete("/{path}", summary="Drop a table and its log.", status_code=204)
    async def drop_table(
        path: TableName,
        damaged: Annotated[
            bool, Query(description="Drop a table that is damaged; its files stay on disk.")
        ] = False,
    ) -> None:
        if damaged:
            return await manager.drop_damaged(TablePath.parse(path))
        await manager.drop_table(service.table(path).path)

    @routes.patch("/{path}/properties", summary="Set and remove properties, all or none.")
    async def alter_properties(path: TableName, body: AlterProperties) -> dict[str, Any]:
        info = await manager.alter_properties(
            service.table(path).path, updates=body.set, removals=body.remove
        )
        return info.to_json()

    @routes.put("/{path}/partitioning", summary="Partition the lake's future files otherwise.")
    async def alter_partitioning(path: TableName, body: AlterPartitioning) -> dict[str, Any]:
        info = await manager.alter_partitioning(service.table(path).path, body.partitioned_by)
        return info.to_json()

    @routes.patch("/{path}/schema", summary="Change the schema: all changes or none.")
    async def alter_schema(path: TableName, body: AlterSchema) -> dict[str, Any]:
        return (await manager.alter_schema(service.table(path).path, body.changes)).to_json()

    return routes


def _state_routes(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v1/tables/{path}")

    @routes.get("/state", summary="Table, positions and lake snapshot as one consistent cut.")
    async def table_state(
        request: Request,
        path: TableName,
        after: Annotated[
            str | None, Query(description="JSON: wait until some bucket is beyond its offset.")
        ] = None,
        max_wait_ms: Annotated[str, Query(description="How long to wait at most.")] = "0",
    ) -> Response:
        table = service.table(path)
        wait_ms = integer("max_wait_ms", max_wait_ms, least=0)
        if after is not None and wait_ms:
            known = offsets("after", after, table.info)
            await _wait_beyond(service, exchange_of(request), table, known, wait_ms)
        return JSONResponse(table.state().to_json())

    @routes.post("/lake/history", summary="Whether what a lake table covers is the log's history.")
    async def check_lake_history(
        request: Request, path: TableName, body: LakeHistory
    ) -> dict[str, Any]:
        table = service.table(path)
        # Only who may tier may end that: what others say is judged, and not kept.
        is_kept = exchange_of(request).caller.may(Level.WRITE, SERVICE)
        await service.manager.tiering.check_lake(table, body.covered(), is_kept=is_kept)
        return {}

    @routes.get("/offsets", summary="Per bucket, the first offset written at or after a time.")
    async def offsets_for_timestamp(
        path: TableName,
        timestamp_us: Annotated[str, Query(description="Microseconds since the epoch, UTC.")],
    ) -> dict[str, dict[str, int]]:
        time_us = integer("timestamp_us", timestamp_us, least=0)
        found = await service.manager.offsets_for_timestamp(service.table(path), time_us)
        return {"offsets": {str(bucket): offset for bucket, offset in found.items()}}

    return routes


async def _wait_beyond(
    service: Service, exchange: HttpExchange, table: OpenTable, after: dict[int, int], wait_ms: int
) -> None:
    wait_ms = min(wait_ms, service.config.fetch_wait_ms_max)
    deadline = asyncio.get_running_loop().time() + wait_ms / 1000
    while not any(
        tablet.high_watermark > after.get(bucket, 0) for bucket, tablet in enumerate(table.tablets)
    ):
        if not await service.wait_for_rows(exchange, table, ANY_BUCKET, deadline=deadline):
            return
        service.manager.check_open(table)


def _tiering_routes(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v1/tiering")
    coordinator = service.manager.tiering

    @routes.get("", summary="How tiering stands, table by table.")
    async def tiering_status() -> dict[str, dict[str, Any]]:
        tables = sorted(service.manager.open_tables(), key=lambda table: table.path)
        return {"tables": {str(table.path): coordinator.status(table) for table in tables}}

    @routes.post("/claim", summary="Claim the most overdue table for a tiering round.")
    async def claim(body: ClaimTiering) -> dict[str, Any]:
        tables = None if body.tables is None else _served(service, body.tables)
        answer = await coordinator.claim(
            body.worker_id, tables=tables, force=body.force, include_idle=body.include_idle
        )
        return answer.to_json()

    @routes.post("/heartbeat", summary="Keep a claim.")
    async def heartbeat(body: HeartbeatTiering) -> dict[str, Any]:
        progress = RoundProgress(
            step=body.step, rows_done=body.rows_done, rows_planned=body.rows_planned
        )
        await coordinator.heartbeat(
            service.table(body.table), epoch=body.epoch, progress=progress if body.step else None
        )
        return {"lease_ms": service.config.tiering_lease_ms}

    @routes.post("/complete", summary="Register a committed lake snapshot.")
    async def complete(body: CompleteTiering) -> dict[str, Any]:
        lake = await coordinator.complete(
            service.table(body.table),
            table_id=body.table_id,
            epoch=body.epoch,
            snapshot_id=int(body.lake_snapshot_id),
            table_uuid=body.lake_table_uuid,
            tiered_offsets=body.tiered_offsets,
            changelog=_side(body.changelog),
            batch=_side(body.batch),
            keep_lease=body.keep_lease,
            truncated_offsets=body.truncated_offsets,
            expired_offsets=body.expired_offsets,
            maintenance_due_us=body.maintenance_due_us,
            fingerprints=body.fingerprints,
            debt=None if body.debt is None else LakeDebt(**body.debt.model_dump()),
        )
        return lake.to_json()

    @routes.post("/history", summary="Compare a lake table's history with the log's.")
    async def compare_history(body: CompareHistory) -> dict[str, dict[str, str]]:
        found = await coordinator.compare_history(
            service.table(body.table),
            table_id=body.table_id,
            covered=None if body.lake is None else body.lake.covered(),
            offsets=body.offsets,
        )
        return {"fingerprints": {str(bucket): said for bucket, said in found.items()}}

    @routes.post("/fail", summary="Give a claim back after a failed round.")
    async def fail(body: FailTiering) -> dict[str, Any]:
        table = service.table(body.table)
        pause_ms = await coordinator.fail(table, epoch=body.epoch, error=body.error)
        return {"paused_ms": pause_ms}

    return routes


def _served(service: Service, paths: Sequence[str]) -> list[OpenTable]:
    """Return those tables that are not damaged; raises `TableDamagedError` if all of them are."""
    served, damaged = [], None
    # Each once: there are fewer tables than a request may have names.
    for path in dict.fromkeys(paths):
        try:
            served.append(service.table(path))
        except TableDamagedError as error:
            damaged = error
    if damaged is not None and not served:
        raise damaged
    return served


def _side(body: CompletedSide | None) -> SideLakeState | None:
    return None if body is None else SideLakeState.from_json(body.model_dump())


def _answer_errors(app: FastAPI, service: Service) -> None:
    """Make the application answer every error in the one form there is."""

    async def answer(request: Request, error: Exception) -> Response:
        exchange: HttpExchange = exchange_of(request)
        ours = _translated(error, exchange)
        # A bug is logged with its trace where the exception ends up, in app.py.
        service.report(exchange, ours)
        return JSONResponse(
            error_to_json(ours, request_id=exchange.request_id), status_code=ours.http_status
        )

    for kind in (StreamhouseError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _translated(error: Exception, exchange: HttpExchange) -> StreamhouseError:
    path = exchange.path[:200]
    if isinstance(error, StreamhouseError):
        return error
    if isinstance(error, RequestValidationError):
        return InvalidRequestError(f"{path}: {_sentence(error)}")
    if isinstance(error, HTTPException) and error.status_code == 404:
        return NotFoundError(f"there is no route {path}; /docs lists them")
    if isinstance(error, HTTPException) and error.status_code == 405:
        return InvalidRequestError(f"{path}: method {exchange.method} is not allowed here")
    if isinstance(error, HTTPException) and error.status_code < 500:
        return InvalidRequestError(f"{path}: {error.detail}")
    return InternalError("the service met a bug; its log has the details under this request id")


def _sentence(error: RequestValidationError) -> str:
    """Return the first finding as `body.tables: Input should be ...`."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}"
