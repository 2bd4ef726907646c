"""All topics of all shards that a caller may see, by name and by topic id."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping

from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.storage_service.kafka.topics import topic_id_of, topic_name_of
from streamhouse.storage_service.kafka_door._exchange import KafkaExchange
from streamhouse.storage_service.kafka_door.broker._other_brokers import KnownTopic
from streamhouse.storage_service.server.caller import Level
from streamhouse.storage_service.server.status.event_loop import in_slices

__all__ = ["known_topic", "moving_topic", "topics_by_id", "topics_by_name"]


def known_topic(exchange: KafkaExchange, info: TableInfo, *, is_led: bool = True) -> KnownTopic:
    """Return the topic of a table of this process."""
    return KnownTopic(
        name=topic_name_of(info.path, info.descriptor.properties),
        path=info.path,
        table_id=info.table_id,
        bucket_count=info.bucket_count,
        node_id=exchange.broker.node_id,
        created_at_us=info.created_at_us,
        is_led=is_led,
    )


def moving_topic(exchange: KafkaExchange, path: TablePath) -> KnownTopic | None:
    """Return the topic of a moving table, if the table's metadata is known here."""
    away = exchange.service.manager.away.get(path)
    if away is None or away.info is None:
        return None
    return known_topic(exchange, away.info, is_led=False)


async def topics_by_name(
    exchange: KafkaExchange, *, is_fresh: bool = False
) -> dict[str, KnownTopic]:
    """Return the topics that the caller may read; `is_fresh` bypasses the cache of other shards.

    If two tables have the same topic name, the result is the table created first. If two shards
    report one table, the result is the leading shard's report.
    """
    manager = exchange.service.manager
    every = [
        topic
        for broker in await exchange.broker.others.all(exchange, is_fresh=is_fresh)
        for topic in broker.topics.values()
    ]
    own_topics = [known_topic(exchange, table.info) for table in manager.open_tables()]
    moving = [moving_topic(exchange, path) for path in manager.away]
    async for topic in in_slices([*(topic for topic in moving if topic is not None), *own_topics]):
        if exchange.caller.may(Level.READ, str(topic.path)):
            every.append(topic)
    topics = dict[str, KnownTopic]()
    for topic in every:
        if topic.name not in topics or _order(topic) <= _order(topics[topic.name]):
            topics[topic.name] = topic
    return topics


def _order(topic: KnownTopic) -> tuple[object, ...]:
    return *topic.table.age, not topic.is_led


async def topics_by_id(
    exchange: KafkaExchange, ids: Collection[uuid.UUID]
) -> Mapping[uuid.UUID, KnownTopic]:
    """Return the existing topics with the given ids, as far as readable for the caller.

    Without ids no topics are looked at.
    """
    requested_ids, topics = frozenset(ids), dict[uuid.UUID, KnownTopic]()
    for is_fresh in (False, True):
        if requested_ids <= topics.keys():
            break
        if is_fresh and (
            exchange.service.shards is None or not exchange.table_locations.may_ask_fresh()
        ):
            break
        all_topics = await topics_by_name(exchange, is_fresh=is_fresh)
        async for topic in in_slices(all_topics.values()):
            topic_id = topic_id_of(exchange.broker.cluster_id, topic.table_id)
            if topic_id in requested_ids:
                topics[topic_id] = topic
    return topics
