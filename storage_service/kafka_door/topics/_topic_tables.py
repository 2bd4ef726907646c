"""The table of a topic that a client names, on any shard, with a check of the caller's grants."""

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
    first_created,
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
    """Return the table of a topic, as known here, if the caller has the right `level`.

    Raises `InvalidNameError` for an invalid topic name, and `ForbiddenError`, whether the table
    exists or not.
    """
    manager = exchange.service.manager
    path = local_path(manager, topic)
    if exchange.service.shards is not None and not manager.has_table(path):
        # The databases of other shards are unknown here. A caller with a grant on one of the tables
        # gets NotFoundError, and then asks the other shards; ForbiddenError would end the lookup.
        may = exchange.caller.may
        path = next((p for p in table_paths_of(topic) if may(level, str(p))), path)
    return _allowed(exchange, topic, path, level)


async def path_among_shards(exchange: KafkaExchange, topic: str, level: Level) -> TablePath:
    """Return the table of a topic on any shard; raises as `topic_path`.

    Also raises `StreamhouseError` if the location is unknown at the moment.
    """
    manager, paths = exchange.service.manager, table_paths_of(topic)
    has_grant = any(exchange.caller.may(level, str(path)) for path in paths)
    if len(paths) == 1 or exchange.service.shards is None or not has_grant:
        return topic_path(exchange, topic, level)
    candidates, others = local_tables(manager, topic), exchange.broker.others
    for is_fresh in (False, True):
        if is_fresh and not exchange.table_locations.may_ask_fresh():
            break
        for broker in await others.all(exchange, is_fresh=is_fresh):
            candidates += [broker.topics[path].table for path in paths if path in broker.topics]
        topic_table = first_created(topic, candidates)
        if topic_table is not None:
            return _allowed(exchange, topic, topic_table.path, level)
        # The cache is seconds old, but the directory is current.
        if not [path for path in paths if await remote_endpoint(exchange, path) is not None]:
            break
    databases = await exchange.table_locations.databases()
    return _allowed(exchange, topic, path_of_new_topic(topic, databases), level)


def _allowed(exchange: KafkaExchange, topic: str, path: TablePath, level: Level) -> TablePath:
    exchange.path = f"{exchange.api.name} {topic[:_NAME_SHOWN]}"
    exchange.service.access.require(exchange, level, str(path))
    return path


def topic_table(exchange: KafkaExchange, topic: str, level: Level) -> OpenTable:
    """Return the table of a topic, as `topic_path`; also raises as `Service.readable`.

    Raises `InvalidNameError` if the table belongs to another topic.
    """
    return table_at(exchange, topic, topic_path(exchange, topic, level))


def table_at(exchange: KafkaExchange, topic: str, path: TablePath) -> OpenTable:
    """Return the table of a topic at a known path; raises as `topic_table`."""
    manager = exchange.service.manager
    if not manager.has_table(path) and path not in manager.away:
        # The manager would search for similar names, which is slow for thousands of names in a
        # request.
        raise TableNotFoundError(f"topic '{topic}': table '{path}' does not exist")
    table = exchange.service.readable(str(path))
    check_topic(topic, table.path, table.info.descriptor.properties)
    return table


async def remote_table(
    exchange: KafkaExchange, topic: str, path: TablePath, endpoint: str
) -> TableInfo:
    """Return the metadata of a topic's table from another shard; raises as `topic_table`."""
    info = TableInfo.from_json(await ask_shard(exchange, endpoint, "GET", f"/v1/tables/{path}"))
    check_topic(topic, path, info.descriptor.properties)
    return info


def check_topic(topic: str, path: TablePath, properties: Mapping[str, str]) -> None:
    """Raise `InvalidNameError` if the table at `path` belongs to another topic."""
    if not is_same_topic(topic, path, properties):
        raise InvalidNameError(
            f"topic '{topic}' would be table '{path}', which is that of topic"
            f" '{topic_name_of(path, properties)}': use that name, or another one"
        )


def refusal_of(exchange: KafkaExchange, error: StreamhouseError | RefusedError) -> dict[str, Any]:
    """Return an error as the fields of one topic's answer, and count the error."""
    if isinstance(error, RefusedError):
        code = error.error_code
    else:
        code = error_code_of(error)
        exchange.report(error)
    exchange.note(code)
    return {"error_code": code, "error_message": short(error.message)}
