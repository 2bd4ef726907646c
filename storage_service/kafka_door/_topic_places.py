"""Which table a topic is, where its name may be that of two.

A table that is there stays the topic's, whatever is made later: see `kafka/topics.py`. What is in
this process is known at once; what other shards have is told by who asks them.
"""

from __future__ import annotations

from collections.abc import Collection

from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.kafka.topics import (
    TopicTable,
    first_made,
    table_paths_of,
    topic_name_of,
)

__all__ = ["path_here", "path_of_none", "tables_here", "topic_table_of"]


def topic_table_of(info: TableInfo) -> TopicTable:
    """Return what a table is to Kafka's clients."""
    return TopicTable(
        path=info.path,
        topic=topic_name_of(info.path, info.descriptor.properties),
        created_at_us=info.created_at_us,
        table_id=info.table_id,
    )


def tables_here(manager: TabletManager, topic: str) -> list[TopicTable]:
    """Return the tables of this process that a topic may be, as far as they can be read."""
    found = []
    for path in table_paths_of(topic):
        if manager.has_table(path):
            try:
                found.append(topic_table_of(manager.readable(path).info))
            except StreamhouseError:
                # Damaged, or on its way: whose it is cannot be known.
                continue
    return found


def path_here(manager: TabletManager, topic: str) -> TablePath:
    """Return the table that a topic is or would be, as far as is known here without asking.

    Raises `InvalidNameError` for what can be no topic.
    """
    paths = table_paths_of(topic)
    if len(paths) == 1:
        return paths[0]
    known = tables_here(manager, topic)
    found = first_made(topic, known)
    if found is not None:
        return found.path
    readable = {one.path for one in known}
    for path in paths:
        if path not in readable and (manager.has_table(path) or path in manager.away):
            # It says what is wrong with it; to make another one would be worse.
            return path
    return paths[0] if manager.registry.has_database(paths[0].database) else paths[-1]


def path_of_none(topic: str, databases: Collection[str]) -> TablePath:
    """Return the table that a topic would be while there is none that is the topic's."""
    paths = table_paths_of(topic)
    return paths[0] if paths[0].database in databases else paths[-1]
