"""A table: its path, its descriptor from the creator, and its info from the service."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import pyarrow as pa

from streamhouse.core.errors import (
    InvalidNameError,
    InvalidRequestError,
    InvalidSchemaError,
    listing,
)
from streamhouse.core.model.changelog import changelog_schema
from streamhouse.core.model.merge_engine import (
    DeleteBehavior,
    MergeRules,
    is_merge_property,
)
from streamhouse.core.model.offsets import (
    buckets_to_json,
    check_positions,
    offsets_from_json,
)
from streamhouse.core.model.partitioning import BatchLayout, PartitionField
from streamhouse.core.model.properties import TableProperties
from streamhouse.core.model.records.record_format import RecordFormat, is_record_property
from streamhouse.core.model.schema import Schema, type_name
from streamhouse.core.model.values.checks import CheckText, check_texts, is_check_property
from streamhouse.core.model.values.notebook import html_table

__all__ = [
    "BUCKET_COUNT_MAX",
    "DEFAULT_DATABASE",
    "REJECTED_SUFFIX",
    "VERSION_HEADER",
    "TableDescriptor",
    "TableInfo",
    "TablePath",
    "check_no_twin",
    "table_id_of",
    "twins",
]

DEFAULT_DATABASE: Final = "default"
VERSION_HEADER: Final = b"x-table-version"
"""A response header with the id of the rows' table and the schema version; see `version`."""
BUCKET_COUNT_MAX: Final = 4_096
REJECTED_SUFFIX: Final = "__rejected"
"""The suffix of the table with the rejected rows of a table: `t__rejected` for `t`."""
_REJECTED_PART: Final = "$rejected"
_Name = TypeVar("_Name")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


def table_id_of(headers: Mapping[bytes, bytes]) -> int | None:
    """Return the id of the table of a response with rows, if the headers have the id."""
    table_id = headers.get(VERSION_HEADER, b"").partition(b".")[0]
    return int(table_id) if table_id.isdigit() else None


def check_name(kind: str, name: str) -> None:
    """Raise `InvalidNameError` unless `name` may name a database or table."""
    if not _NAME.fullmatch(name):
        parts = ""
        if "$" in name:
            parts = "; client.read, scan, count and query, and Spark, read the parts of a table"
        raise InvalidNameError(
            f"{kind} name '{name[:140]}' is not valid: use 1 to 128 letters, digits and"
            f" underscores, not starting with a digit{parts}"
        )


@dataclass(frozen=True, slots=True, order=True)
class TablePath:
    """`database.table`."""

    database: str
    table: str

    def __post_init__(self) -> None:
        check_name("database", self.database)
        check_name("table", self.table)

    @classmethod
    def parse(cls, text: str | TablePath) -> TablePath:
        """Read `database.table`, or `table` in database `default`.

        `database.table$rejected` is the table with the rejected rows.
        """
        if isinstance(text, TablePath):
            return text
        if not isinstance(text, str):
            raise InvalidNameError(
                f"a table's path is a text, as 'database.table', not {type(text).__name__}"
                f" {text!r:.80}"
            )
        return _parsed(text)

    def __str__(self) -> str:
        return f"{self.database}.{self.table}"


# Every request names a table, and most requests name the same few tables.
@functools.lru_cache(maxsize=1_024)
def _parsed(text: str) -> TablePath:
    if text.endswith(_REJECTED_PART):
        text = text.removesuffix(_REJECTED_PART) + REJECTED_SUFFIX
    parts = text.split(".")
    if len(parts) == 1:
        return TablePath(DEFAULT_DATABASE, parts[0])
    if len(parts) == 2:
        return TablePath(parts[0], parts[1])
    raise InvalidNameError(f"'{text[:200]}' is not a table path: write 'database.table'")


def twins(name: _Name, others: Iterable[_Name]) -> list[_Name]:
    """Return the names that differ from `name` in case alone."""
    return [other for other in others if other != name and str(other).lower() == str(name).lower()]


def check_no_twin(kind: str, name: _Name, others: Iterable[_Name]) -> None:
    """Raise `InvalidNameError` if a new name differs from another in case alone."""
    for twin in twins(name, others):
        raise InvalidNameError(
            f"{kind} '{name}' would differ from {kind} '{twin}' in case alone, and Spark and DuckDB"
            " take both for one: use that name, or another one"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDescriptor:
    """A table as described by its creator, checked as a whole.

    An empty `bucket_key` of a log table spreads rows evenly; of a primary key table it means the
    primary key. `properties` holds only the properties set; defaults are in `TableProperties`.
    """

    path: TablePath
    schema: Schema
    primary_key: tuple[str, ...] = ()
    bucket_count: int = 1
    bucket_key: tuple[str, ...] = ()
    partitioned_by: tuple[PartitionField, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    checks: frozenset[CheckText] = field(init=False, repr=False, compare=False)
    """The constraints among the properties."""
    _record_format: RecordFormat = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        table = str(self.path)
        if not 1 <= self.bucket_count <= BUCKET_COUNT_MAX:
            raise InvalidSchemaError(
                f"table '{table}': bucket count {self.bucket_count} is not in 1..{BUCKET_COUNT_MAX}"
            )
        for kind, key in (("primary key", self.primary_key), ("bucket key", self.bucket_key)):
            if len(set(key)) != len(key):
                raise InvalidSchemaError(f"table '{table}': {kind} names a column twice")
            for name in key:
                _check_key_column(self.schema, name, kind=kind, table=table)
        for name in self.primary_key:
            if self.schema.column(name, table=table).nullable:
                raise InvalidSchemaError(
                    f"table '{table}': primary key column '{name}' must not be nullable:"
                    ' declare it NOT NULL, or "nullable": false in JSON'
                )
        if self.primary_key and not set(self.bucket_key) <= set(self.primary_key):
            raise InvalidSchemaError(
                f"table '{table}': bucket key {list(self.bucket_key)} must be part of the"
                f" primary key {list(self.primary_key)}"
            )
        seen: set[str] = set()
        for partition_field in self.partitioned_by:
            partition_field.check(self.schema, table=table)
            if partition_field.name in seen:
                raise InvalidSchemaError(
                    f"table '{table}': partition field '{partition_field}' is given twice"
                )
            seen.add(partition_field.name)
        self._check_lake_properties()
        self.batch_layout()
        self.merge_rules()
        record_format = RecordFormat.parse(
            self.properties, schema=self.schema, primary_key=self.primary_key, table=table
        )
        object.__setattr__(self, "_record_format", record_format)
        checks = frozenset(check_texts(self.properties, table=table))
        object.__setattr__(self, "checks", checks)

    def _check_lake_properties(self) -> None:
        where = f"table '{self.path}': property"
        properties = TableProperties.parse(self.properties, table=str(self.path))
        if properties.datalake_changelog and not self.primary_key:
            raise InvalidSchemaError(
                f"{where} table.datalake.changelog needs a primary key; the lake table of a log"
                " table is its full history already"
            )
        behavior = self.merge_rules().delete_behavior
        if (
            properties.datalake_ttl_ms is not None
            and self.primary_key
            and behavior is not DeleteBehavior.ALLOW
        ):
            raise InvalidSchemaError(
                f"{where} table.datalake.ttl deletes the rows of a primary key table that have"
                f" reached it, and this table has table.delete.behavior = {behavior}; leave the"
                " property out, or make the table with allow (engines last_row and aggregation)"
            )

    def batch_layout(self) -> BatchLayout | None:
        """Return the table's second layout in the lake, or None."""
        return BatchLayout.parse(self.properties, schema=self.schema, table=str(self.path))

    def merge_rules(self) -> MergeRules:
        """Return how rows of the same key are merged; a log table has the defaults."""
        return MergeRules.parse(
            self.properties,
            schema=self.schema,
            primary_key=self.primary_key,
            table=str(self.path),
        )

    def record_format(self) -> RecordFormat:
        """Return the table's format of Kafka records."""
        return self._record_format

    @property
    def effective_bucket_key(self) -> tuple[str, ...]:
        """The columns that decide a row's bucket; empty when rows are spread evenly."""
        return self.bucket_key or self.primary_key

    def differences(self, other: TableDescriptor) -> list[str]:
        """Return the differences of `other`, each in a few words, as `the primary key is ...`.

        Comments do not count, nor do properties set only in `other`.
        """
        columns, other_columns = _columns_in_words(self), _columns_in_words(other)
        differences = [
            f"column '{name}' is {words} there, and {columns[name]} here"
            if name in columns
            else f"column '{name}' is there, and not here"
            for name, words in other_columns.items()
            if columns.get(name) != words
        ]
        differences += [
            f"column '{name}' is not there" for name in columns if name not in other_columns
        ]
        if not differences and list(columns) != list(other_columns):
            order = listing("columns", list(other_columns))
            differences.append(f"its columns come in another order: {order}")
        for part, other_value, value in (
            ("primary key", list(other.primary_key), list(self.primary_key)),
            ("bucket key", list(other.effective_bucket_key), list(self.effective_bucket_key)),
            ("number of buckets", other.bucket_count, self.bucket_count),
            ("partitioning", _texts(other.partitioned_by), _texts(self.partitioned_by)),
        ):
            if other_value != value:
                differences.append(f"the {part} is {other_value} there, and {value} here")
        for key, text in self.properties.items():
            other_text = other.properties.get(key)
            if other_text != text:
                shown = "not set" if other_text is None else f"'{other_text}'"
                differences.append(f"property {key} is {shown} there, and '{text}' here")
        return differences

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form used on the wire and on disk."""
        return {
            "path": str(self.path),
            "schema": self.schema.to_json(),
            "primary_key": list(self.primary_key),
            "bucket_count": self.bucket_count,
            "bucket_key": list(self.bucket_key),
            "partitioned_by": [str(f) for f in self.partitioned_by],
            "properties": dict(self.properties),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TableDescriptor:
        """Read the JSON form; raises `InvalidRequestError` for a malformed one."""
        fields = {
            "path",
            "schema",
            "primary_key",
            "bucket_count",
            "bucket_key",
            "partitioned_by",
            "properties",
        }
        unknown = sorted(set(value) - fields)
        if unknown:
            raise InvalidRequestError(f"table descriptor has no field '{unknown[0][:80]}'")
        if not isinstance(value.get("path"), str):
            raise InvalidRequestError("table descriptor needs 'path', as 'database.table'")
        bucket_count = value.get("bucket_count", 1)
        if not isinstance(bucket_count, int) or isinstance(bucket_count, bool):
            raise InvalidRequestError(f"bucket_count must be an integer, not {bucket_count!r}")
        properties = value.get("properties", {})
        if not isinstance(properties, Mapping):
            raise InvalidRequestError("properties must be an object of strings")
        return cls(
            path=TablePath.parse(value["path"]),
            schema=Schema.from_json(value.get("schema")),
            primary_key=_strings(value, "primary_key"),
            bucket_count=bucket_count,
            bucket_key=_strings(value, "bucket_key"),
            partitioned_by=tuple(
                PartitionField.parse(text) for text in _strings(value, "partitioned_by")
            ),
            properties={str(k): str(v) for k, v in properties.items()},
        )


def _columns_in_words(table: TableDescriptor) -> dict[str, str]:
    return {
        column.name: type_name(column.type) + ("" if column.nullable else " NOT NULL")
        for column in table.schema.columns
    }


def _texts(fields: Sequence[PartitionField]) -> list[str]:
    return [str(field) for field in fields]


def _strings(value: Mapping[str, Any], name: str) -> tuple[str, ...]:
    items: Sequence[Any] = value.get(name, [])
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise InvalidRequestError(f"{name} must be a list of strings")
    return tuple(items)


def _check_key_column(schema: Schema, name: str, *, kind: str, table: str) -> None:
    column = schema.column(name, table=table)
    if pa.types.is_nested(column.type):
        raise InvalidSchemaError(
            f"table '{table}': {kind} column '{name}' has nested type {type_name(column.type)};"
            " use columns of simple types"
        )
    if kind == "primary key" and pa.types.is_floating(column.type):
        raise InvalidSchemaError(
            f"table '{table}': primary key column '{name}' is {type_name(column.type)};"
            " floating point numbers make no reliable keys, use decimal or string"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TableInfo:
    """A table as kept by the service.

    `table_id` is never reused, so a table dropped and created again is another table.
    `schema_versions` has every schema of the table by schema id, including the current schema; rows
    in the log keep the version of their write. Versions without any row are left out
    (`replace_columns`).

    `nodes` maps every bucket to the endpoint of its process, the same endpoint for all buckets;
    clients route by `nodes`. An empty string stands for the endpoint of the response.

    `adopted_from` maps the table's ids at other services to end offsets per bucket: rows below the
    end offset are the same rows here. `partition_names` has the lower-case names of partition
    fields in the table's earlier lake tables, each with its column id if the transform is the
    identity, else None.
    """

    descriptor: TableDescriptor
    table_id: int
    created_at_us: int
    schema_id: int = 0
    nodes: Mapping[int, str] = field(default_factory=dict)
    schema_versions: Mapping[int, Schema] = field(default_factory=dict)
    adopted_from: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    partition_names: Mapping[str, int | None] = field(default_factory=dict)
    path: TablePath = field(init=False, repr=False, compare=False)
    schema: Schema = field(init=False, repr=False, compare=False)
    """The current schema."""
    bucket_count: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("path", "schema", "bucket_count"):
            object.__setattr__(self, name, getattr(self.descriptor, name))
        if not self.schema_versions:
            object.__setattr__(self, "schema_versions", {self.schema_id: self.schema})

    def __repr__(self) -> str:
        columns = [f"{name} {words}" for name, words in _columns_in_words(self.descriptor).items()]
        key = ", ".join(self.descriptor.primary_key)
        return (
            f"TableInfo('{self.path}', {listing('columns', columns)}"
            f"{f'; primary key: {key}' if key else ''}; buckets: {self.bucket_count})"
        )

    def _repr_html_(self) -> str:
        """Return the view for a notebook: the columns, and the layout of the table."""
        captions = [f"table {self.path}", f"buckets: {self.bucket_count}"]
        partitioning = ", ".join(_texts(self.descriptor.partitioned_by))
        captions += [f"partitioned by: {partitioning}"] if partitioning else []
        key = self.descriptor.primary_key
        rows = [
            (
                column.name,
                type_name(column.type),
                "" if column.nullable else "NOT NULL",
                "primary key" if column.name in key else "",
                column.comment,
            )
            for column in self.schema.columns
        ]
        return html_table("; ".join(captions), ("column", "type", "null", "key", "comment"), rows)

    @property
    def version(self) -> bytes:
        """The id of the table and of its schema version, as in `VERSION_HEADER`."""
        return b"%d.%d" % (self.table_id, self.schema_id)

    def check_positions(self, offsets: Mapping[int, int], *, table_id: int | None) -> None:
        """Raise unless bucket -> offset, of the table with this id, are positions in this table.

        See `offsets.check_positions`.
        """
        # Nearly all requests name the same table id, or start at 0, and skip the check.
        if table_id != self.table_id and (table_id is not None or any(offsets.values())):
            check_positions(
                offsets,
                stated_id=table_id,
                table=str(self.path),
                table_id=self.table_id,
                adopted_from=self.adopted_from,
            )

    @property
    def stated_version(self) -> str:
        """The `schema_id` of a write: the version that defines the column names of the write."""
        return self.version.decode()

    @property
    def is_primary_key_table(self) -> bool:
        """Whether rows are upserted by key instead of appended."""
        return bool(self.descriptor.primary_key)

    @property
    def log_schema(self) -> pa.Schema:
        """The Arrow schema of the rows in the table's log.

        A log table's own columns; a primary key table's log is its changelog.
        """
        return self.log_schema_of(self.schema_id)

    def log_schema_of(self, schema_id: int) -> pa.Schema:
        """Return the Arrow schema of log rows written with this version."""
        schema = self.schema_version(schema_id)
        return changelog_schema(schema) if self.is_primary_key_table else schema.to_arrow()

    def bucket_key_of(self, schema_id: int) -> tuple[str, ...]:
        """Return the columns of the bucket key, by their names in this version."""
        if schema_id == self.schema_id:
            return self.descriptor.effective_bucket_key
        ids = {column.name: column.id for column in self.schema.columns}
        names = {c.id: c.name for c in self.schema_version(schema_id).columns}
        return tuple(names[ids[name]] for name in self.descriptor.effective_bucket_key)

    @property
    def column_ids(self) -> frozenset[int]:
        """The ids of all columns of all schema versions."""
        every = (column for schema in self.schema_versions.values() for column in schema.columns)
        return frozenset(column.id for column in every)

    def naming(self, columns: Iterable[str], schema_id: int | None) -> TableInfo:
        """Return the table as `in_version`; raises `UnknownColumnError` for an unknown column."""
        table = self.in_version(schema_id)
        for name in columns:
            table.schema.column(name, table=str(self.path))
        return table

    def in_version(self, schema_id: int | None) -> TableInfo:
        """Return the table as known to clients of this version; None: the current version.

        Keys have their names of this version. Merge rules, record formats and constraints are left
        out: readers do not need them, and their properties name columns of the current version.
        """
        if schema_id is None or schema_id == self.schema_id:
            return self
        schema = self.schema_version(schema_id)
        names = {c.id: c.name for c in schema.columns}
        renamed = {c.name: names.get(c.id) for c in self.schema.columns}

        def names_in_version(columns: Sequence[str]) -> tuple[str, ...]:
            return tuple(name for column in columns if (name := renamed[column]) is not None)

        descriptor = replace(
            self.descriptor,
            schema=schema,
            primary_key=names_in_version(self.descriptor.primary_key),
            bucket_key=names_in_version(self.descriptor.bucket_key),
            partitioned_by=(),
            properties={
                key: value
                for key, value in self.descriptor.properties.items()
                if not (is_merge_property(key) or is_record_property(key) or is_check_property(key))
            },
        )
        return replace(self, descriptor=descriptor, schema_id=schema_id)

    def schema_version(self, schema_id: int) -> Schema:
        """Return one version of the schema; raises `InvalidRequestError` if there is none."""
        schema = self.schema_versions.get(schema_id)
        if schema is None:
            first = min(self.schema_versions)
            replaced = ", which took the place of columns that never had a row" if first else ""
            raise InvalidRequestError(
                f"table '{self.path}' has no schema version {schema_id}; it has {first} to"
                f" {self.schema_id}{replaced}"
            )
        return schema

    def properties(self) -> TableProperties:
        """Return the typed properties with defaults filled in."""
        return TableProperties.parse(self.descriptor.properties, table=str(self.path))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form used on the wire and on disk."""
        adopted_from = {
            str(table_id): buckets_to_json(ends)
            for table_id, ends in sorted(self.adopted_from.items())
        }
        return {
            **self.descriptor.to_json(),
            **({"adopted_from": adopted_from} if adopted_from else {}),
            **({"partition_names": dict(self.partition_names)} if self.partition_names else {}),
            "table_id": self.table_id,
            "schema_id": self.schema_id,
            "created_at_us": self.created_at_us,
            "nodes": buckets_to_json(self.nodes),
            "schema_versions": {
                str(schema_id): schema.to_json()
                for schema_id, schema in sorted(self.schema_versions.items())
                if schema_id != self.schema_id
            },
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TableInfo:
        """Read the JSON form."""
        info_fields = {
            "table_id",
            "schema_id",
            "created_at_us",
            "nodes",
            "schema_versions",
            "adopted_from",
            "partition_names",
        }
        descriptor = TableDescriptor.from_json(
            {k: v for k, v in value.items() if k not in info_fields}
        )
        schema_id = int(value["schema_id"])
        earlier = value.get("schema_versions", {})
        return cls(
            descriptor=descriptor,
            table_id=int(value["table_id"]),
            schema_id=schema_id,
            created_at_us=int(value["created_at_us"]),
            nodes={int(b): str(node) for b, node in value.get("nodes", {}).items()},
            schema_versions={
                **{int(version): Schema.from_json(columns) for version, columns in earlier.items()},
                schema_id: descriptor.schema,
            },
            adopted_from={
                int(table_id): offsets_from_json(ends)
                for table_id, ends in value.get("adopted_from", {}).items()
            },
            partition_names={
                str(name): None if source is None else int(source)
                for name, source in value.get("partition_names", {}).items()
            },
        )
