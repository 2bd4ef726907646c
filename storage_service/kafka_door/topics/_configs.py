"""The configuration of topics and of this broker: described and changed for clients.

`_topic_settings.py` has the settings, and their meaning for a table.
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
# The limit for one topic in one request.
_SETTINGS_MAX: Final = 1_000
_BROKER_CONFIGS: Final[Mapping[str, str]] = {
    "default.replication.factor": "1",
    "delete.topic.enable": "true",
    "log.message.timestamp.type": "CreateTime",
    "min.insync.replicas": "1",
    "offsets.topic.replication.factor": "1",
}


def check_count(topic: str, count: int) -> None:
    """Raise `RefusedError` for too many settings of a topic."""
    if count > _SETTINGS_MAX:
        raise RefusedError(
            ErrorCode.invalid_request,
            f"topic '{topic[:260]}': {count} settings at once; at most {_SETTINGS_MAX}",
        )


async def answer_describe_configs(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Answer with the configuration of topics and this broker; repeated resources once."""
    results = []
    resources = {
        (resource.resource_type, resource.resource_name): resource for resource in request.resources
    }
    async for resource in in_slices(resources.values()):
        result_key = {
            "resource_type": resource.resource_type,
            "resource_name": resource.resource_name,
        }
        try:
            configs = await _described(exchange, resource)
            # Clients request all settings by a missing or an empty list.
            if names := frozenset(resource.configuration_keys or ()):
                configs = [config for config in configs if config["name"] in names]
            results.append({**result_key, "configs": configs})
        except (StreamhouseError, RefusedError) as error:
            results.append({**result_key, **refusal_of(exchange, error)})
    return {"results": results}


async def _described(exchange: KafkaExchange, resource: Any) -> list[dict[str, Any]]:
    if resource.resource_type == _TOPIC:
        return _of_topic(exchange, await _info(exchange, resource.resource_name, Level.READ))
    if resource.resource_type == _BROKER and resource.resource_name == str(exchange.broker.node_id):
        config = exchange.service.config
        service_configs = {
            "auto.create.topics.enable": str(config.kafka_auto_create).lower(),
            "num.partitions": str(config.kafka_partitions),
            "message.max.bytes": str(config.batch_bytes_max),
        }
        return [
            _config(name, value)
            for name, value in sorted({**_BROKER_CONFIGS, **service_configs}.items())
        ]
    raise RefusedError(
        ErrorCode.invalid_request,
        f"resource {resource.resource_type} '{resource.resource_name[:200]}' is neither a topic"
        " nor the broker that was asked",
    )


def _of_topic(exchange: KafkaExchange, info: TableInfo) -> list[dict[str, Any]]:
    properties = info.descriptor.properties
    settings = settings_of(info, record_bytes_max=exchange.service.config.batch_bytes_max)
    shown = {name: _config(name, value) for name, value in settings.items()}
    shown[RETENTION] = _config(
        RETENTION, settings[RETENTION], is_topic_setting=LOG_TTL in properties, is_fixed=False
    )
    for name, value in properties.items():
        shown[name] = _config(name, value, is_topic_setting=True, is_fixed=False)
    return [shown[name] for name in sorted(shown)]


def _config(
    name: str, value: str, *, is_topic_setting: bool = False, is_fixed: bool = True
) -> dict[str, Any]:
    return {
        "name": name,
        "value": value,
        "read_only": is_fixed,
        "config_source": _SOURCE_TOPIC if is_topic_setting else _SOURCE_DEFAULT,
        "is_sensitive": False,
    }


async def answer_incremental_alter_configs(
    exchange: KafkaExchange, request: Any
) -> Mapping[str, Any]:
    """Set and remove settings of topics; for each topic all settings or none."""
    return await _altered(exchange, request, is_incremental=True)


async def answer_alter_configs(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Set settings of topics. Unnamed settings stay: no client means to lose a format."""
    return await _altered(exchange, request, is_incremental=False)


async def _altered(
    exchange: KafkaExchange, request: Any, *, is_incremental: bool
) -> Mapping[str, Any]:
    results = []
    mentions = Counter(
        (mention.resource_type, mention.resource_name) for mention in request.resources
    )
    resources = {
        (mention.resource_type, mention.resource_name): mention for mention in request.resources
    }
    async for resource_id, resource in in_slices(resources.items()):
        result_key = {
            "resource_type": resource.resource_type,
            "resource_name": resource.resource_name,
        }
        try:
            if mentions[resource_id] > 1:
                # As in Kafka: the intended mention is unknown.
                raise RefusedError(
                    ErrorCode.invalid_request,
                    f"resource '{resource.resource_name[:260]}' is named"
                    f" {mentions[resource_id]} times; name it once, with all of its settings",
                )
            if resource.resource_type != _TOPIC:
                raise RefusedError(
                    ErrorCode.invalid_request,
                    "only topics are configured by clients; the service has its command line",
                )
            updates, removals = _changes(resource, is_incremental=is_incremental)
            await _alter(exchange, resource.resource_name, updates, removals, request.validate_only)
            results.append(result_key)
        except (StreamhouseError, RefusedError) as error:
            results.append({**result_key, **refusal_of(exchange, error)})
    return {"responses": results}


def _changes(resource: Any, *, is_incremental: bool) -> tuple[dict[str, str | None], list[str]]:
    """Return the settings to set, and the table properties to remove."""
    topic = resource.resource_name
    check_count(topic, len(resource.configs))
    updates, removals = dict[str, str | None](), list[str]()
    for config in resource.configs:
        operation = config.config_operation if is_incremental else _SET
        if operation == _SET:
            updates[config.name] = config.value
        elif operation == _DELETE:
            name = LOG_TTL if config.name == RETENTION else config.name
            if is_table_property(name):
                removals.append(name)
        else:
            raise RefusedError(
                ErrorCode.invalid_request,
                f"topic '{topic[:260]}': setting '{config.name[:200]}' is no list",
            )
    if updates.get(RETENTION) == "-1":
        removals.append(LOG_TTL)
    return updates, removals


async def _alter(
    exchange: KafkaExchange,
    topic: str,
    settings: Mapping[str, str | None],
    removals: list[str],
    is_dry_run: bool,
) -> None:
    updates = properties_of(topic, settings)
    info = await _info(exchange, topic, Level.ADMIN)
    removals = [name for name in removals if name in info.descriptor.properties]
    kept_properties = {k: v for k, v in info.descriptor.properties.items() if k not in removals}
    check_settings(
        topic,
        settings,
        TableProperties.parse({**kept_properties, **updates}, table=str(info.path)),
        is_compact=is_compacted_table(info.descriptor),
        is_keyed=bool(info.descriptor.primary_key),
    )
    if not (updates or removals):
        return
    if is_dry_run:
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
