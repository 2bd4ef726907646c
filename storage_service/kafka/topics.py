"""Topics are tables: which table a topic is, and what a table's topic is called.

| topic | table |
|---|---|
| `t`, `default.t` | `default.t` |
| `db.t` | `db.t` |
| any other name of Kafka's, as `web-clicks` or `a.b.c` | `default.web_clicks`, `default.a_b_c` |

In the third kind `.` and `-` become `_`, so two topics may ask for one table. Its property
`kafka.topic` says whose it is; the other topic is refused, as Kafka itself refuses two topics that
differ in `.` and `_` only. Nothing is looked up: name to path is a function.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Mapping
from typing import Final

from streamhouse.storage_service.errors import InvalidNameError
from streamhouse.storage_service.model.table import DEFAULT_DATABASE, TablePath

__all__ = [
    "TOPIC_PROPERTY",
    "is_same_topic",
    "needs_property",
    "node_id_of",
    "table_path_of",
    "topic_name_of",
]

TOPIC_PROPERTY: Final = "kafka.topic"
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}", re.ASCII)
_NODE_ID_MASK: Final = 0x7FFF_FFFF


# Every request names a topic, and mostly one of the same few.
@functools.lru_cache(maxsize=1_024)
def table_path_of(topic: str) -> TablePath:
    """Return the table that a topic is; raises `InvalidNameError` for what can be no topic."""
    if not _TOPIC.fullmatch(topic) or topic in (".", ".."):
        raise InvalidNameError(
            f"topic '{topic[:260]}' must be 1 to 249 letters, digits, dots, dashes and underscores"
        )
    try:
        return TablePath.parse(topic)
    except InvalidNameError:
        name = topic.replace(".", "_").replace("-", "_")
        # A table's name begins with no digit.
        return TablePath(DEFAULT_DATABASE, f"_{name}" if name[0].isdigit() else name)


def needs_property(topic: str) -> bool:
    """Whether the table of a topic has to say whose it is: its path is not the topic's name."""
    path = table_path_of(topic)
    is_in_default = path.database == DEFAULT_DATABASE
    return topic != str(path) and not (is_in_default and topic == path.table)


def topic_name_of(path: TablePath, properties: Mapping[str, str]) -> str:
    """Return what the topic of a table is called in a list."""
    named = properties.get(TOPIC_PROPERTY, "")
    if named and _is_of(named, path):
        return named
    return path.table if path.database == DEFAULT_DATABASE else str(path)


def is_same_topic(topic: str, path: TablePath, properties: Mapping[str, str]) -> bool:
    """Whether `topic`, which leads to the table at `path`, is the table's own."""
    name = topic_name_of(path, properties)
    return topic == name or (topic == str(path) and name == path.table)


def node_id_of(shard: str | None) -> int:
    """Return the number of a shard as a broker of Kafka; 0 is a service that is alone."""
    return 0 if shard is None else zlib.crc32(shard.encode()) & _NODE_ID_MASK


def _is_of(topic: str, path: TablePath) -> bool:
    try:
        return table_path_of(topic) == path
    except InvalidNameError:
        return False
