"""Requests of the warehouse `live`: the service's own tables, as of the request."""

from __future__ import annotations

from typing import Final

from streamhouse.core.errors import (
    DatabaseNotFoundError,
    StreamhouseError,
    TableNotFoundError,
)
from streamhouse.core.model.lake.facts import LakeRole
from streamhouse.core.model.table import TableInfo
from streamhouse.storage_service.catalog_door._shard_of_request import catalog_tables
from streamhouse.storage_service.live.live_cuts import LiveCuts
from streamhouse.storage_service.rest_catalog.rest_request import LivePart, RestRequest
from streamhouse.storage_service.server.http.http_exchange import HttpExchange
from streamhouse.storage_service.server.service import Service

__all__ = ["live_part"]

# What a path has after a table's name, for reads of the table.
_OF_TABLE: Final = ((), ("credentials",), ("plan",), ("tasks",))


async def live_part(
    service: Service, cuts: LiveCuts, exchange: HttpExchange, request: RestRequest
) -> LivePart:
    """Return the service's part of an answer; a live cut has every row acknowledged earlier.

    Raises as `LiveCuts.cut` and `Service.readable`.
    """
    match request.segments:
        case ("namespaces",) | ("namespaces", _):
            return LivePart(databases=await _databases(service))
        case ("namespaces", database, "tables"):
            return await _tables_of(service, database)
        case ("namespaces", _, "tables", name, *tail) if tuple(tail) in _OF_TABLE:
            return await _one_table(service, cuts, exchange, request, name)
    return LivePart()


async def _one_table(
    service: Service, cuts: LiveCuts, exchange: HttpExchange, request: RestRequest, name: str
) -> LivePart:
    for path in catalog_tables(request):
        try:
            info = service.readable(str(path)).info
        except (DatabaseNotFoundError, TableNotFoundError):
            # The catalog may have a table of this name that is none of the service.
            continue
        roles = _roles(info)
        if name in roles and request.method in ("GET", "POST"):
            return LivePart(table=await cuts.cut(exchange, path, roles[name]))
        return LivePart(tables=roles, owned=(path.table,))
    return LivePart()


async def _databases(service: Service) -> list[str]:
    if service.shards is not None:
        return await service.shards.databases()
    return service.manager.databases()


async def _tables_of(service: Service, database: str) -> LivePart:
    """Return the lake tables of a database; for another shard's tables, only the tables of rows."""
    if database not in await _databases(service):
        return LivePart()
    if service.shards is not None:
        paths = await service.shards.list_tables(database)
    else:
        paths = service.manager.list_tables(database)
    tables, owned = [path.table for path in paths], []
    for path in paths:
        try:
            tables.extend(_roles(service.readable(str(path)).info))
            owned.append(path.table)
        except StreamhouseError:
            # A damaged table, or another shard's: the catalog's side tables stay in the list.
            continue
    return LivePart(databases=[database], tables=tables, owned=owned)


def _roles(info: TableInfo) -> dict[str, LakeRole]:
    """Return the lake tables of a table by name."""
    properties = info.properties()
    roles = {
        LakeRole.ROWS: True,
        LakeRole.CHANGES: properties.datalake_changelog,
        LakeRole.BATCH: properties.has_batch_layout,
    }
    return {role.lake_name(info.path.table): role for role, is_kept in roles.items() if is_kept}
