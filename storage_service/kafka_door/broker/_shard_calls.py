"""Requests from one shard to another for a Kafka client: over HTTP, in the caller's name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final, Protocol

from streamhouse.core.errors import UnavailableError, error_for_code
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.server.caller import Caller
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.server.shards.peers import HANDED_ON, PeerRequest

__all__ = ["ShardCaller", "TableLocations", "ask_shard", "remote_endpoint"]

_TIMEOUT_S: Final = 30.0
_LOOKUPS_MAX: Final = 32


class ShardCaller(Protocol):
    """A client's request, in whose name another shard is called."""

    service: Service
    caller: Caller
    table_locations: TableLocations

    def peer_headers(self) -> Mapping[str, str]:
        """Return the headers that carry the caller's token."""


class TableLocations:
    """The locations of a request's tables. Event loop only.

    A request may name thousands of tables, and each lookup reads the store. Therefore only the
    first names are looked up singly. For further names all tables are listed once, and a name
    outside the list does not exist.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lookup_count = 0
        self._fresh_count = 0
        self._names: asyncio.Future[set[TablePath]] | None = None
        self._databases: asyncio.Future[list[str]] | None = None
        self._created = set[TablePath]()

    async def endpoint_of(self, path: TablePath) -> str | None:
        """Return the endpoint of the remote shard with a table; None if no such shard exists.

        Raises `StreamhouseError` if the location is unknown.
        """
        shards = self._service.shards
        if shards is None or self._service.manager.has_table(path):
            return None
        if self._lookup_count >= _LOOKUPS_MAX and path not in self._created:
            if self._names is None:
                self._names = asyncio.ensure_future(shards.names())
            # A failed listing is not repeated: all names of the request get its error.
            if path not in await asyncio.shield(self._names):
                return None
        self._lookup_count += 1
        return await shards.endpoint_of(path)

    async def databases(self) -> list[str]:
        """Return all databases, as of the request's first call.

        Raises `StreamhouseError` if the databases are unknown.
        """
        shards = self._service.shards
        if shards is None:
            return self._service.manager.databases()
        if self._databases is None:
            self._databases = asyncio.ensure_future(shards.databases())
        return await asyncio.shield(self._databases)

    def note_created(self, path: TablePath) -> None:
        """Record a new table of this request, which an earlier listing lacks."""
        self._created.add(path)

    def may_ask_fresh(self) -> bool:
        """Return whether other shards may be asked without the cache; limited for each request."""
        self._fresh_count += 1
        return self._fresh_count <= _LOOKUPS_MAX


async def remote_endpoint(exchange: ShardCaller, path: TablePath) -> str | None:
    """Return the endpoint of the remote shard with a table; raises as `endpoint_of`."""
    return await exchange.table_locations.endpoint_of(path)


async def ask_shard(
    exchange: ShardCaller,
    endpoint: str,
    method: str,
    target: str,
    *,
    body: bytes = b"",
    timeout_s: float = _TIMEOUT_S,
) -> Any:
    """Return another shard's JSON answer to the caller; raises the error of the answer."""
    assert exchange.service.shards is not None
    headers = {
        **exchange.peer_headers(),
        HANDED_ON.decode(): "1",
        "content-type": "application/json",
    }
    request = PeerRequest(
        method=method, target=target, headers=headers, body=body, timeout_s=timeout_s
    )
    answer = await exchange.service.shards.peers.ask(endpoint, request)
    try:
        value: Any = json.loads(answer.body) if answer.body else None
        if answer.status < 300:
            return value
        code, message = value["error"]["code"], value["error"]["message"]
    except (ValueError, KeyError, TypeError) as error:
        raise UnavailableError(
            f"the shard at {endpoint} answers {answer.status} without a JSON error"
        ) from error
    raise error_for_code(code, message)
