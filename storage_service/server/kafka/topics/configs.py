"""The configuration of topics, as far as clients ask: `retention.ms` and the table's properties.

What else a topic of Kafka may be configured with says how brokers keep it; here the service does.
Those settings are known by name: they are taken and change nothing, and shown with what is so.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from streamhouse.storage_service.engine.directory.table_registry import with_properties
from streamhouse.storage_service.errors import StreamhouseError
from streamhouse.storage_service.model.properties import TableProperties
from streamhouse.storage_service.model.table import TableInfo
from streamhouse.storage_service.server.caller import Level
from streamhouse.storage_service.server.kafka.broker.shard_calls import ask_shard, elsewhere
from streamhouse.storage_service.server.kafka.error_codes import RefusedError
from streamhouse.storage_service.server.kafka.exchange import KafkaExchange
from streamhouse.storage_service.server.kafka.topics.topic_tables import (
    path_among_shards,
    refusal_of,
    table_at,
    table_there,
)
from streamhouse.storage_service.server.status.event_loop import in_slices

__all__ = [
    "answer_alter_configs",
    "answer_describe_configs",
    "answer_incremental_alter_configs",
    "check_count",
    "properties_of",
]

_TOPIC: Final = 2
_BROKER: Final = 4
_SOURCE_TOPIC: Final = 1
_SOURCE_DEFAULT: Final = 5
_SET, _DELETE = 0, 1
# Of one topic, in one request.
_SETTINGS_MAX: Final = 1_000
_LOG_TTL: Final = "table.log.ttl"
_RETENTION: Final = "retention.ms"
_POLICY: Final = "cleanup.policy"
_PREFIXES: Final = ("table.", "kafka.")
# Name -> what is so here, whatever is asked.
_FIXED: Final[Mapping[str, str]] = {
    "compression.type": "producer",
    "delete.retention.ms": "86400000",
    "file.delete.delay.ms": "60000",
    "flush.messages": "1",
    "flush.ms": "0",
    "index.interval.bytes": "4096",
    "max.compaction.lag.ms": "9223372036854775807",
    "max.message.bytes": "67108864",
    "message.format.version": "3.0-IV1",
    "message.timestamp.type": "CreateTime",
    "min.cleanable.dirty.ratio": "0.5",
    "min.compaction.lag.ms": "0",
    "min.insync.replicas": "1",
    "preallocate": "false",
    "retention.bytes": "-1",
    "segment.bytes": "134217728",
    "segment.index.bytes": "10485760",
    "segment.jitter.ms": "0",
    "segment.ms": "604800000",
    "unclean.leader.election.enable": "false",
}
_OF_BROKER: Final[Mapping[str, str]] = {
    "auto.create.topics.enable": "true",
    "default.replication.factor": "1",
    "delete.topic.enable": "true",
    "log.message.timestamp.type": "CreateTime",
    "min.insync.replicas": "1",
    "offsets.topic.replication.factor": "1",
}


def properties_of(topic: str, configs: Mapping[str, str | None]) -> dict[str, str]:
    """Return the table properties that the configuration of a topic asks for.

    Raises `RefusedError` for what would promise something else than what is done.
    """
    found = dict[str, str]()
    for name, value in configs.items():
        if value is None or name in _FIXED:
            continue
        if name.startswith(_PREFIXES):
            found[name] = value
        elif name == _RETENTION:
            found |= _retention(topic, value)
        elif name == _POLICY:
            if value != "delete":
                raise RefusedError(
                    ErrorCode.invalid_config,
                    f"topic '{topic}': {_POLICY} = {value[:80]} is a table with a primary key here:"
                    " create the table by HTTP or SQL, and use its name as a topic",
                )
        else:
            raise RefusedError(
                ErrorCode.invalid_config, f"topic '{topic}': there is no setting '{name[:200]}'"
            )
    return found


def check_count(topic: str, count: int) -> None:
    """Raise `RefusedError` for more settings of a topic than are looked at."""
    if count > _SETTINGS_MAX:
        raise RefusedError(
            ErrorCode.invalid_request,
            f"topic '{topic[:260]}': {count} settings at once; at most {_SETTINGS_MAX}",
        )


def _retention(topic: str, value: str) -> dict[str, str]:
    if value == "-1":
        # Rows that are tiered stay in the lake for ever anyway.
        return {}
    if not (value.isascii() and value.isdigit() and len(value) < 16 and int(value) > 0):
        raise RefusedError(
            ErrorCode.invalid_config,
            f"topic '{topic}': {_RETENTION} = '{value[:80]}' must be milliseconds, or -1",
        )
    return {_LOG_TTL: f"{value}ms"}


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
        return _of_topic(await _info(exchange, asked.resource_name, Level.READ))
    if asked.resource_type == _BROKER and asked.resource_name == str(exchange.broker.node_id):
        config = exchange.service.config
        own = {
            "num.partitions": str(config.kafka_partitions),
            "message.max.bytes": str(config.body_bytes_max),
        }
        return [_config(name, value) for name, value in sorted({**_OF_BROKER, **own}.items())]
    raise RefusedError(
        ErrorCode.invalid_request,
        f"resource {asked.resource_type} '{asked.resource_name[:200]}' is neither a topic nor the"
        " broker that was asked",
    )


def _of_topic(info: TableInfo) -> list[dict[str, Any]]:
    properties = info.descriptor.properties
    ttl_ms = TableProperties.parse(properties, table=str(info.path)).log_ttl_ms
    shown = {name: _config(name, value) for name, value in _FIXED.items()}
    policy = "compact" if info.descriptor.primary_key else "delete"
    shown[_POLICY] = _config(_POLICY, policy)
    shown[_RETENTION] = _config(
        _RETENTION, str(ttl_ms), is_own=_LOG_TTL in properties, is_fixed=False
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
            updates, removals = _changes(asked, is_incremental=is_incremental)
            await _alter(exchange, asked.resource_name, updates, removals, request.validate_only)
            found.append(named)
        except (StreamhouseError, RefusedError) as error:
            found.append({**named, **refusal_of(exchange, error)})
    return {"responses": found}


def _changes(asked: Any, *, is_incremental: bool) -> tuple[dict[str, str], list[str]]:
    topic = asked.resource_name
    check_count(topic, len(asked.configs))
    wanted, removals = dict[str, str | None](), list[str]()
    for config in asked.configs:
        operation = config.config_operation if is_incremental else _SET
        if operation == _SET:
            wanted[config.name] = config.value
        elif operation == _DELETE:
            name = _LOG_TTL if config.name == _RETENTION else config.name
            if name.startswith(_PREFIXES):
                removals.append(name)
        else:
            raise RefusedError(
                ErrorCode.invalid_request,
                f"topic '{topic[:260]}': setting '{config.name[:200]}' is no list",
            )
    if wanted.get(_RETENTION) == "-1":
        removals.append(_LOG_TTL)
    return properties_of(topic, wanted), removals


async def _alter(
    exchange: KafkaExchange,
    topic: str,
    updates: dict[str, str],
    removals: list[str],
    is_tried: bool,
) -> None:
    info = await _info(exchange, topic, Level.ADMIN)
    removals = [name for name in removals if name in info.descriptor.properties]
    if not (updates or removals):
        return
    if is_tried:
        with_properties(info, updates=updates, removals=removals)
        return
    endpoint = await elsewhere(exchange, info.path)
    if endpoint is None:
        manager = exchange.service.manager
        await manager.alter_properties(info.path, updates=updates, removals=removals)
        return
    body = json.dumps({"set": updates, "remove": removals}).encode()
    await ask_shard(exchange, endpoint, "PATCH", f"/v1/tables/{info.path}/properties", body=body)


async def _info(exchange: KafkaExchange, topic: str, level: Level) -> TableInfo:
    path = await path_among_shards(exchange, topic, level)
    endpoint = await elsewhere(exchange, path)
    if endpoint is None:
        return table_at(exchange, topic, path).info
    return await table_there(exchange, topic, path, endpoint)
