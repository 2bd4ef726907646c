"""The control route that makes a lake table the history of a new table, as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from streamhouse.storage_service.errors import (
    DatabaseNotFoundError,
    TableExistsError,
    TableNotFoundError,
)
from streamhouse.storage_service.model.table import TablePath
from streamhouse.storage_service.server.iceberg_route import ServiceTables
from streamhouse.storage_service.server.request_bodies import AdoptTable, TableName
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.tablet.clock import clock_us
from streamhouse.storage_service.tablet.open_table import OpenTable
from streamhouse.storage_service.tablet.table_adoption import Adoptable

if TYPE_CHECKING:
    from streamhouse.storage_service.rest_catalog.open_catalog import OpenCatalog

__all__ = ["adoption_routes"]


def adoption_routes(service: Service) -> APIRouter:
    """Return the route `/v1/tables/{path}/adopt`."""
    routes = APIRouter(prefix="/v1/tables/{path}")

    @routes.post("/adopt", summary="Go on with a lake table that a Streamhouse service made.")
    async def adopt(path: TableName, body: AdoptTable) -> JSONResponse:
        parsed = TablePath.parse(path)
        there = _table_at(service, parsed)
        if there is not None:
            return _answer(there, status=200)
        search = _Search(service, parsed, is_forced=body.force)
        try:
            table = await service.manager.adopt_table(search.run)
        finally:
            await service.run_blocking(search.close)
        return _answer(table, status=201)

    return routes


def _table_at(service: Service, path: TablePath) -> OpenTable | None:
    """Return the table if it was adopted already; raises `TableExistsError` if it is another."""
    try:
        table = service.manager.table(path)
    except (DatabaseNotFoundError, TableNotFoundError):
        return None
    if not table.info.adopted_from:
        raise TableExistsError(
            f"table '{path}' exists and was not adopted: drop it to go on with what the lake has"
            " under this name, without the rows that only its log has"
        )
    return table


class _Search:
    """Looks for the lake tables of one path. Made on the event loop, run on another thread."""

    def __init__(self, service: Service, path: TablePath, *, is_forced: bool) -> None:
        self._tables = ServiceTables(service)
        self._described = service.config.lake_catalog()
        self._path = path
        self._is_forced = is_forced
        self._catalog: OpenCatalog | None = None

    def run(self) -> Adoptable:
        """Return what is to be adopted; raises as `find_adoptable`."""
        # Not at the top: a service that adopts nothing does not load the lake library.
        from streamhouse.storage_service.rest_catalog.adoptable_lake import find_adoptable
        from streamhouse.storage_service.rest_catalog.open_catalog import OpenCatalog

        self._catalog = OpenCatalog(self._described, service_id=self._tables.service_id)
        return find_adoptable(
            self._catalog.get(),
            self._path,
            self._tables,
            is_forced=self._is_forced,
            now_ms=clock_us() // 1000,
        )

    def close(self) -> None:
        """Close the catalog, if it was opened."""
        if self._catalog is not None:
            self._catalog.close()


def _answer(table: OpenTable, *, status: int) -> JSONResponse:
    return JSONResponse(table.info.to_json(), status_code=status)
