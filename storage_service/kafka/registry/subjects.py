"""Subjects: which topic a schema is for, and whether it is that of keys or of values.

The one strategy is TopicNameStrategy, the default of every serializer: `<topic>-key` and
`<topic>-value`. With the others a subject names a record and no topic, and so no table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from streamhouse.core.errors import InvalidNameError
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.kafka.topics import table_paths_of, topic_name_of

__all__ = ["REGISTRY_PATH", "Part", "Subject", "subject_name"]

REGISTRY_PATH: Final = "/kafka/registry"
"""Below which serializers find the registry: their `schema.registry.url` ends with it."""

_SHOWN: Final = 260


class Part(StrEnum):
    """The part of a record that a schema is of."""

    KEY = "key"
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class Subject:
    """A topic, a part of its records, and the table that the topic is."""

    topic: str
    part: Part
    path: TablePath

    @classmethod
    def parse(cls, text: str) -> Subject:
        """Read a subject; raises `InvalidNameError` for one that names no topic.

        Of the tables that its topic may be it has the first one.
        """
        topic, dash, part = text.rpartition("-")
        if not dash or part not in tuple(Part):
            raise InvalidNameError(
                f"subject '{text[:_SHOWN]}' names no topic: use the TopicNameStrategy, by which it"
                " is '<topic>-value' or '<topic>-key'; schemas are kept beside a topic's table"
            )
        return cls(topic, Part(part), table_paths_of(topic)[0])

    def __str__(self) -> str:
        return f"{self.topic}-{self.part}"


def subject_name(path: TablePath, properties: Mapping[str, str], part: str) -> str:
    """Return what the subject of a part of a table's records is called in a list."""
    return f"{topic_name_of(path, properties)}-{part}"
