"""Topics are tables: which table a topic is, and what a table's topic is called.

| topic | table |
|---|---|
| `t`, `default.t` | `default.t` |
| `db.t` | `db.t`, or `default.db_t` |
| any other name of Kafka's, as `web-clicks` or `a.b.c` | `default.web_clicks`, `default.a_b_c` |

Where `.` and `-` become `_`, two topics may ask for one table. Its property `kafka.topic` says
whose it is; the other topic is refused, as Kafka itself refuses two topics that differ in `.` and
`_` only. `orders.created` may be one of two tables: of those that are there and are the topic's, it
is the one that was made first, so that what is made later changes nothing for its clients. While
there is none, it is the first where there is such a database, else the second. Nothing is looked up
here; `server/topic_places.py` knows what is there.
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
    "first_made",
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


# Every request names a topic, and mostly one of the same few.
@functools.lru_cache(maxsize=1_024)
def table_paths_of(topic: str) -> tuple[TablePath, ...]:
    """Return the tables that a topic may be: one, or for `db.t` that one and `default.db_t`.

    Raises `InvalidNameError` for what can be no topic.
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
        # Together the two names are longer than that of a table.
        return (path,)


def _flat(topic: str) -> TablePath:
    name = topic.replace(".", "_").replace("-", "_")
    # A table's name begins with no digit.
    return TablePath(DEFAULT_DATABASE, f"_{name}" if name[0].isdigit() else name)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicTable:
    """A table that is there, and what its topic is called."""

    path: TablePath
    topic: str
    created_at_us: int
    table_id: int

    @property
    def age(self) -> tuple[int, int, TablePath]:
        """Orders tables by when they were made, the same on every shard."""
        return self.created_at_us, self.table_id, self.path


def first_made(topic: str, tables: Iterable[TopicTable]) -> TopicTable | None:
    """Return the table that a topic is, of those that are there; None if it is none of them."""
    paths = table_paths_of(topic)
    found = [one for one in tables if one.path in paths and one.topic == topic]
    return min(found, key=lambda one: one.age, default=None)


def needs_property(topic: str, path: TablePath) -> bool:
    """Whether the table of a topic has to say whose it is: its path is not the topic's name."""
    is_in_default = path.database == DEFAULT_DATABASE
    return topic != str(path) and not (is_in_default and topic == path.table)


def topic_name_of(path: TablePath, properties: Mapping[str, str]) -> str:
    """Return what the topic of a table is called in a list."""
    named = properties.get(TOPIC_PROPERTY, "")
    if named and _is_of(named, path):
        return named
    return path.table if path.database == DEFAULT_DATABASE else str(path)


def is_same_topic(topic: str, path: TablePath, properties: Mapping[str, str]) -> bool:
    """Whether `topic`, one of whose tables may be that at `path`, is the table's own."""
    name = topic_name_of(path, properties)
    return topic == name or (topic == str(path) and name == path.table)


def leader_epoch_of(table_id: int) -> int:
    """Return the one leader epoch of all partitions of a table.

    Tables of one name have ascending ids, so a table that is made again has a newer epoch. Epoch 0,
    which all tables had in earlier versions, belongs to no table.
    """
    return table_id & _LEADER_EPOCH_MASK


# Each is asked for by every Fetch of a consumer, and by every list of topics.
@functools.lru_cache(maxsize=16_384)
def topic_id_of(service_id: str, table_id: int) -> uuid.UUID:
    """Return the id of a table's topic, which a topic made anew under its name does not have."""
    digest = hashlib.sha256(f"{service_id}/{table_id}".encode()).digest()
    return uuid.UUID(bytes=digest[:16], version=4)


def node_id_of(shard: str | None) -> int:
    """Return the number of a shard as a broker of Kafka; 0 is a service that is alone."""
    return 0 if shard is None else zlib.crc32(shard.encode()) & _NODE_ID_MASK


def _is_of(topic: str, path: TablePath) -> bool:
    try:
        return path in table_paths_of(topic)
    except InvalidNameError:
        return False
