"""The control routes: databases, tables, state, tiering; JSON with an OpenAPI page at /docs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NoReturn

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from streamhouse.core.errors import (
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from streamhouse.core.model.lake.facts import SERVICE_ID_PROPERTY
from streamhouse.core.model.table import TablePath
from streamhouse.core.secret_sources import without_secrets
from streamhouse.storage_service.engine.backup import STAGING, clear_staging, stage_running
from streamhouse.storage_service.server.caller import Level, database_scope
from streamhouse.storage_service.server.control._adoption_route import adoption_routes
from streamhouse.storage_service.server.control._api_page import api_page_routes
from streamhouse.storage_service.server.control._consumer_routes import consumer_routes
from streamhouse.storage_service.server.control._move_routes import move_routes
from streamhouse.storage_service.server.control._request_bodies import CreateDatabase, TakeBackup
from streamhouse.storage_service.server.control._table_routes import (
    rejected_routes,
    state_routes,
    table_routes,
    time_routes,
)
from streamhouse.storage_service.server.control._tiering_routes import (
    lake_pin_routes,
    tiering_routes,
)
from streamhouse.storage_service.server.control._transaction_routes import transaction_routes
from streamhouse.storage_service.server.control._whole_service import (
    shards_of_all,
    status_of_all,
)
from streamhouse.storage_service.server.control.control_routes import ControlRoutes
from streamhouse.storage_service.server.http.http_exchange import exchange_of
from streamhouse.storage_service.server.routes import Route
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.server.status._status_page import status_page

__all__ = ["build_control_plane"]


def build_control_plane(
    service: Service,
    rows: Sequence[Route],
    of_doors: Iterable[Callable[[ControlRoutes], None]] = (),
) -> FastAPI:
    """Return the FastAPI application of `service`; `of_doors` bind the doors' functions."""
    app = FastAPI(
        title="Streamhouse storage service",
        description="Control routes. Data routes speak Arrow and text: see docs/http_api.md.",
        redirect_slashes=False,
        # FastAPI's pages load their scripts from the internet.
        docs_url=None,
        redoc_url=None,
    )
    api_page_routes(app)
    routes = ControlRoutes(app, rows)
    _service_routes(routes, service)
    _database_routes(routes, service)
    table_routes(routes, service)
    rejected_routes(routes, service)
    adoption_routes(routes, service)
    move_routes(routes, service)
    state_routes(routes, service)
    time_routes(routes, service)
    lake_pin_routes(routes, service)
    consumer_routes(routes, service)
    transaction_routes(routes, service)
    tiering_routes(routes, service)
    _backup_routes(routes, service)
    for bind in of_doors:
        bind(routes)
    routes.check_complete()
    for kind in (RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _raise_service_error)
    return app


def _service_routes(routes: ControlRoutes, service: Service) -> None:

    @routes.answers("The status page, for people; needs no token.")
    async def page() -> Response:
        return status_page()

    @routes.answers("The data of the status page: tables, rates, lags, workers.")
    async def status(
        request: Request,
        detail: Annotated[Literal["full", "brief"], Query(description="of each table")] = "full",
        table: Annotated[str | None, Query(description="this table alone")] = None,
    ) -> Response:
        path = None if table is None else TablePath.parse(table)
        exchange = exchange_of(request)
        text = await status_of_all(service, exchange, is_brief=detail == "brief", table=path)
        return Response(text, media_type="application/json")

    @routes.answers("The shards of the service, with owner, load and journal.")
    async def list_shards(request: Request) -> dict[str, Any]:
        return {"shards": await shards_of_all(service, exchange_of(request))}

    @routes.answers("The shards' owners, as Prometheus' http_sd_configs takes them.")
    async def shard_targets() -> list[dict[str, Any]]:
        states = [] if service.shards is None else await service.shards.states()
        return [target for state in states if (target := state.target()) is not None]

    @routes.answers("How to open the Iceberg catalog.")
    async def lake_catalog(request: Request) -> dict[str, Any]:
        caller = exchange_of(request).caller
        if not caller.has_tables():
            raise ForbiddenError(f"token '{caller.name}' has no grant on any table")
        catalog = service.config.offered_catalog()
        shown = catalog.properties
        if not caller.may_read_secrets():
            shown = without_secrets(shown)
        # Tiering marks lake tables with the service id, to recognise tables of other services.
        identity = {SERVICE_ID_PROPERTY: service.manager.service_id}
        return replace(catalog, properties={**shown, **identity}).to_json()


def _database_routes(routes: ControlRoutes, service: Service) -> None:
    manager = service.manager

    @routes.answers("The names of all databases.")
    async def list_databases(request: Request) -> dict[str, list[str]]:
        sees = exchange_of(request).caller.sees_database
        names = manager.databases()
        if service.shards is not None:
            names = await service.shards.databases()
        return {"databases": [name for name in names if sees(name)]}

    @routes.answers("Create a database.", status_code=201)
    async def create_database(request: Request, body: CreateDatabase) -> dict[str, str]:
        service.access.require(exchange_of(request), Level.ADMIN, database_scope(body.name))
        await manager.create_database(body.name)
        return {"name": body.name}

    @routes.answers("Drop an empty database.", status_code=204)
    async def drop_database(name: str) -> None:
        await manager.drop_database(name)


def _backup_routes(routes: ControlRoutes, service: Service) -> None:
    """Make the routes at `/v1/admin/backup`."""
    manager = service.manager

    @routes.answers("Stage a backup in the data directory.", status_code=201)
    async def stage_backup(body: TakeBackup) -> dict[str, Any]:
        if body.with_lake and service.config.catalog_properties:
            raise UnsupportedError(
                "the lake's catalog is not the service's own: back it up where it is, after this"
            )
        # The lock keeps out changes of tables and segments until all files have a second link.
        async with manager.runtime.changing_files:
            if service.moves is not None and service.moves.moves.is_any_under_way:
                raise UnavailableError("a table is being moved between shards; try again later")
            tables = list(manager.open_tables())
            damaged = manager.damaged_tables()
            staged = await stage_running(
                manager.directory,
                tables,
                damaged=[table.table_id for table in damaged],
                with_lake=body.with_lake,
                runtime=manager.runtime,
            )
        return {
            "staged": STAGING,
            "service_id": manager.service_id,
            "shard": None if service.shards is None else service.shards.own,
            "tables": {
                str(table.path): {
                    "table_id": table.info.table_id,
                    "buckets": staged[table.info.table_id],
                }
                for table in tables
            },
            "damaged_tables": [table.to_json() for table in damaged],
        }

    @routes.answers("Remove the staged backup.", status_code=204)
    async def discard_backup() -> None:
        await manager.runtime.run(clear_staging, manager.directory)


async def _raise_service_error(request: Request, error: Exception) -> NoReturn:
    """Raise FastAPI's error as a `StreamhouseError`, which `_app.py` answers in the common form."""
    path = request.scope["path"][:200]
    if isinstance(error, RequestValidationError):
        raise InvalidRequestError(f"{path}: {_sentence(error)}")
    if not isinstance(error, HTTPException) or error.status_code >= 500:
        raise error
    if error.status_code == 404:
        raise NotFoundError(f"there is no route {path}; /docs lists them")
    raise InvalidRequestError(f"{path}: {error.detail}")


def _sentence(error: RequestValidationError) -> str:
    """Return the first mistake as `body.tables: Input should be ...`."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}"
