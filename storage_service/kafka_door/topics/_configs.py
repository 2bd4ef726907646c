"""The configuration of topics, and of this broker: described, and changed, as clients ask.

Which settings there are, and what they are to a table, is in `topic_settings.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.properties import TableProperties
from streamhouse.core.model.table import TableInfo
from streamhouse.storage_service.directory.table_registry import with_properties
from streamhouse.storage_service.kafka_door._error_codes import RefusedError
from streamhouse.storage_service.kafka_door._exchange import KafkaExchange
from streamhouse.storage_service.kafka_door.broker._shard_calls import ask_shard, remote_endpoint
from streamhouse.storage_service.kafka_door.topics._topic_settings import (
    LOG_TTL,
    RETENTION,
    check_settings,
    is_compacted_table,
    is_table_property,
    properties_of,
    settings_of,
)
from streamhouse.storage_service.kafka_door.topics._topic_tables import (
    path_among_shards,
    refusal_of,
    remote_table,
    table_at,
)
from streamhouse.storage_service.server.caller import Level
from streamhouse.storage_service.server.status.event_loop import in_slices

__all__ = [
    "answer_alter_configs",
    "answer_describe_configs",
    "answer_incremental_alter_configs",
    "check_count",
]

_TOPIC: Final = 2
_BROKER: Final = 4
_SOURCE_TOPIC: Final = 1
_SOURCE_DEFAULT: Final = 5
_SET, _DELETE = 0, 1
# Of one topic, in one request.
_SETTINGS_MAX: Final = 1_000
_OF_BROKER: Final[Mapping[str, str]] = {
    "default.replication.factor": "1",
    "delete.topic.enable": "true",
    "log.message.timestamp.type": "CreateTime",
    "min.insync.replicas": "1",
    "offsets.topic.replication.factor": "1",
}


def check_count(topic: str, count: int) -> None:
    """Raise `RefusedError` for more settings of a topic than are looked at."""
    if count > _SETTINGS_MAX:
        raise RefusedError(
            ErrorCode.invalid_request,
            f"topic '{topic[:260]}': {count} settings at once; at most {_SETTINGS_MAX}",
        )


async def answer_describe_configs(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Answer how topics, and this broker, are configured; each is answered once."""
    found = []
    asked_once = {(asked.resource_type, asked.resource_name): asked for asked in request.resources}
    async for asked in in_slices(asked_once.values()):
        named = {"resource_type": asked.resource_type, "resource_name": asked.resource_name}
        try:
            configs = await _described(exchange, asked)
            # Clients ask for all of them by none or by an empty list.
            if wanted := frozenset(asked.configuration_keys or ()):
                configs = [config for config in configs if config["name"] in wanted]
            found.append({**named, "configs": configs})
        except (StreamhouseError, RefusedError) as error:
            found.append({**named, **refusal_of(exchange, error)})
    return {"results": found}


async def _described(exchange: KafkaExchange, asked: Any) -> list[dict[str, Any]]:
    if asked.resource_type == _TOPIC:
        return _of_topic(exchange, await _info(exchange, asked.resource_name, Level.READ))
    if asked.resource_type == _BROKER and asked.resource_name == str(exchange.broker.node_id):
        config = exchange.service.config
        own = {
            "auto.create.topics.enable": str(config.kafka_auto_create).lower(),
            "num.partitions": str(config.kafka_partitions),
            "message.max.bytes": str(config.batch_bytes_max),
        }
        return [_config(name, value) for name, value in sorted({**_OF_BROKER, **own}.items())]
    raise RefusedError(
        ErrorCode.invalid_request,
        f"resource {asked.resource_type} '{asked.resource_name[:200]}' is neither a topic nor the"
        " broker that was asked",
    )


def _of_topic(exchange: KafkaExchange, info: TableInfo) -> list[dict[str, Any]]:
    properties = info.descriptor.properties
    so = settings_of(info, record_bytes_max=exchange.service.config.batch_bytes_max)
    shown = {name: _config(name, value) for name, value in so.items()}
    shown[RETENTION] = _config(
        RETENTION, so[RETENTION], is_own=LOG_TTL in properties, is_fixed=False
    )
    for name, value in properties.items():
        shown[name] = _config(name, value, is_own=True, is_fixed=False)
    return [shown[name] for name in sorted(shown)]


def _config(
    name: str, value: str, *, is_own: bool = False, is_fixed: bool = True
) -> dict[str, Any]:
    return {
        "name": name,
        "value": value,
        "read_only": is_fixed,
        "config_source": _SOURCE_TOPIC if is_own else _SOURCE_DEFAULT,
        "is_sensitive": False,
    }


async def answer_incremental_alter_configs(
    exchange: KafkaExchange, request: Any
) -> Mapping[str, Any]:
    """Set and remove settings of topics; each topic's all or none."""
    return await _altered(exchange, request, is_incremental=True)


async def answer_alter_configs(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Set settings of topics. Those that are not named stay: no client means to lose a format."""
    return await _altered(exchange, request, is_incremental=False)


async def _altered(
    exchange: KafkaExchange, request: Any, *, is_incremental: bool
) -> Mapping[str, Any]:
    found = []
    mentions = Counter((one.resource_type, one.resource_name) for one in request.resources)
    asked_once = {(one.resource_type, one.resource_name): one for one in request.resources}
    async for resource, asked in in_slices(asked_once.items()):
        named = {"resource_type": asked.resource_type, "resource_name": asked.resource_name}
        try:
            if mentions[resource] > 1:
                # As Kafka refuses it: nobody knows which one is meant.
                raise RefusedError(
                    ErrorCode.invalid_request,
                    f"resource '{asked.resource_name[:260]}' is named {mentions[resource]} times;"
                    " name it once, with all of its settings",
                )
            if asked.resource_type != _TOPIC:
                raise RefusedError(
                    ErrorCode.invalid_request,
                    "only topics are configured by clients; the service has its command line",
                )
            wanted, removals = _changes(asked, is_incremental=is_incremental)
            await _alter(exchange, asked.resource_name, wanted, removals, request.validate_only)
            found.append(named)
        except (StreamhouseError, RefusedError) as error:
            found.append({**named, **refusal_of(exchange, error)})
    return {"responses": found}


def _changes(asked: Any, *, is_incremental: bool) -> tuple[dict[str, str | None], list[str]]:
    """Return the settings that are set, and the table properties that are removed."""
    topic = asked.resource_name
    check_count(topic, len(asked.configs))
    wanted, removals = dict[str, str | None](), list[str]()
    for config in asked.configs:
        operation = config.config_operation if is_incremental else _SET
        if operation == _SET:
            wanted[config.name] = config.value
        elif operation == _DELETE:
            name = LOG_TTL if config.name == RETENTION else config.name
            if is_table_property(name):
                removals.append(name)
        else:
            raise RefusedError(
                ErrorCode.invalid_request,
                f"topic '{topic[:260]}': setting '{config.name[:200]}' is no list",
            )
    if wanted.get(RETENTION) == "-1":
        removals.append(LOG_TTL)
    return wanted, removals


async def _alter(
    exchange: KafkaExchange,
    topic: str,
    wanted: Mapping[str, str | None],
    removals: list[str],
    is_tried: bool,
) -> None:
    updates = properties_of(topic, wanted)
    info = await _info(exchange, topic, Level.ADMIN)
    removals = [name for name in removals if name in info.descriptor.properties]
    kept = {k: v for k, v in info.descriptor.properties.items() if k not in removals}
    check_settings(
        topic,
        wanted,
        TableProperties.parse({**kept, **updates}, table=str(info.path)),
        is_compact=is_compacted_table(info.descriptor),
        is_keyed=bool(info.descriptor.primary_key),
    )
    if not (updates or removals):
        return
    if is_tried:
        with_properties(info, updates=updates, removals=removals)
        return
    endpoint = await remote_endpoint(exchange, info.path)
    if endpoint is None:
        manager = exchange.service.manager
        await manager.alter_properties(info.path, updates=updates, removals=removals)
        return
    body = json.dumps({"set": updates, "remove": removals}).encode()
    await ask_shard(exchange, endpoint, "PATCH", f"/v1/tables/{info.path}/properties", body=body)


async def _info(exchange: KafkaExchange, topic: str, level: Level) -> TableInfo:
    path = await path_among_shards(exchange, topic, level)
    endpoint = await remote_endpoint(exchange, path)
    if endpoint is None:
        return table_at(exchange, topic, path).info
    return await remote_table(exchange, topic, path, endpoint)
