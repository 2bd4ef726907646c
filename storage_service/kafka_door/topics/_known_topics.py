"""All topics that a caller may see, of every shard; by name, and by the ids that clients know."""

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
    """Return the topic that a table of this process is."""
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
    """Return the topic of a table that comes here, or leaves, as far as it is known."""
    away = exchange.service.manager.away.get(path)
    if away is None or away.info is None:
        return None
    return known_topic(exchange, away.info, is_led=False)


async def topics_by_name(
    exchange: KafkaExchange, *, is_fresh: bool = False
) -> dict[str, KnownTopic]:
    """Return the topics that the caller may read; `is_fresh`: of other shards as they are now.

    Of two tables with one topic's name it is the first that was made; of two shards that know one
    table, that which leads it.
    """
    manager = exchange.service.manager
    every = [
        topic
        for other in await exchange.broker.others.all(exchange, is_fresh=is_fresh)
        for topic in other.topics.values()
    ]
    here = [known_topic(exchange, table.info) for table in manager.open_tables()]
    moving = [moving_topic(exchange, path) for path in manager.away]
    async for topic in in_slices([*(one for one in moving if one is not None), *here]):
        if exchange.caller.may(Level.READ, str(topic.path)):
            every.append(topic)
    found = dict[str, KnownTopic]()
    for topic in every:
        if topic.name not in found or _order(topic) <= _order(found[topic.name]):
            found[topic.name] = topic
    return found


def _order(topic: KnownTopic) -> tuple[object, ...]:
    return *topic.table.age, not topic.is_led


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
            exchange.service.shards is None or not exchange.table_locations.may_ask_anew()
        ):
            break
        topics = await topics_by_name(exchange, is_fresh=is_fresh)
        async for topic in in_slices(topics.values()):
            number = topic_id_of(exchange.broker.cluster_id, topic.table_id)
            if number in wanted:
                found[number] = topic
    return found
