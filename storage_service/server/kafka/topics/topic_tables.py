"""The table of a topic that a client names: found, allowed, and in whichever shard it is."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from typing import Any, Final

from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.errors import (
    InvalidNameError,
    StreamhouseError,
    TableNotFoundError,
)
from streamhouse.storage_service.kafka.topics import is_same_topic, table_path_of, topic_name_of
from streamhouse.storage_service.model.table import TableInfo, TablePath
from streamhouse.storage_service.server.caller import Level
from streamhouse.storage_service.server.http.http_exchange import short
from streamhouse.storage_service.server.kafka.broker.shard_calls import ask_shard
from streamhouse.storage_service.server.kafka.error_codes import RefusedError, error_code_of
from streamhouse.storage_service.server.kafka.exchange import KafkaExchange

__all__ = [
    "check_topic",
    "refusal_of",
    "table_there",
    "topic_id",
    "topic_path",
    "topic_table",
]

_NAME_SHOWN: Final = 260


def topic_path(exchange: KafkaExchange, topic: str, level: Level) -> TablePath:
    """Return where the table of a topic is, for who may do so much with it.

    Raises `InvalidNameError` for what is no topic, and `ForbiddenError`, whether it exists or not.
    """
    path = table_path_of(topic)
    exchange.path = f"{exchange.api.name} {topic[:_NAME_SHOWN]}"
    exchange.service.access.require(exchange, level, str(path))
    return path


def topic_table(exchange: KafkaExchange, topic: str, level: Level) -> OpenTable:
    """Return the table of a topic, as `topic_path`; raises as `Service.readable`, too.

    Also `InvalidNameError` if the table is another topic's.
    """
    path = topic_path(exchange, topic, level)
    manager = exchange.service.manager
    if not manager.has_table(path) and path not in manager.away:
        # The manager looks for names like it, which is much for each of thousands in a request.
        raise TableNotFoundError(f"topic '{topic}': table '{path}' does not exist")
    table = exchange.service.readable(str(path))
    check_topic(topic, table.path, table.info.descriptor.properties)
    return table


async def table_there(
    exchange: KafkaExchange, topic: str, path: TablePath, endpoint: str
) -> TableInfo:
    """Return the table of a topic as the shard that has it tells; raises as `topic_table`."""
    info = TableInfo.from_json(await ask_shard(exchange, endpoint, "GET", f"/v1/tables/{path}"))
    check_topic(topic, path, info.descriptor.properties)
    return info


def check_topic(topic: str, path: TablePath, properties: Mapping[str, str]) -> None:
    """Raise `InvalidNameError` if the table to which a topic's name leads is another topic's."""
    if not is_same_topic(topic, path, properties):
        raise InvalidNameError(
            f"topic '{topic}' would be table '{path}', which is that of topic"
            f" '{topic_name_of(path, properties)}': use that name, or another one"
        )


def topic_id(cluster_id: str, table_id: int) -> uuid.UUID:
    """Return an id that a topic made anew under its name does not have."""
    digest = hashlib.sha256(f"{cluster_id}/{table_id}".encode()).digest()
    return uuid.UUID(bytes=digest[:16], version=4)


def refusal_of(exchange: KafkaExchange, error: StreamhouseError | RefusedError) -> dict[str, Any]:
    """Return an error as the fields of one topic's answer; counts it."""
    if isinstance(error, RefusedError):
        code = error.error_code
    else:
        code = error_code_of(error)
        exchange.report(error)
    exchange.note(code)
    return {"error_code": code, "error_message": short(error.message)}
