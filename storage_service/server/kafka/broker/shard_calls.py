"""What one shard asks another for a Kafka client: over HTTP, in the caller's name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Protocol

from streamhouse.storage_service.errors import UnavailableError, error_for_code
from streamhouse.storage_service.model.table import TablePath
from streamhouse.storage_service.server.caller import Caller
from streamhouse.storage_service.server.peers import HANDED_ON, PeerRequest
from streamhouse.storage_service.server.service import Service

__all__ = ["Asking", "ask_shard", "elsewhere"]

_TIMEOUT_S: Final = 30.0


class Asking(Protocol):
    """For whom a shard is asked: a request of a Kafka client."""

    service: Service
    caller: Caller

    def peer_headers(self) -> Mapping[str, str]:
        """Return the headers that show the caller's token."""


async def elsewhere(exchange: Asking, path: TablePath) -> str | None:
    """Return where another shard answers that has a table; None if none has."""
    shards = exchange.service.shards
    if shards is None or exchange.service.manager.has_table(path):
        return None
    return await shards.endpoint_of(path)


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
