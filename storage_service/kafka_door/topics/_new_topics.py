"""Topics created, dropped and changed by clients: as tables, with the same grants as over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from streamhouse.core.errors import (
    InvalidNameError,
    InvalidRequestError,
    NotOwnerError,
    StreamhouseError,
    UnsupportedError,
)
from streamhouse.core.model.properties import TableProperties
from streamhouse.core.model.records.record_format import (
    RAW_TOPIC,
    OnSchema,
    ValueFormat,
)
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import (
    BUCKET_COUNT_MAX,
    TableDescriptor,
    TableInfo,
    TablePath,
)
from streamhouse.core.rows.companion import is_rejecting
from streamhouse.storage_service.kafka.topics import (
    TOPIC_PROPERTY,
    is_same_topic,
    needs_property,
)
from streamhouse.storage_service.kafka_door._error_codes import RefusedError
from streamhouse.storage_service.kafka_door._exchange import KafkaExchange
from streamhouse.storage_service.kafka_door.broker._shard_calls import ask_shard, remote_endpoint
from streamhouse.storage_service.kafka_door.topics._configs import check_count
from streamhouse.storage_service.kafka_door.topics._known_topics import topics_by_id
from streamhouse.storage_service.kafka_door.topics._topic_settings import (
    COMPACTED_PROPERTIES,
    check_settings,
    is_compacted,
    properties_of,
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
    "answer_create_partitions",
    "answer_create_topics",
    "answer_delete_topics",
    "make_topic",
]

_DEFAULT_PARTITIONS: Final = -1
_VALUE_FORMAT: Final = "kafka.value.format"
_ON_SCHEMA: Final = "kafka.on.schema"
_DEFAULT_REPLICATION: Final = -1
# The column of Kafka's record keys; not null in a compacted topic.
_KEY: Final = "key"
_TOPICS_MAX: Final = 100
# The first version of DeleteTopics with topic ids.
_BY_ID_VERSION: Final = 6
_COMPACTED_TOPIC: Final = RAW_TOPIC.set(
    RAW_TOPIC.get_field_index(_KEY), RAW_TOPIC.field(_KEY).with_nullable(False)
)


async def answer_create_topics(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Create a raw table for each topic; each topic has its own outcome."""
    if len(request.topics) > _TOPICS_MAX:
        raise InvalidRequestError(f"{len(request.topics)} topics at once; at most {_TOPICS_MAX}")
    names = [topic.name for topic in request.topics]
    results = []
    async for topic in in_slices(request.topics):
        try:
            if names.count(topic.name) > 1:
                raise InvalidRequestError(f"topic '{topic.name[:260]}' is asked for twice")
            results.append(await _created(exchange, topic, is_dry_run=request.validate_only))
        except (StreamhouseError, RefusedError) as error:
            results.append({"name": topic.name, **refusal_of(exchange, error), "configs": None})
    return {"topics": results}


async def _created(exchange: KafkaExchange, topic: Any, *, is_dry_run: bool) -> Mapping[str, Any]:
    if topic.assignments:
        raise UnsupportedError(
            f"topic '{topic.name}': partitions are not assigned to brokers by hand; the service"
            " places a table"
        )
    if topic.replication_factor < 1 and topic.replication_factor != _DEFAULT_REPLICATION:
        raise RefusedError(
            ErrorCode.invalid_replication_factor,
            f"topic '{topic.name}': {topic.replication_factor} is no replication factor; give 1 or"
            " more, or -1: the service stores a table in its own way, whatever the factor",
        )
    check_count(topic.name, len(topic.configs))
    configs = {config.name: config.value for config in topic.configs}
    descriptor = await _descriptor(exchange, topic.name, topic.num_partitions, configs)
    answer = {
        "name": topic.name,
        "num_partitions": descriptor.bucket_count,
        "replication_factor": 1,
        "configs": (),
    }
    if is_dry_run:
        manager = exchange.service.manager
        async with manager.runtime.changing_files:
            await manager.runtime.run(manager.registry.check_new, descriptor)
        return answer
    info = await _make(exchange, descriptor)
    return {**answer, "topic_id": exchange.broker.topic_ids.announce(info.table_id, info.path)}


async def make_topic(exchange: KafkaExchange, topic: str) -> TablePath:
    """Create the raw table of a topic on a client's lookup; raises as the table registry does."""
    descriptor = await _descriptor(exchange, topic, _DEFAULT_PARTITIONS, {})
    return (await _make(exchange, descriptor)).path


async def _descriptor(
    exchange: KafkaExchange, topic: str, partitions: int, configs: Mapping[str, str | None]
) -> TableDescriptor:
    """Return the table of a new topic; raises as `path_among_shards` first."""
    path = await path_among_shards(exchange, topic, Level.ADMIN)
    if is_rejecting(path):
        raise InvalidNameError(
            f"topic '{topic}': the table's name is reserved for the rejected rows of another table;"
            " choose"
            " another name"
        )
    if partitions == _DEFAULT_PARTITIONS:
        partitions = exchange.service.config.kafka_partitions
    if partitions < 1 or partitions > BUCKET_COUNT_MAX:
        raise RefusedError(
            ErrorCode.invalid_partitions,
            f"topic '{topic}': {partitions} partitions; a table has 1 to {BUCKET_COUNT_MAX}"
            " buckets, and -1 leaves the number to the service",
        )
    topic_properties = properties_of(topic, configs)
    is_compact = bool(is_compacted(topic, configs))
    # A keyed table puts a row into its key's bucket, but a record has to stay in its partition:
    # both agree for one partition only. With several partitions the table keeps every record, like
    # a log.
    is_keyed = is_compact and partitions == 1
    # A stated format is final. Without a stated format, a serializer may still register a schema,
    # which replaces the table. A keyed table always stays.
    has_final_format = is_compact or _VALUE_FORMAT in topic_properties
    schema_policy = {} if has_final_format else {_ON_SCHEMA: str(OnSchema.REPLACE)}
    changelog_properties = COMPACTED_PROPERTIES if is_keyed else {}
    properties = {
        _VALUE_FORMAT: str(ValueFormat.RAW),
        **schema_policy,
        **changelog_properties,
        **topic_properties,
    }
    check_settings(
        topic,
        configs,
        TableProperties.parse(properties, table=str(path)),
        is_compact=is_compact,
        is_keyed=is_keyed,
    )
    if needs_property(topic, path):
        properties.setdefault(TOPIC_PROPERTY, topic)
    if not is_same_topic(topic, path, properties):
        raise RefusedError(
            ErrorCode.invalid_config,
            f"topic '{topic}': with {TOPIC_PROPERTY} = '{properties[TOPIC_PROPERTY][:260]}' its"
            " table would be another topic's: leave that setting out",
        )
    return TableDescriptor(
        path=path,
        schema=Schema.from_arrow(_COMPACTED_TOPIC if is_compact else RAW_TOPIC),
        primary_key=(_KEY,) if is_keyed else (),
        bucket_count=partitions,
        properties=properties,
    )


async def _make(exchange: KafkaExchange, descriptor: TableDescriptor) -> TableInfo:
    """Create a table here, or in the shard that should have the table."""
    service = exchange.service
    if service.shards is None or service.manager.has_table(descriptor.path):
        return (await service.manager.create_table(descriptor)).info
    try:
        await service.shards.place(descriptor.path)
    except NotOwnerError as error:
        if error.owner is None:
            raise
        body = json.dumps(descriptor.to_json()).encode()
        answer = await ask_shard(exchange, error.owner, "POST", "/v1/tables", body=body)
        return TableInfo.from_json(answer)
    return (await service.manager.create_table(descriptor)).info


async def answer_delete_topics(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Drop the table of each topic; each topic has its own outcome."""
    if exchange.api_version < _BY_ID_VERSION:
        return {
            "responses": [await _deleted(exchange, n) async for n in in_slices(request.topic_names)]
        }
    results = []
    ids = [topic.topic_id for topic in request.topics if topic.name is None and topic.topic_id]
    by_id = await topics_by_id(exchange, ids)
    async for topic in in_slices(request.topics):
        if topic.name is not None:
            results.append(await _deleted(exchange, topic.name))
        elif topic.topic_id in by_id:
            result = await _deleted(exchange, by_id[topic.topic_id].name)
            results.append({**result, "topic_id": topic.topic_id})
        else:
            # Callers without the right to read get the same answer.
            unknown = RefusedError(
                ErrorCode.unknown_topic_id, f"there is no topic with the id {topic.topic_id}"
            )
            refusal = refusal_of(exchange, unknown)
            results.append({"name": None, "topic_id": topic.topic_id, **refusal})
    return {"responses": results}


async def _deleted(exchange: KafkaExchange, name: str) -> dict[str, Any]:
    try:
        await _delete(exchange, name)
    except (StreamhouseError, RefusedError) as error:
        return {"name": name, **refusal_of(exchange, error)}
    return {"name": name}


async def _delete(exchange: KafkaExchange, topic: str) -> None:
    path = await path_among_shards(exchange, topic, Level.ADMIN)
    endpoint = await remote_endpoint(exchange, path)
    if endpoint is None:
        await exchange.service.manager.drop_table(table_at(exchange, topic, path).path)
        return
    await remote_table(exchange, topic, path, endpoint)
    await ask_shard(exchange, endpoint, "DELETE", f"/v1/tables/{path}")


async def answer_create_partitions(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Refuse: the bucket of a row depends on the number of buckets."""
    results = []
    async for topic in in_slices(request.topics):
        try:
            path = await path_among_shards(exchange, topic.name, Level.ADMIN)
            if await remote_endpoint(exchange, path) is None:
                table_at(exchange, topic.name, path)
            raise RefusedError(
                ErrorCode.invalid_partitions,
                f"topic '{topic.name}': the number of a table's buckets is fixed at its creation;"
                " create another topic with more partitions, and copy the records",
            )
        except (StreamhouseError, RefusedError) as error:
            results.append({"name": topic.name, **refusal_of(exchange, error)})
    return {"results": results}
