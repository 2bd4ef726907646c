"""The schemas of one table's records, and their ids.

An id is 1000 times the table's id, plus the schema's number in the table. Table ids are unique in a
service, also over its shards, and are never given again; so are the numbers of a table, because
none of its schemas is ever taken away. Some numbers, and bytes, are kept for schemas that the
service registers itself: a table whose columns change can be read, however many schemas producers
have registered. So an id names one schema for ever, says which table has it
without any index, and nobody has to agree on it. In the framing of records it has 31 bits: tables
with ids above 2,147,483 can have no schemas.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from streamhouse.core.errors import (
    InvalidRequestError,
    InvalidSchemaError,
    NotFoundError,
    OverloadedError,
    RequestTooLargeError,
    UnsupportedError,
)
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.kafka.registry.subjects import Part

__all__ = ["RegisteredSchema", "SchemaSet", "compact", "table_id_of"]

_NUMBERS: Final = 1_000
SCHEMAS_MAX: Final = _NUMBERS - 1
SCHEMA_BYTES_MAX: Final = 256 << 10
BYTES_MAX: Final = 4 << 20
"""Of all schemas of a table: they are one file, written anew with each of them."""
_KEPT: Final = 100
_KEPT_BYTES: Final = 512 << 10
GIVEN_MAX: Final = SCHEMAS_MAX - _KEPT
"""At most how many schemas there are when a producer registers one more, itself included."""
GIVEN_BYTES_MAX: Final = BYTES_MAX - _KEPT_BYTES
_ID_MAX: Final = (1 << 31) - 1
_VERSION_MEMBER: Final = "streamhouse.version"
"""Avro lets a schema have members of any other name, which mean nothing to its readers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredSchema:
    """A schema; `number` counts those of the table, `version` those of the part, both from 1.

    Its fields are called as the columns in version `table_schema` of the table's schema; None: it
    was registered before that was kept.
    """

    part: Part
    number: int
    version: int
    text: str
    table_schema: int | None = None
    canonical: str = field(init=False, compare=False, repr=False)
    """The text as it is compared: without white space, members sorted."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "canonical", _canonical(self.text))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "part": str(self.part),
            "number": self.number,
            "version": self.version,
            "schema": self.text,
            **({} if self.table_schema is None else {"table_schema": self.table_schema}),
        }


@dataclass(frozen=True)
class SchemaSet:
    """The schemas of the table with this id, in the order of their numbers. Any thread."""

    table_id: int
    schemas: tuple[RegisteredSchema, ...] = ()

    @classmethod
    def from_json(cls, table_id: int, value: Mapping[str, Any]) -> SchemaSet:
        """Read the JSON form; raises `ValueError` or `KeyError` if it is of no such set."""
        found = tuple(
            RegisteredSchema(
                part=Part(one["part"]),
                number=int(one["number"]),
                version=int(one["version"]),
                text=str(one["schema"]),
                table_schema=None if (kept := one.get("table_schema")) is None else int(kept),
            )
            for one in value["schemas"]
        )
        versions = dict.fromkeys(Part, 0)
        for number, one in enumerate(found, start=1):
            versions[one.part] += 1
            if (one.number, one.version) != (number, versions[one.part]):
                raise ValueError(f"schema {number} says that it is another one")
        if len(found) > SCHEMAS_MAX or len({(o.part, o.canonical) for o in found}) < len(found):
            raise ValueError("it has too many schemas, or one of them twice")
        return cls(table_id, found)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"schemas": [one.to_json() for one in self.schemas]}

    def id_of(self, schema: RegisteredSchema) -> int:
        """Return the id that records name a schema by."""
        return self.table_id * _NUMBERS + schema.number

    def of(self, part: Part) -> Sequence[RegisteredSchema]:
        """Return the schemas of a part, by version."""
        return [one for one in self.schemas if one.part is part]

    def find(self, part: Part, text: str) -> RegisteredSchema | None:
        """Return the schema of a part that is the same but for white space and order of members."""
        wanted = _canonical(text)
        return next((one for one in self.of(part) if one.canonical == wanted), None)

    def with_id(self, schema_id: int) -> RegisteredSchema:
        """Return the schema with an id; raises `NotFoundError` if it is none of the table's."""
        table_id, number = divmod(schema_id, _NUMBERS)
        if table_id != self.table_id or not 1 <= number <= len(self.schemas):
            raise NotFoundError(f"schema {schema_id} is none of this table's")
        return self.schemas[number - 1]

    def schema(self, schema_id: int, /) -> str:
        """See `SchemaSource`."""
        return self.with_id(schema_id).text

    def table_schema(self, schema_id: int, /) -> int | None:
        """See `SchemaSource`."""
        return self.with_id(schema_id).table_schema

    def named_by(self, table_schema: int, *, since: int) -> SchemaSet:
        """Return the set with schemas behind the first `since` by this version of the table."""
        new = (replace(one, table_schema=table_schema) for one in self.schemas[since:])
        return SchemaSet(self.table_id, (*self.schemas[:since], *new))

    def latest(self, path: TablePath, part: str, /) -> tuple[int, str]:
        """See `SchemaSource`."""
        own = self.of(Part(part))
        if not own:
            raise NotFoundError(
                f"table '{path}' has no schema of Avro for its {part}; register one, as serializers"
                " do"
            )
        return self.id_of(own[-1]), own[-1].text

    @property
    def room_bytes(self) -> int:
        """At most how many bytes a schema of the service's own may have, unless it needs more.

        As much as a producer's, and else its share of what is kept for the service.
        """
        left = GIVEN_BYTES_MAX - self._byte_count
        return min(max(left, _KEPT_BYTES // _KEPT), SCHEMA_BYTES_MAX)

    def with_newest(self, part: Part, text: str) -> SchemaSet:
        """Return the set with a schema of the service's own as the newest of a part.

        One that is there already, behind which another one came, is there twice then: the second
        one says its version, since no two have the same text. Raises as `with_schema`.
        """
        of_part = self.of(part)
        if of_part and (known := self.find(part, text)) is not None:
            if known is of_part[-1]:
                return self
            named = {**json.loads(text), _VERSION_MEMBER: len(of_part) + 1}
            text = json.dumps(named, separators=(",", ":"))
        return self._with(part, text, count_max=SCHEMAS_MAX, bytes_max=BYTES_MAX)

    def with_schema(self, part: Part, text: str) -> SchemaSet:
        """Return the set with one more schema, or itself if it has that one.

        Raises `OverloadedError` or `RequestTooLargeError` if that is too much, `UnsupportedError`
        if the table's id is too large.
        """
        if self.find(part, text) is not None:
            return self
        size = len(text.encode())
        if size > SCHEMA_BYTES_MAX:
            raise RequestTooLargeError(
                f"the schema has {size} bytes; at most {SCHEMA_BYTES_MAX} are possible"
            )
        return self._with(part, text, count_max=GIVEN_MAX, bytes_max=GIVEN_BYTES_MAX)

    def _with(self, part: Part, text: str, *, count_max: int, bytes_max: int) -> SchemaSet:
        number = len(self.schemas) + 1
        if number > count_max:
            raise OverloadedError(
                f"the table has {len(self.schemas)} schemas of records, and there may be"
                f" {count_max}; schemas that differ with every producer do not belong here: give"
                " the rows to a new table"
            )
        if len(text.encode()) + self._byte_count > bytes_max:
            raise OverloadedError(
                f"the schemas of the table would have more than {bytes_max} bytes together; give"
                " the rows to a new table"
            )
        if self.table_id * _NUMBERS + number > _ID_MAX:
            raise UnsupportedError(
                f"the table's id {self.table_id} is too large for ids of schemas, which have 31"
                " bits"
            )
        added = RegisteredSchema(
            part=part, number=number, version=len(self.of(part)) + 1, text=text
        )
        return SchemaSet(self.table_id, (*self.schemas, added))

    @functools.cached_property
    def _byte_count(self) -> int:
        return sum(len(one.text.encode()) for one in self.schemas)


def table_id_of(schema_id: int) -> int:
    """Return the id of the table that may have the schema with an id."""
    return schema_id // _NUMBERS


def compact(text: str) -> str:
    """Return a schema without white space; raises `InvalidSchemaError` for what is no JSON."""
    if len(text) > SCHEMA_BYTES_MAX:
        raise RequestTooLargeError(
            f"the schema has {len(text)} characters; at most {SCHEMA_BYTES_MAX} bytes are possible"
        )
    try:
        value = json.loads(text)
        made = json.dumps(value, separators=(",", ":"))
        # Whoever names half a surrogate pair can be told nothing of it.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        bare = text.strip()
        if bare.replace("_", "").isalnum():
            return json.dumps(bare)
        raise InvalidSchemaError(f"the schema is no JSON: {error}") from error
    if not isinstance(value, str | dict | list):
        raise InvalidRequestError("the schema is no schema of Avro: it is a text, object or list")
    return made


def _canonical(text: str) -> str:
    value = json.loads(text)
    return json.dumps(_unnested(value), sort_keys=True, separators=(",", ":"))


def _unnested(value: Any) -> Any:
    """Return a type as it is named shortest: `{"type": "string"}` is `"string"`."""
    if isinstance(value, Mapping) and set(value) == {"type"} and isinstance(value["type"], str):
        return value["type"]
    return value
