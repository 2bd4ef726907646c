"""The schemas of one table's records, and their ids.

An id is 1000 times the table's id, plus the schema's number in the table. Table ids are unique in a
service, including all shards, and never reused. Numbers are never reused either, because schemas
are never removed. Therefore an id names one schema for ever, shows the table without an index, and
needs no agreement between shards. Some numbers and bytes are reserved for the service's own
schemas: a table whose columns change stays readable, however many schemas producers have
registered.

An id has 31 bits in the framing of records, so tables with ids above 2,147,483 have no schemas.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from streamhouse.core.errors import (
    CorruptDataError,
    InvalidRequestError,
    InvalidSchemaError,
    NotFoundError,
    OverloadedError,
    RequestTooLargeError,
    StreamhouseError,
    UnsupportedError,
)
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.kafka.registry.subjects import Part

__all__ = ["RegisteredSchema", "SchemaSet", "compact", "table_id_of"]

_NUMBERS: Final = 1_000
SCHEMAS_MAX: Final = _NUMBERS - 1
SCHEMA_BYTES_MAX: Final = 256 << 10
BYTES_MAX: Final = 4 << 20
"""The limit for all schemas of a table, which are one file that each registration rewrites."""
_RESERVED_COUNT: Final = 100
_RESERVED_BYTES: Final = 512 << 10
PRODUCER_SCHEMAS_MAX: Final = SCHEMAS_MAX - _RESERVED_COUNT
"""The limit for registrations by producers, including the new schema."""
PRODUCER_BYTES_MAX: Final = BYTES_MAX - _RESERVED_BYTES
_ID_MAX: Final = (1 << 31) - 1
_VERSION_MEMBER: Final = "streamhouse.version"
"""Avro allows further members in a schema, which readers ignore."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredSchema:
    """A schema; `number` counts in the table, `version` counts in the part, both from 1.

    The fields' names are the columns' names in version `table_schema` of the table's schema. None
    marks a schema from before this field existed.
    """

    part: Part
    number: int
    version: int
    text: str
    table_schema: int | None = None
    canonical: str = field(init=False, compare=False, repr=False)
    """The text for comparisons: without white space, members sorted."""

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
    def stored(cls, table_id: int, content: Mapping[str, Any], *, place: str) -> SchemaSet:
        """Read the content of the file `place`; raises `CorruptDataError` for invalid content."""
        try:
            return cls.from_json(table_id, content)
        except (StreamhouseError, KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(f"{place} holds no schemas of records: {error}") from error

    @classmethod
    def from_json(cls, table_id: int, value: Mapping[str, Any]) -> SchemaSet:
        """Read the JSON form; raises `ValueError` or `KeyError` for an invalid set."""
        schemas = tuple(
            RegisteredSchema(
                part=Part(entry["part"]),
                number=int(entry["number"]),
                version=int(entry["version"]),
                text=str(entry["schema"]),
                table_schema=None
                if (version := entry.get("table_schema")) is None
                else int(version),
            )
            for entry in value["schemas"]
        )
        versions = dict.fromkeys(Part, 0)
        for number, schema in enumerate(schemas, start=1):
            versions[schema.part] += 1
            if (schema.number, schema.version) != (number, versions[schema.part]):
                raise ValueError(f"schema {number} has the number or version of another schema")
        if len(schemas) > SCHEMAS_MAX or len({(o.part, o.canonical) for o in schemas}) < len(
            schemas
        ):
            raise ValueError("it has too many schemas, or one of them twice")
        return cls(table_id, schemas)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"schemas": [schema.to_json() for schema in self.schemas]}

    def id_of(self, schema: RegisteredSchema) -> int:
        """Return the id of a schema in records."""
        return self.table_id * _NUMBERS + schema.number

    def of(self, part: Part) -> Sequence[RegisteredSchema]:
        """Return the schemas of a part, by version."""
        return [schema for schema in self.schemas if schema.part is part]

    def find(self, part: Part, text: str) -> RegisteredSchema | None:
        """Return the part's schema that is equal except for white space and order of members."""
        canonical = _canonical(text)
        return next((s for s in self.of(part) if s.canonical == canonical), None)

    def with_id(self, schema_id: int) -> RegisteredSchema:
        """Return the schema with an id; raises `NotFoundError` for an id of another table."""
        table_id, number = divmod(schema_id, _NUMBERS)
        if table_id != self.table_id or not 1 <= number <= len(self.schemas):
            raise NotFoundError(f"schema {schema_id} belongs to another table")
        return self.schemas[number - 1]

    def schema(self, schema_id: int, /) -> str:
        """See `SchemaSource`."""
        return self.with_id(schema_id).text

    def table_schema(self, schema_id: int, /) -> int | None:
        """See `SchemaSource`."""
        return self.with_id(schema_id).table_schema

    def with_table_schema(self, table_schema: int, *, since: int) -> SchemaSet:
        """Return the set with this table version for all schemas after the first `since`."""
        new = (replace(schema, table_schema=table_schema) for schema in self.schemas[since:])
        return SchemaSet(self.table_id, (*self.schemas[:since], *new))

    def latest(self, path: TablePath, part: str, /) -> tuple[int, str]:
        """See `SchemaSource`."""
        part_schemas = self.of(Part(part))
        if not part_schemas:
            raise NotFoundError(
                f"table '{path}' has no schema of Avro for its {part}; register one, as serializers"
                " do"
            )
        return self.id_of(part_schemas[-1]), part_schemas[-1].text

    @property
    def room_bytes(self) -> int:
        """The limit for the bytes of the service's own schema, if fewer bytes suffice.

        As much as producers have left, and at least the service's reserved share.
        """
        remaining_bytes = PRODUCER_BYTES_MAX - self._byte_count
        return min(max(remaining_bytes, _RESERVED_BYTES // _RESERVED_COUNT), SCHEMA_BYTES_MAX)

    def with_newest(self, part: Part, text: str) -> SchemaSet:
        """Return the set with the service's own schema as the newest schema of a part.

        If an older version has the same text, the schema is added again with its version inside,
        because texts must differ. Raises as `with_schema`.
        """
        part_schemas = self.of(part)
        if part_schemas and (same_schema := self.find(part, text)) is not None:
            if same_schema is part_schemas[-1]:
                return self
            versioned = {**json.loads(text), _VERSION_MEMBER: len(part_schemas) + 1}
            text = json.dumps(versioned, separators=(",", ":"))
        return self._with(part, text, count_max=SCHEMAS_MAX, bytes_max=BYTES_MAX)

    def with_schema(self, part: Part, text: str) -> SchemaSet:
        """Return the set with one more schema, or the same set if the schema is present.

        Raises `OverloadedError` or `RequestTooLargeError` above the limits, and `UnsupportedError`
        if the table's id is too large.
        """
        if self.find(part, text) is not None:
            return self
        size = len(text.encode())
        if size > SCHEMA_BYTES_MAX:
            raise RequestTooLargeError(
                f"the schema has {size} bytes; at most {SCHEMA_BYTES_MAX} are possible"
            )
        return self._with(part, text, count_max=PRODUCER_SCHEMAS_MAX, bytes_max=PRODUCER_BYTES_MAX)

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
        return sum(len(schema.text.encode()) for schema in self.schemas)


def table_id_of(schema_id: int) -> int:
    """Return the id of the only table that may have the schema."""
    return schema_id // _NUMBERS


def compact(text: str) -> str:
    """Return a schema without white space; raises `InvalidSchemaError` if the text is no JSON."""
    if len(text) > SCHEMA_BYTES_MAX:
        raise RequestTooLargeError(
            f"the schema has {len(text)} characters; at most {SCHEMA_BYTES_MAX} bytes are possible"
        )
    try:
        value = json.loads(text)
        compact_text = json.dumps(value, separators=(",", ":"))
        # Half a surrogate pair cannot be encoded in an answer.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        bare = text.strip()
        if bare.replace("_", "").isalnum():
            return json.dumps(bare)
        raise InvalidSchemaError(f"the schema is no JSON: {error}") from error
    if not isinstance(value, str | dict | list):
        raise InvalidRequestError("the schema is no schema of Avro: it is a text, object or list")
    return compact_text


def _canonical(text: str) -> str:
    value = json.loads(text)
    return json.dumps(_unnested(value), sort_keys=True, separators=(",", ":"))


def _unnested(value: Any) -> Any:
    """Return the shortest form of a type: `{"type": "string"}` becomes `"string"`."""
    if isinstance(value, Mapping) and set(value) == {"type"} and isinstance(value["type"], str):
        return value["type"]
    return value
