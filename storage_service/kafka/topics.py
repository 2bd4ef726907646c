"""Topics are tables: the table of a topic, and the topic of a table.

| topic | table |
|---|---|
| `t`, `default.t` | `default.t` |
| `db.t` | `db.t`, or `default.db_t` |
| any other name of Kafka's, as `web-clicks` or `a.b.c` | `default.web_clicks`, `default.a_b_c` |

Where `.` and `-` become `_`, two topics may map to one table. The table's property `kafka.topic`
names the topic; further topics are refused, as Kafka refuses two topics with differences in `.` and
`_` only.

`orders.created` may be one of two tables. Among the existing tables of the topic the first created
table counts, so that a later table changes nothing for the topic's clients. Without an existing
table, the first path counts if its database exists, else the second. This module looks up nothing;
`kafka_door/_topic_places.py` knows the existing tables.
"""

from __future__ import annotations

import functools
import hashlib
import re
import uuid
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from streamhouse.core.errors import InvalidNameError
from streamhouse.core.model.table import DEFAULT_DATABASE, TablePath

__all__ = [
    "TOPIC_PROPERTY",
    "TopicTable",
    "first_created",
    "is_same_topic",
    "leader_epoch_of",
    "needs_property",
    "node_id_of",
    "table_paths_of",
    "topic_id_of",
    "topic_name_of",
]

TOPIC_PROPERTY: Final = "kafka.topic"
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}", re.ASCII)
_NODE_ID_MASK: Final = 0x7FFF_FFFF
_LEADER_EPOCH_MASK: Final = 0x7FFF_FFFF


# Every request names a topic, mostly one of a few.
@functools.lru_cache(maxsize=1_024)
def table_paths_of(topic: str) -> tuple[TablePath, ...]:
    """Return the possible tables of a topic: one, or both `db.t` and `default.db_t` for `db.t`.

    Raises `InvalidNameError` for an invalid topic name.
    """
    if not _TOPIC.fullmatch(topic) or topic in (".", ".."):
        raise InvalidNameError(
            f"topic '{topic[:260]}' must be 1 to 249 letters, digits, dots, dashes and underscores"
        )
    try:
        path = TablePath.parse(topic)
    except InvalidNameError:
        return (_flat(topic),)
    if path.database == DEFAULT_DATABASE:
        return (path,)
    try:
        return path, _flat(topic)
    except InvalidNameError:
        # The joined names are longer than a table name may be.
        return (path,)


def _flat(topic: str) -> TablePath:
    name = topic.replace(".", "_").replace("-", "_")
    # A table's name must not begin with a digit.
    return TablePath(DEFAULT_DATABASE, f"_{name}" if name[0].isdigit() else name)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicTable:
    """An existing table, and the name of its topic."""

    path: TablePath
    topic: str
    created_at_us: int
    table_id: int

    @property
    def age(self) -> tuple[int, int, TablePath]:
        """Sorts tables by creation, in the same way on every shard."""
        return self.created_at_us, self.table_id, self.path


def first_created(topic: str, tables: Iterable[TopicTable]) -> TopicTable | None:
    """Return the table of a topic among existing tables; None if no table is the topic's."""
    paths = table_paths_of(topic)
    candidates = [table for table in tables if table.path in paths and table.topic == topic]
    return min(candidates, key=lambda table: table.age, default=None)


def needs_property(topic: str, path: TablePath) -> bool:
    """Return whether the table has to name its topic, because the path does not."""
    is_in_default = path.database == DEFAULT_DATABASE
    return topic != str(path) and not (is_in_default and topic == path.table)


def topic_name_of(path: TablePath, properties: Mapping[str, str]) -> str:
    """Return the name of a table's topic in a list."""
    stated_topic = properties.get(TOPIC_PROPERTY, "")
    if stated_topic and _is_of(stated_topic, path):
        return stated_topic
    return path.table if path.database == DEFAULT_DATABASE else str(path)


def is_same_topic(topic: str, path: TablePath, properties: Mapping[str, str]) -> bool:
    """Return whether `topic`, which may map to the table at `path`, is the table's topic."""
    name = topic_name_of(path, properties)
    return topic == name or (topic == str(path) and name == path.table)


def leader_epoch_of(table_id: int) -> int:
    """Return the one leader epoch of all partitions of a table.

    Tables of the same name have ascending ids. A table created again therefore has a newer epoch.
    Epoch 0, which all tables had in earlier versions, belongs to no table.
    """
    return table_id & _LEADER_EPOCH_MASK


# Every Fetch and every list of topics needs topic ids.
@functools.lru_cache(maxsize=16_384)
def topic_id_of(service_id: str, table_id: int) -> uuid.UUID:
    """Return the id of a table's topic; a new table of the same topic has another id."""
    digest = hashlib.sha256(f"{service_id}/{table_id}".encode()).digest()
    return uuid.UUID(bytes=digest[:16], version=4)


def node_id_of(shard: str | None) -> int:
    """Return the broker number of a shard; 0 for a service without shards."""
    return 0 if shard is None else zlib.crc32(shard.encode()) & _NODE_ID_MASK


def _is_of(topic: str, path: TablePath) -> bool:
    try:
        return path in table_paths_of(topic)
    except InvalidNameError:
        return False
