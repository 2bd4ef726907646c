"""The table of a topic that a client names: found, allowed, and in whichever shard it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from streamhouse.core.errors import (
    InvalidNameError,
    StreamhouseError,
    TableNotFoundError,
)
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.kafka.topics import (
    first_made,
    is_same_topic,
    table_paths_of,
    topic_name_of,
)
from streamhouse.storage_service.kafka_door._error_codes import RefusedError, error_code_of
from streamhouse.storage_service.kafka_door._exchange import KafkaExchange
from streamhouse.storage_service.kafka_door._topic_places import (
    local_path,
    local_tables,
    path_of_new_topic,
)
from streamhouse.storage_service.kafka_door.broker._shard_calls import ask_shard, remote_endpoint
from streamhouse.storage_service.server.caller import Level
from streamhouse.storage_service.server.http.http_exchange import short

__all__ = [
    "check_topic",
    "path_among_shards",
    "refusal_of",
    "remote_table",
    "table_at",
    "topic_path",
    "topic_table",
]

_NAME_SHOWN: Final = 260


def topic_path(exchange: KafkaExchange, topic: str, level: Level) -> TablePath:
    """Return which table a topic is as far as is known here, for who may do so much with it.

    Raises `InvalidNameError` for what is no topic, and `ForbiddenError`, whether it exists or not.
    """
    manager = exchange.service.manager
    path = local_path(manager, topic)
    if exchange.service.shards is not None and not manager.has_table(path):
        # Which databases other shards have made is not known here. Who may use one of the tables is
        # told that none is here, and asks where it is; nobody asks again who is told of grants.
        may = exchange.caller.may
        path = next((p for p in table_paths_of(topic) if may(level, str(p))), path)
    return _allowed(exchange, topic, path, level)


async def path_among_shards(exchange: KafkaExchange, topic: str, level: Level) -> TablePath:
    """Return which table a topic is, whichever shard has it; raises as `topic_path`.

    Also `StreamhouseError` if that is not known now.
    """
    manager, paths = exchange.service.manager, table_paths_of(topic)
    is_told = any(exchange.caller.may(level, str(path)) for path in paths)
    if len(paths) == 1 or exchange.service.shards is None or not is_told:
        return topic_path(exchange, topic, level)
    known, others = local_tables(manager, topic), exchange.broker.others
    for is_fresh in (False, True):
        if is_fresh and not exchange.table_locations.may_ask_anew():
            break
        for other in await others.all(exchange, is_fresh=is_fresh):
            known += [other.topics[path].table for path in paths if path in other.topics]
        found = first_made(topic, known)
        if found is not None:
            return _allowed(exchange, topic, found.path, level)
        # What is known of the others is seconds old; the directory has them as they are.
        if not [path for path in paths if await remote_endpoint(exchange, path) is not None]:
            break
    databases = await exchange.table_locations.databases()
    return _allowed(exchange, topic, path_of_new_topic(topic, databases), level)


def _allowed(exchange: KafkaExchange, topic: str, path: TablePath, level: Level) -> TablePath:
    exchange.path = f"{exchange.api.name} {topic[:_NAME_SHOWN]}"
    exchange.service.access.require(exchange, level, str(path))
    return path


def topic_table(exchange: KafkaExchange, topic: str, level: Level) -> OpenTable:
    """Return the table of a topic, as `topic_path`; raises as `Service.readable`, too.

    Also `InvalidNameError` if the table is another topic's.
    """
    return table_at(exchange, topic, topic_path(exchange, topic, level))


def table_at(exchange: KafkaExchange, topic: str, path: TablePath) -> OpenTable:
    """Return the table of a topic, which is known to be at `path`; raises as `topic_table`."""
    manager = exchange.service.manager
    if not manager.has_table(path) and path not in manager.away:
        # The manager looks for names like it, which is much for each of thousands in a request.
        raise TableNotFoundError(f"topic '{topic}': table '{path}' does not exist")
    table = exchange.service.readable(str(path))
    check_topic(topic, table.path, table.info.descriptor.properties)
    return table


async def remote_table(
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


def refusal_of(exchange: KafkaExchange, error: StreamhouseError | RefusedError) -> dict[str, Any]:
    """Return an error as the fields of one topic's answer; counts it."""
    if isinstance(error, RefusedError):
        code = error.error_code
    else:
        code = error_code_of(error)
        exchange.report(error)
    exchange.note(code)
    return {"error_code": code, "error_message": short(error.message)}
