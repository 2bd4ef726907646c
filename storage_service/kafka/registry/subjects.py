"""Subjects: the topic of a schema, and whether the schema is for keys or values.

The only strategy is TopicNameStrategy, the default of every serializer: `<topic>-key` and
`<topic>-value`. Other strategies name subjects after records, which belong to no table.
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
"""The path of the registry, at the end of a serializer's `schema.registry.url`."""

_SHOWN: Final = 260


class Part(StrEnum):
    """The part of a record that a schema describes."""

    KEY = "key"
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class Subject:
    """A topic, a part of the topic's records, and the topic's table."""

    topic: str
    part: Part
    path: TablePath

    @classmethod
    def parse(cls, text: str) -> Subject:
        """Read a subject; raises `InvalidNameError` for a subject without a topic.

        If two tables may be the topic's, `path` is the first.
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
    """Return the name of the subject for a part of a table's records."""
    return f"{topic_name_of(path, properties)}-{part}"
