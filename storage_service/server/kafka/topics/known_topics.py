"""All topics that a caller may see, of every shard; by name, and by the ids that clients know."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping

from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.kafka.topics import topic_name_of
from streamhouse.storage_service.server.caller import Level
from streamhouse.storage_service.server.kafka.broker.other_brokers import KnownTopic
from streamhouse.storage_service.server.kafka.exchange import KafkaExchange
from streamhouse.storage_service.server.kafka.topics.topic_tables import topic_id
from streamhouse.storage_service.server.status.event_loop import in_slices

__all__ = ["known_topic", "topics_by_id", "topics_by_name"]


def known_topic(exchange: KafkaExchange, table: OpenTable) -> KnownTopic:
    """Return the topic that a table of this process is."""
    return KnownTopic(
        name=topic_name_of(table.path, table.info.descriptor.properties),
        path=table.path,
        table_id=table.info.table_id,
        bucket_count=table.info.bucket_count,
        node_id=exchange.broker.node_id,
        created_at_us=table.info.created_at_us,
    )


async def topics_by_name(
    exchange: KafkaExchange, *, is_fresh: bool = False
) -> dict[str, KnownTopic]:
    """Return the topics that the caller may read; `is_fresh`: of other shards as they are now.

    Of two tables with one topic's name it is the first that was made.
    """
    every = [
        topic
        for other in await exchange.broker.others.all(exchange, is_fresh=is_fresh)
        for topic in other.topics.values()
    ]
    async for table in in_slices(exchange.service.manager.open_tables()):
        if exchange.caller.may(Level.READ, str(table.path)):
            every.append(known_topic(exchange, table))
    found = dict[str, KnownTopic]()
    for topic in every:
        if topic.name not in found or topic.table.age <= found[topic.name].table.age:
            found[topic.name] = topic
    return found


async def topics_by_id(
    exchange: KafkaExchange, ids: Collection[uuid.UUID]
) -> Mapping[uuid.UUID, KnownTopic]:
    """Return those of the topics with these ids that there are and that the caller may read.

    Nothing is looked at if no id is asked for.
    """
    wanted, found = frozenset(ids), dict[uuid.UUID, KnownTopic]()
    for is_fresh in (False, True):
        if wanted <= found.keys():
            break
        if is_fresh and (
            exchange.service.shards is None or not exchange.whereabouts.may_ask_anew()
        ):
            break
        topics = await topics_by_name(exchange, is_fresh=is_fresh)
        async for topic in in_slices(topics.values()):
            number = topic_id(exchange.broker.cluster_id, topic.table_id)
            if number in wanted:
                found[number] = topic
    return found
