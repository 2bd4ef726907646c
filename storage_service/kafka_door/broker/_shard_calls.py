"""What one shard asks another for a Kafka client: over HTTP, in the caller's name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final, Protocol

from streamhouse.core.errors import UnavailableError, error_for_code
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.server.caller import Caller
from streamhouse.storage_service.server.peers import HANDED_ON, PeerRequest
from streamhouse.storage_service.server.service import Service

__all__ = ["Asking", "TableLocations", "ask_shard", "remote_endpoint"]

_TIMEOUT_S: Final = 30.0
_ASKED_SINGLY_MAX: Final = 32


class Asking(Protocol):
    """For whom a shard is asked: a request of a Kafka client."""

    service: Service
    caller: Caller
    table_locations: TableLocations

    def peer_headers(self) -> Mapping[str, str]:
        """Return the headers that show the caller's token."""


class TableLocations:
    """In which shards the tables are that one request names. Event loop only.

    A request has room for thousands of names, and to look one up is a read of the store. So the
    first ones are looked up, then all names are listed, and what is in no list is nowhere.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._asked = 0
        self._asked_anew = 0
        self._names: asyncio.Future[set[TablePath]] | None = None
        self._databases: asyncio.Future[list[str]] | None = None
        self._made = set[TablePath]()

    async def endpoint_of(self, path: TablePath) -> str | None:
        """Return where another shard answers that has a table; None if none has.

        Raises `StreamhouseError` if that is not known.
        """
        shards = self._service.shards
        if shards is None or self._service.manager.has_table(path):
            return None
        if self._asked >= _ASKED_SINGLY_MAX and path not in self._made:
            if self._names is None:
                self._names = asyncio.ensure_future(shards.names())
            # A store that does not answer is asked once, too: all names have that error then.
            if path not in await asyncio.shield(self._names):
                return None
        self._asked += 1
        return await shards.endpoint_of(path)

    async def databases(self) -> list[str]:
        """Return all databases as they are at the first question of the request.

        Raises `StreamhouseError` if that is not known.
        """
        shards = self._service.shards
        if shards is None:
            return self._service.manager.databases()
        if self._databases is None:
            self._databases = asyncio.ensure_future(shards.databases())
        return await asyncio.shield(self._databases)

    def made(self, path: TablePath) -> None:
        """Say that this request has made a table, which is in no older list."""
        self._made.add(path)

    def may_ask_anew(self) -> bool:
        """Whether other shards may be asked at once what they have now: some times a request."""
        self._asked_anew += 1
        return self._asked_anew <= _ASKED_SINGLY_MAX


async def remote_endpoint(exchange: Asking, path: TablePath) -> str | None:
    """Return where another shard answers that has a table; raises as `Whereabouts.endpoint_of`."""
    return await exchange.table_locations.endpoint_of(path)


async def ask_shard(
    exchange: Asking,
    endpoint: str,
    method: str,
    target: str,
    *,
    body: bytes = b"",
    timeout_s: float = _TIMEOUT_S,
) -> Any:
    """Return the JSON that another shard answers to the caller; raises the error it answers."""
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
            f"the shard at {endpoint} answers {answer.status} and no JSON of ours"
        ) from error
    raise error_for_code(code, message)
