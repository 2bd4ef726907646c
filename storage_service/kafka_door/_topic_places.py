"""The table of a topic, if two tables could have the topic's name.

An existing table keeps the topic, whatever is created later: see `kafka/topics.py`. Tables of this
process are known at once; tables elsewhere come from the shards' answers.
"""

from __future__ import annotations

from collections.abc import Collection

from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.kafka.topics import (
    TopicTable,
    first_created,
    table_paths_of,
    topic_name_of,
)

__all__ = ["local_path", "local_tables", "path_of_new_topic", "topic_table_of"]


def topic_table_of(info: TableInfo) -> TopicTable:
    """Return a table as a candidate for a topic."""
    return TopicTable(
        path=info.path,
        topic=topic_name_of(info.path, info.descriptor.properties),
        created_at_us=info.created_at_us,
        table_id=info.table_id,
    )


def local_tables(manager: TabletManager, topic: str) -> list[TopicTable]:
    """Return the readable candidates among the tables of this process."""
    candidates = []
    for path in table_paths_of(topic):
        if manager.has_table(path):
            try:
                candidates.append(topic_table_of(manager.readable(path).info))
            except StreamhouseError:
                # The topic of a damaged or moving table cannot be known.
                continue
    return candidates


def local_path(manager: TabletManager, topic: str) -> TablePath:
    """Return the table that a topic is or would be, by the tables of this process.

    Raises `InvalidNameError` for an invalid topic name.
    """
    paths = table_paths_of(topic)
    if len(paths) == 1:
        return paths[0]
    candidates = local_tables(manager, topic)
    topic_table = first_created(topic, candidates)
    if topic_table is not None:
        return topic_table.path
    readable = {candidate.path for candidate in candidates}
    for path in paths:
        if path not in readable and (manager.has_table(path) or path in manager.away):
            # A lookup of this table raises its error; creating another table would be worse.
            return path
    return paths[0] if manager.registry.has_database(paths[0].database) else paths[-1]


def path_of_new_topic(topic: str, databases: Collection[str]) -> TablePath:
    """Return the path of a new topic's table; `databases` are the existing databases."""
    paths = table_paths_of(topic)
    return paths[0] if paths[0].database in databases else paths[-1]
