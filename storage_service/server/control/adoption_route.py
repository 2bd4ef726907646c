"""The control route that makes a lake table the history of a new table, as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi.responses import JSONResponse

from streamhouse.storage_service.engine.directory.data_directory import GIVEN_UP_SUFFIX
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.runtime import clock_us
from streamhouse.storage_service.engine.tiering_desk.lake_history import divergence_of
from streamhouse.storage_service.errors import (
    DatabaseNotFoundError,
    HistoryDivergedError,
    InvalidRequestError,
    TableExistsError,
    TableNotFoundError,
)
from streamhouse.storage_service.model.lake.coverage import LakeDivergence
from streamhouse.storage_service.model.table import TablePath
from streamhouse.storage_service.server.control.control_routes import ControlRoutes
from streamhouse.storage_service.server.control.iceberg_route import ServiceTables
from streamhouse.storage_service.server.control.request_bodies import AdoptTable, TableName
from streamhouse.storage_service.server.service import Service

if TYPE_CHECKING:
    from streamhouse.storage_service.lake.catalogs.open_catalog import OpenCatalog
    from streamhouse.storage_service.lake.guards.adoptable_lake import AdoptableLake

__all__ = ["adoption_routes"]


def adoption_routes(routes: ControlRoutes, service: Service) -> None:
    """Make the route `/v1/tables/{path}/adopt`."""

    @routes.answers("Go on with a lake table that a Streamhouse service made.")
    async def adopt(path: TableName, body: AdoptTable) -> JSONResponse:
        parsed = TablePath.parse(path)
        if body.replace:
            return await _replace(service, service.table(path), body)
        if body.dry_run:
            raise InvalidRequestError("'dry_run' is for 'replace': nothing else is lost")
        there = _table_at(service, parsed)
        if there is not None:
            return _answer(there, status=200)
        search = _Search(service, parsed, is_forced=body.force)
        try:
            table = await service.manager.adopt_table(search.run)
        finally:
            await service.run_blocking(search.close)
        return _answer(table, status=201)


async def _replace(service: Service, table: OpenTable, body: AdoptTable) -> JSONResponse:
    """Adopt the lake table in place of a table with another history, or tell what that means."""
    is_forced = body.force or body.dry_run
    search = _Search(service, table.path, is_forced=is_forced, replaces=table)
    try:
        if body.dry_run:
            return JSONResponse((await service.run_blocking(search.divergence)).to_json())
        found = await service.run_blocking(search.run)
        is_its_own = found.owner_id == table.info.table_id
        if is_its_own and await service.manager.tiering.reconcile(table, found.covered):
            return _answer(table, status=200)
        return _answer(await service.manager.replace_by_lake(table, lambda: found), status=201)
    finally:
        await service.run_blocking(search.close)


def _table_at(service: Service, path: TablePath) -> OpenTable | None:
    """Return the table if it was adopted already; raises `TableExistsError` if it is another."""
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


class _Search:
    """Looks for the lake tables of one path. Made on the event loop, run on another thread."""

    def __init__(
        self,
        service: Service,
        path: TablePath,
        *,
        is_forced: bool,
        replaces: OpenTable | None = None,
    ) -> None:
        self._tables = ServiceTables(service)
        self._described = service.config.lake_catalog()
        self._data_directory = str(service.config.data_dir.absolute())
        self._path = path
        self._is_forced = is_forced
        self._replaces = replaces
        self._catalog: OpenCatalog | None = None

    def run(self) -> AdoptableLake:
        """Return what is to be adopted; raises as `find_adoptable`."""
        # Not at the top: a service that adopts nothing does not load the lake library.
        from streamhouse.storage_service.lake.catalogs.open_catalog import OpenCatalog
        from streamhouse.storage_service.lake.guards.adoptable_lake import find_adoptable

        self._catalog = OpenCatalog(
            self._described,
            service_id=self._tables.service_id,
            data_directory=self._data_directory,
        )
        return find_adoptable(
            self._catalog.get(),
            self._path,
            self._tables,
            is_forced=self._is_forced,
            now_ms=clock_us() // 1000,
            replaces=None if self._replaces is None else self._replaces.info.table_id,
        )

    def divergence(self) -> LakeDivergence:
        """Return how the lake table's history differs from that of the table to be replaced."""
        table = self._replaces
        assert table is not None
        found = self.run()
        return LakeDivergence(
            table=str(table.path),
            why=table.lake.diverged or f"the lake of table '{table.path}' belongs to another table",
            set_aside=f"tables/{table.info.table_id}{GIVEN_UP_SUFFIX}",
            buckets=divergence_of(table, found.histories_of(table.info.table_id), found.covered),
        )

    def close(self) -> None:
        """Close the catalog, if it was opened."""
        if self._catalog is not None:
            self._catalog.close()


def _answer(table: OpenTable, *, status: int) -> JSONResponse:
    return JSONResponse(table.info.to_json(), status_code=status)
