"""Requests of Kafka's clients that make sense here and there: drawn field by field, some damaged.

Names are often those of tables, positions and epochs often nearly right, records often ones that a
table takes: what is drawn comes past the checks of a request's form and into what answers it.
"""

from __future__ import annotations

import dataclasses
import datetime
import random
import typing
import uuid
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

from streamhouse.storage_service.kafka.messages.requests import request_class
from streamhouse.storage_service.kafka.messages.shapes import shape_of
from streamhouse.storage_service.kafka_door._apis import APIS
from tests.support.kafka_batches import produced, records
from tests.support.kafka_world import request_bytes

__all__ = ["DrawnRequest", "RandomRequests"]

PRODUCE, DELETE_TOPICS, JOIN, SYNC = 0, 20, 11, 14
_NAMES: Final = (
    *("none", "a.b.c", "a-b-c", "", "x" * 260, "\u00e9\0", "default.x", "x$rejected"),
    *(".", "..", "g", "0", "1", "-1", "raw", "avro", "kafka.value.format", "retention.ms"),
    *("cleanup.policy", "table.log.ttl", "range", "consumer", "\ud7ff", "no topic"),
)
_NUMBERS: Final = (
    *(-1, 0, 1, 2, 5, -2, -3, -4, -5, -6, 30, 59, 60, 61, 127, -128, 255, 1_000, 32_767, -32_768),
    *((1 << 31) - 1, -1 << 31, (1 << 63) - 1, -1 << 63, 1_600_000_001_000, 1_795_000_000_000),
)
_BITS: Final = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
_VALUES: Final = (
    *(b"a", None, b'{"id": 1}', b'{"id": 2, "name": "x"}', b"\xff", b"\0\0\0\0\1x", b"", b"{"),
    b'{"op": "c", "after": {"id": 3}}',
)
_KEYS: Final = (None, b"k", b"1", b'{"id": 1}', b"\xff", b"")


class DrawnRequest(NamedTuple):
    """A request with its length."""

    api_key: int
    version: int
    data: bytes
    is_damaged: bool
    is_answered: bool
    """Whether an answer must come soon, unless the connection ends."""


class RandomRequests:
    """Draws requests about some topics, which none of them drops; the same for the same chance."""

    def __init__(self, chance: random.Random, topics: Sequence[str]) -> None:
        self._chance = chance
        self._topics = tuple(topics)

    def draw(self, number: int) -> DrawnRequest:
        """Draw a request with this correlation id."""
        chance = self._chance
        while True:
            api = APIS[chance.choice(list(APIS))]
            version = chance.randint(*api.versions)
            values = self._fields(request_class(api.key, version))
            if api.key == DELETE_TOPICS:
                values = self._without_topics(values)
            try:
                data = request_bytes(api.key, version, values, correlation_id=number)
            except (ValueError, TypeError, OverflowError):
                # What was drawn has no form: null where nothing may be null.
                continue
            waits = api.key in (JOIN, SYNC)
            is_silent = api.key == PRODUCE and values.get("acks") == 0
            is_damaged = chance.random() < 0.2
            if is_damaged:
                data = self._damaged(data)
            return DrawnRequest(api.key, version, data, is_damaged, not (waits or is_silent))

    def _damaged(self, data: bytes) -> bytes:
        """Change some bytes, of the length too."""
        chance = self._chance
        damaged = bytearray(data)
        for _ in range(chance.choice((1, 1, 3))):
            first = chance.choice((0, 14, 14, 14))
            at = chance.randrange(min(first, len(damaged) - 1), len(damaged))
            damaged[at] = chance.choice((0, 1, 127, 128, 255, chance.randrange(256)))
        return bytes(damaged)

    def _without_topics(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return a request to drop topics that drops none of those that all requests are about."""
        named = [t for t in values.get("topics") or () if t.get("name") not in self._topics]
        kept = [name for name in values.get("topic_names") or () if name not in self._topics]
        told = {"topics": named, "topic_names": kept}
        return {name: told.get(name, value) for name, value in values.items()}

    def _fields(self, kind: type) -> dict[str, Any]:
        chance = self._chance
        hints = typing.get_type_hints(kind)
        drawn: dict[str, Any] = {}
        for field in dataclasses.fields(kind):
            element, is_array, may_be_null = shape_of(hints[field.name])
            if field.default is not dataclasses.MISSING and chance.random() < 0.4:
                continue
            if may_be_null and chance.random() < 0.2:
                drawn[field.name] = None
                continue
            kafka_type = field.metadata.get("kafka_type")
            count = chance.choice((0, 1, 1, 2, 3)) if is_array else 1
            found = [
                self._fields(element)
                if kafka_type is None
                else self._value(field.name, kafka_type, is_array=is_array)
                for _ in range(count)
            ]
            drawn[field.name] = found if is_array else found[0]
        return drawn

    def _value(self, name: str, kafka_type: str, *, is_array: bool) -> Any:
        likely = self._likely(name, kafka_type)
        if likely and self._chance.random() < 0.7:
            return self._chance.choice(likely)
        return self._any(kafka_type)

    def _likely(self, name: str, kafka_type: str) -> tuple[Any, ...]:
        """Return what a field of this name often has, or nothing."""
        if kafka_type == "string":
            if name in ("name", "topic", "resource_name", "topics"):
                return self._topics
            return {"group_id": ("g",), "transactional_id": (None,)}.get(name, ())
        return {
            "acks": (-1, 0, 1),
            "session_id": (0,),
            "num_partitions": (-1, 0, 1, 2),
            **dict.fromkeys(("partition", "partition_index", "index"), (0, 1)),
            **dict.fromkeys(("partition_indexes", "partitions"), (0, 1)),
        }.get(name, ())

    def _any(self, kafka_type: str) -> Any:
        chance = self._chance
        if (bits := _BITS.get(kafka_type)) is not None:
            least, most = -1 << bits - 1, (1 << bits - 1) - 1
            return max(least, min(most, chance.choice((*_NUMBERS, chance.randint(least, most)))))
        return {
            "bool": lambda: chance.random() < 0.5,
            "uint16": lambda: chance.choice((0, 1, 65_535)),
            "uint32": lambda: chance.choice((0, 1, 65_535)),
            "float64": chance.random,
            "string": lambda: chance.choice((*_NAMES, *self._topics)),
            "bytes": lambda: chance.choice((b"", b"x", b"\0a\0b", chance.randbytes(20))),
            "records": self._batch,
            "uuid": lambda: chance.choice((None, uuid.UUID(int=chance.getrandbits(128)))),
            "timedelta_i32": lambda: _milliseconds(chance.choice((0, 1, -1, 30))),
            "timedelta_i64": lambda: _milliseconds(chance.choice((0, 1, -1, 6_000, -86_400_000))),
            "datetime_i64": lambda: datetime.datetime.fromtimestamp(0, datetime.UTC),
            "error_code": lambda: ErrorCode.none,
        }[kafka_type]()

    def _batch(self) -> bytes:
        """Return records of a producer, whole ones, some damaged, or no records."""
        chance = self._chance
        count = chance.choice((1, 2, 5, 30))
        whole = produced(
            records(chance.choices(_VALUES, k=count), keys=chance.choices(_KEYS, k=count)),
            producer_id=chance.choice((-1, 7, (1 << 63) - 1, -5)),
            epoch=chance.choice((-1, 0, 1, 32_767)),
            sequence=chance.choice((-1, 0, 1, (1 << 31) - 1)),
        )
        at = chance.randrange(len(whole))
        return chance.choice(
            (
                *[whole] * 4,
                whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 :],
                whole[:at],
                whole + whole,
                b"",
                chance.randbytes(at),
            )
        )


def _milliseconds(count: int) -> datetime.timedelta:
    return datetime.timedelta(milliseconds=count)
