"""Catalog requests about a table of another shard: the shard of the table answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamhouse.core.errors import (
    ForbiddenError,
    InvalidNameError,
    StreamhouseError,
    UnavailableError,
)
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.rest_catalog.rest_request import RestRequest
from streamhouse.storage_service.server.http.http_exchange import HttpExchange
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.server.shards.peers import HANDED_ON, PeerAnswer, PeerRequest

__all__ = ["catalog_tables", "handed_on"]


async def handed_on(
    service: Service, exchange: HttpExchange, request: RestRequest
) -> PeerAnswer | None:
    """Return the answer of the shard with the request's table; None if this shard answers.

    All shards share the catalog, and any shard answers reads of the catalog. The shard of a table
    checks changes of the lake table, and makes live cuts of the table.
    Raises `ForbiddenError` if the request changes tables of several shards at once.
    """
    shards = service.shards
    # Any shard answers reads of the catalog, and refuses changes of live tables.
    if shards is None or request.is_read != request.is_live:
        return None
    endpoints = set()
    for path in catalog_tables(request):
        is_here = service.manager.has_table(path)
        endpoints.add(None if is_here else await shards.endpoint_of(path))
    if len(endpoints) > 1:
        raise ForbiddenError("one commit cannot change lake tables of several shards")
    endpoint = next(iter(endpoints), None)
    if endpoint is None:
        return None
    if exchange.header(HANDED_ON) is not None:
        # The table moved meanwhile, or the client set the header to avoid the check by the shard.
        raise UnavailableError("the table is in another shard by now; try again")
    query = exchange.scope["query_string"].decode("latin-1")
    target = f"{exchange.raw_path}?{query}" if query else exchange.raw_path
    return await shards.peers.ask(
        endpoint,
        PeerRequest.of(exchange.method, target, exchange.scope["headers"], body=request.body),
    )


def catalog_tables(request: RestRequest) -> list[TablePath]:
    """Return the tables of the lake tables that a catalog request names, without duplicates.

    The catalog itself answers malformed requests and requests without tables.
    """
    names: list[Any] = []
    match request.method, request.segments:
        case _, ("namespaces", namespace, "tables", table, *_):
            names = [(namespace, table)]
        case "POST", ("namespaces", namespace, "tables" | "register"):
            names = [(namespace, _json(request).get("name"))]
        case "POST", ("tables", "rename"):
            names = [_identifier(_json(request).get("source"))]
        case "POST", ("transactions", "commit"):
            changes = _json(request).get("table-changes")
            for change in changes if isinstance(changes, list) else ():
                names.append(_identifier(_member(change, "identifier")))
    return list(dict.fromkeys(path for name in names if (path := _path(*name)) is not None))


def _json(request: RestRequest) -> Mapping[str, Any]:
    try:
        return request.json()
    except StreamhouseError:
        return {}


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _identifier(value: Any) -> tuple[Any, Any]:
    namespace = _member(value, "namespace")
    is_one = isinstance(namespace, list) and len(namespace) == 1
    return (namespace[0] if is_one else None), _member(value, "name")


def _path(namespace: Any, name: Any) -> TablePath | None:
    """Return the table of a lake table; side tables are named `name$changelog`."""
    try:
        return TablePath(namespace, name.partition("$")[0])
    except (AttributeError, TypeError, InvalidNameError):
        return None
