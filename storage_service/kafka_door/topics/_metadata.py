"""Metadata: topics, and the leading broker of each partition."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kio.schema.errors import ErrorCode

from streamhouse.core.errors import NotFoundError, StreamhouseError, UnavailableError
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.kafka.topics import TOPIC_PROPERTY, leader_epoch_of
from streamhouse.storage_service.kafka_door._error_codes import RefusedError
from streamhouse.storage_service.kafka_door._exchange import KafkaExchange
from streamhouse.storage_service.kafka_door.broker._other_brokers import KnownTopic
from streamhouse.storage_service.kafka_door.broker._shard_calls import remote_endpoint
from streamhouse.storage_service.kafka_door.topics._cluster import all_brokers
from streamhouse.storage_service.kafka_door.topics._known_topics import (
    known_topic,
    moving_topic,
    topics_by_id,
    topics_by_name,
)
from streamhouse.storage_service.kafka_door.topics._new_topics import make_topic
from streamhouse.storage_service.kafka_door.topics._topic_tables import (
    check_topic,
    path_among_shards,
    refusal_of,
    table_at,
)
from streamhouse.storage_service.server.caller import Level
from streamhouse.storage_service.server.status.event_loop import in_slices

__all__ = ["answer_metadata"]

# The limit for one request; the client asks again for the remaining topics.
_CREATIONS_MAX: Final = 100
# Kafka's internal topics have this prefix: a client that asks for one does not want a table.
_INTERNAL: Final = "__"
_NO_LEADER: Final = ErrorCode.leader_not_available
_NOBODY: Final = -1


async def answer_metadata(exchange: KafkaExchange, request: Any) -> Mapping[str, Any]:
    """Answer with the named topics, or with all topics that the caller may read."""
    broker = exchange.broker
    asks_all = request.topics is None or (exchange.api_version == 0 and not request.topics)
    if asks_all:
        topics = await _every_topic(exchange)
    else:
        # Earlier versions always allow the creation.
        may_make = getattr(request, "allow_auto_topic_creation", True)
        may_make = may_make and exchange.service.config.kafka_auto_create
        topics = await _named_topics(exchange, request.topics, may_make=may_make)
    # Read after the topics, so that the brokers include the leader of every topic.
    brokers = await all_brokers(exchange)
    return {
        "brokers": [
            {"node_id": b.node_id, "host": b.address.host, "port": b.address.port} for b in brokers
        ],
        "cluster_id": broker.cluster_id,
        "controller_id": broker.node_id,
        "topics": topics,
    }


async def _every_topic(exchange: KafkaExchange) -> list[Mapping[str, Any]]:
    named = sorted((await topics_by_name(exchange)).items())
    return [_described(exchange, name, topic) async for name, topic in in_slices(named)]


async def _named_topics(
    exchange: KafkaExchange, mentions: Sequence[Any], *, may_make: bool
) -> list[Mapping[str, Any]]:
    """Return the requested topics without repetitions, which bounds the answer."""
    may_make_next = itertools.repeat(may_make, _CREATIONS_MAX)
    requested = {(topic.name, getattr(topic, "topic_id", None)): topic for topic in mentions}
    ids = [topic_id for name, topic_id in requested if name is None and topic_id is not None]
    by_id = await topics_by_id(exchange, ids)
    return [
        _with_id(exchange, topic.topic_id, by_id)
        if topic.name is None
        else await _topic(exchange, topic, may_make_next)
        async for topic in in_slices(requested.values())
    ]


def _with_id(
    exchange: KafkaExchange, topic_id: uuid.UUID | None, topics: Mapping[uuid.UUID, KnownTopic]
) -> Mapping[str, Any]:
    """Return a topic by id."""
    topic = None if topic_id is None else topics.get(topic_id)
    if topic is None:
        exchange.note(ErrorCode.unknown_topic_id)
        return {"error_code": ErrorCode.unknown_topic_id, "topic_id": topic_id}
    return _described(exchange, topic.name, topic)


async def _topic(
    exchange: KafkaExchange, mention: Any, may_make_next: Iterator[bool]
) -> Mapping[str, Any]:
    """Return a topic by name, or the topic's error."""
    try:
        topic = await _topic_by_name(exchange, mention.name, may_make_next)
    except (StreamhouseError, RefusedError) as error:
        return {"name": mention.name, "error_code": refusal_of(exchange, error)["error_code"]}
    return _described(exchange, mention.name, topic)


async def _topic_by_name(
    exchange: KafkaExchange, name: str, may_make_next: Iterator[bool]
) -> KnownTopic:
    """Return a topic of any shard, created if missing and creation is allowed."""
    path = await path_among_shards(exchange, name, Level.READ)
    try:
        return known_topic(exchange, table_at(exchange, name, path).info)
    except UnavailableError:
        moving = moving_topic(exchange, path)
        if moving is None:
            raise
        check_topic(name, path, {TOPIC_PROPERTY: moving.name})
        return moving
    except NotFoundError:
        remote = await _remote_topic(exchange, name, path)
        if remote is not None:
            return remote
        if name.startswith(_INTERNAL) or not next(may_make_next, False):
            raise
    path = await make_topic(exchange, name)
    exchange.table_locations.note_created(path)
    remote = await _remote_topic(exchange, name, path)
    return remote or known_topic(exchange, table_at(exchange, name, path).info)


async def _remote_topic(exchange: KafkaExchange, name: str, path: TablePath) -> KnownTopic | None:
    """Return a topic of another shard; None if no other shard has the table."""
    others, moving = exchange.broker.others, None
    for is_fresh in (False, True):
        if is_fresh and not exchange.table_locations.may_ask_fresh():
            break
        for broker in await others.all(exchange, is_fresh=is_fresh):
            topic = broker.topics.get(path)
            if topic is not None:
                check_topic(name, path, {TOPIC_PROPERTY: topic.name})
                if topic.is_led:
                    return topic
                moving = topic
        # The cache is seconds old; only the directory knows that a table does not exist.
        if await remote_endpoint(exchange, path) is None:
            return None
    if moving is not None:
        return moving
    raise RefusedError(
        ErrorCode.leader_not_available, f"table '{path}' is in a shard that does not answer now"
    )


def _described(exchange: KafkaExchange, name: str, topic: KnownTopic) -> Mapping[str, Any]:
    """Return a topic with its partitions, even without a leader.

    An answer without partitions would let a group assign none of them, and clients would ask again
    only minutes later.
    """
    node_id, error = topic.node_id, ErrorCode.none if topic.is_led else _NO_LEADER
    if not topic.is_led:
        exchange.note(error)
    return {
        "name": name,
        "topic_id": exchange.broker.topic_ids.announce(topic.table_id, topic.path),
        "partitions": [
            {
                "error_code": error,
                "partition_index": bucket,
                "leader_id": node_id if topic.is_led else _NOBODY,
                "leader_epoch": leader_epoch_of(topic.table_id),
                "replica_nodes": [node_id],
                "isr_nodes": [node_id],
            }
            for bucket in range(topic.bucket_count)
        ],
    }
