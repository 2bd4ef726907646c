"""The control route that adopts a lake table, unchanged, as the history of a new table."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from fastapi.responses import JSONResponse

from streamhouse.core.errors import (
    DatabaseNotFoundError,
    HistoryDivergedError,
    InvalidRequestError,
    TableExistsError,
    TableNotFoundError,
)
from streamhouse.core.model.lake.coverage import LakeDivergence
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.directory.data_directory import GIVEN_UP_SUFFIX
from streamhouse.storage_service.directory.runtime import clock_us
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.tiering_desk.history_check import divergence_of
from streamhouse.storage_service.server.control._request_bodies import AdoptTable
from streamhouse.storage_service.server.control.control_routes import ControlRoutes, TableName
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.server.service_tables import ServiceTables

if TYPE_CHECKING:
    from streamhouse.lake.guards.adoptable_lake import AdoptableLake

__all__ = ["adoption_routes"]


def adoption_routes(routes: ControlRoutes, service: Service) -> None:
    """Make the route `/v1/tables/{path}/adopt`."""

    @routes.answers("Go on with a lake table that a Streamhouse service made.")
    async def adopt(path: TableName, body: AdoptTable) -> JSONResponse:
        parsed = TablePath.parse(path)
        if body.replace:
            return await _replace(service, service.table(path), body)
        if service.shards is not None and (not_owner := await service.shards.elsewhere(parsed)):
            raise not_owner
        if body.dry_run:
            raise InvalidRequestError("'dry_run' is for 'replace': nothing else is lost")
        adopted = _table_at(service, parsed)
        if adopted is not None:
            return _answer(adopted, status=200)
        async with _search(service, parsed, is_forced=body.force) as find:
            return _answer(await service.manager.adopt_table(find), status=201)


async def _replace(service: Service, table: OpenTable, body: AdoptTable) -> JSONResponse:
    """Adopt the lake table in place of a table with another history, or report the difference."""
    is_forced = body.force or body.dry_run
    async with _search(service, table.path, is_forced=is_forced, replaces=table) as find:
        lake = await service.run_blocking(find)
        if body.dry_run:
            divergence = await service.run_blocking(_divergence, table, lake)
            return JSONResponse(divergence.to_json())
        is_same_table = lake.owner_id == table.info.table_id
        if is_same_table and await service.manager.tiering.reconcile(table, lake.covered):
            return _answer(table, status=200)
        return _answer(await service.manager.replace_by_lake(table, lambda: lake), status=201)


def _table_at(service: Service, path: TablePath) -> OpenTable | None:
    """Return an already adopted table; raises `TableExistsError` for a table with other origin."""
    try:
        table = service.manager.table(path)
    except (DatabaseNotFoundError, TableNotFoundError):
        return None
    if table.lake.diverged:
        raise HistoryDivergedError(table.lake.diverged)
    if not table.info.adopted_from:
        raise TableExistsError(
            f"table '{path}' exists and was not adopted: drop it to go on with what the lake has"
            " under this name, without the rows that only its log has"
        )
    return table


@contextlib.asynccontextmanager
async def _search(
    service: Service, path: TablePath, *, is_forced: bool, replaces: OpenTable | None = None
) -> AsyncIterator[Callable[[], AdoptableLake]]:
    """Yield a blocking function that finds the lake tables to adopt, see `find_adoptable`."""
    elsewhere = None if service.shards is None else await service.shards.ids_elsewhere()
    config, tables = service.config, ServiceTables(service, elsewhere=elsewhere)
    opened = contextlib.ExitStack()

    def find() -> AdoptableLake:
        from streamhouse.lake.catalogs.open_catalog import OpenCatalog  # noqa: PLC0415 - most services adopt no lake
        from streamhouse.lake.guards.adoptable_lake import find_adoptable  # noqa: PLC0415 - most services adopt no lake

        catalog = OpenCatalog(
            config.lake_catalog(),
            service_id=tables.service_id,
            data_directory=str(config.data_dir.absolute()),
        )
        opened.callback(catalog.close)
        return find_adoptable(
            catalog.get(),
            path,
            tables,
            is_forced=is_forced,
            now_ms=clock_us() // 1000,
            replaces=None if replaces is None else replaces.info.table_id,
        )

    try:
        yield find
    finally:
        await service.run_blocking(opened.close)


def _divergence(table: OpenTable, lake: AdoptableLake) -> LakeDivergence:
    """Return the differences between the histories of the lake table and the replaced table."""
    return LakeDivergence(
        table=str(table.path),
        why=table.lake.diverged or f"the lake of table '{table.path}' belongs to another table",
        set_aside=f"tables/{table.info.table_id}{GIVEN_UP_SUFFIX}",
        buckets=divergence_of(table, lake.histories_of(table.info.table_id), lake.covered),
    )


def _answer(table: OpenTable, *, status: int) -> JSONResponse:
    return JSONResponse(table.info.to_json(), status_code=status)
