"""A table's format of Kafka's records: the source of each column, as a checked value.

    kafka.topic = <name>, of a topic whose name is no table's
    kafka.value.format = raw | json | avro | debezium-json
    kafka.key.columns = <column>, ...
    kafka.key.format = raw | json | avro
    kafka.timestamp.column, kafka.headers.column = <column>
    kafka.on.error = refuse (default) | reject
    kafka.on.schema = keep (default) | replace
    kafka.changes.format = upsert (default) | debezium-json

A table without these properties has a default format: `raw` if all columns are columns of a topic,
and the primary key has at most `key`, else `json`. Creating or altering a table refuses
contradictory combinations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import pyarrow as pa

from streamhouse.core.errors import InvalidSchemaError
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.values._property_choice import property_choice

__all__ = [
    "RAW_TOPIC",
    "RECORD_PROPERTY_HELP",
    "ChangesFormat",
    "KeyFormat",
    "OnError",
    "OnSchema",
    "RecordFormat",
    "ValueFormat",
    "is_record_property",
    "record_columns",
    "with_renamed_column",
]

_TOPIC: Final = "kafka.topic"
_VALUE: Final = "kafka.value.format"
_KEY_COLUMNS: Final = "kafka.key.columns"
_KEY_FORMAT: Final = "kafka.key.format"
_TIMESTAMP: Final = "kafka.timestamp.column"
_HEADERS: Final = "kafka.headers.column"
_ON_ERROR: Final = "kafka.on.error"
_ON_SCHEMA: Final = "kafka.on.schema"
_CHANGES: Final = "kafka.changes.format"

RECORD_PROPERTY_HELP: Final[dict[str, tuple[str, str]]] = {
    _TOPIC: (
        "",
        "The topic's name, if different from a table's name: `orders.eu-1` of `orders_eu_1`.",
    ),
    _VALUE: (
        "",
        "What a record's value is: `raw`, `json`, `avro` or `debezium-json`. Not set: `raw` if the"
        " columns are `key`, `value`, `timestamp` and `headers`, and none but `key` is of the"
        " primary key, else `json`.",
    ),
    _KEY_COLUMNS: (
        "",
        "Columns from the record's key, as `a, b`. Not set: the primary key; of a raw table"
        " column `key`.",
    ),
    _KEY_FORMAT: (
        "",
        "What a record's key is: `raw`, `json` or `avro`. Not set: `raw` for one column of text or"
        " bytes, `avro` beside values that are, else `json`.",
    ),
    _TIMESTAMP: ("", "The column that has the record's timestamp; of a raw table `timestamp`."),
    _HEADERS: ("", "The column that has the record's headers; of a raw table `headers`."),
    _ON_ERROR: (
        "refuse",
        "A record that does not fit: `refuse` its batch, or `reject`: keep it in `<table>$rejected`"
        " and take the others.",
    ),
    _ON_SCHEMA: (
        "keep",
        "The first schema of a raw topic is registered: `keep` the columns, or `replace` them by"
        " its fields if the table never had a row, which ends this property. Topics that clients"
        " make have `replace`.",
    ),
    _CHANGES: (
        "upsert",
        "How a primary key table is read: `upsert`, where a delete has no value, or"
        " `debezium-json`.",
    ),
}
"""Property key -> (default, meaning); a test compares the documentation."""

_TOPIC_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,249}", re.ASCII)


class ValueFormat(StrEnum):
    """The format of a record's value."""

    RAW = "raw"
    JSON = "json"
    AVRO = "avro"
    DEBEZIUM_JSON = "debezium-json"


class KeyFormat(StrEnum):
    """The format of a record's key."""

    RAW = "raw"
    JSON = "json"
    AVRO = "avro"


class OnError(StrEnum):
    """The action for a record which does not fit."""

    REFUSE = "refuse"
    REJECT = "reject"


class OnSchema(StrEnum):
    """The action when a schema is registered for a raw table without rows."""

    KEEP = "keep"
    REPLACE = "replace"


class ChangesFormat(StrEnum):
    """The format in which consumers read the changes of a primary key table."""

    UPSERT = "upsert"
    DEBEZIUM_JSON = "debezium-json"


def is_record_property(key: str) -> bool:
    """Whether `key` is a property of a `RecordFormat`."""
    return key in RECORD_PROPERTY_HELP


def record_columns(properties: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the column names in each property of records."""
    return {
        key: tuple(part.strip() for part in properties[key].split(","))
        if key == _KEY_COLUMNS
        else (properties[key].strip(),)
        for key in (_KEY_COLUMNS, _TIMESTAMP, _HEADERS)
        if key in properties
    }


def with_renamed_column(properties: Mapping[str, str], name: str, new: str) -> dict[str, str]:
    """Return the properties after column `name` is renamed to `new`."""
    changed = {
        key: ", ".join(new if column == name else column for column in columns)
        for key, columns in record_columns(properties).items()
        if name in columns
    }
    return {**properties, **changed}


def _is_bytes(t: pa.DataType) -> bool:
    return bool(pa.types.is_binary(t) or pa.types.is_string(t))


def _is_headers(t: pa.DataType) -> bool:
    if not (pa.types.is_list(t) and pa.types.is_struct(t.value_type)):
        return False
    pair = t.value_type
    return (
        [field.name for field in pair] == ["key", "value"]
        and bool(pa.types.is_string(pair.field(0).type))
        and bool(pa.types.is_binary(pair.field(1).type))
        and bool(pair.field(1).nullable)
    )


RAW_TOPIC: Final = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field(
            "headers",
            pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])),
        ),
    ]
)
"""The columns of a table created as a topic."""

_RAW_COLUMNS: Final = {
    "key": _is_bytes,
    "value": _is_bytes,
    "timestamp": pa.types.is_timestamp,
    "headers": _is_headers,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFormat:
    """The part of a record for each column of a table, and the formats of the parts.

    `key_columns` are all columns of a primary key, or any columns of a log table; empty: a log
    table stores no keys. Only raw values have a `value_column`. An empty `topic` means the table's
    name.
    """

    value: ValueFormat
    key: KeyFormat
    key_columns: tuple[str, ...] = ()
    value_column: str | None = None
    timestamp_column: str | None = None
    headers_column: str | None = None
    on_error: OnError = OnError.REFUSE
    on_schema: OnSchema = OnSchema.KEEP
    changes: ChangesFormat = ChangesFormat.UPSERT
    topic: str = ""

    @classmethod
    def parse(
        cls,
        properties: Mapping[str, str],
        *,
        schema: Schema,
        primary_key: Sequence[str],
        table: str,
    ) -> RecordFormat:
        """Read the record properties among `properties`; other properties are ignored."""
        settings = {
            key: text.strip()
            for key, text in properties.items()
            if is_record_property(key) and text.strip()
        }
        raw = _raw_columns(schema)
        # A primary key with another column than `key` was not made for a topic.
        is_topic = bool(raw) and set(primary_key) <= {"key"}
        unsaid = ValueFormat.RAW if is_topic else ValueFormat.JSON
        value = property_choice(ValueFormat, settings, _VALUE, unsaid, table=table)
        raw_defaults = raw if value is ValueFormat.RAW else {}
        names = {
            part: _column(settings, key, schema, table) or raw_defaults.get(part)
            for part, key in (("timestamp", _TIMESTAMP), ("headers", _HEADERS))
        }
        key_columns = _key_columns(settings, schema, primary_key, raw_defaults, table)
        key_types = [schema.column(name, table=table).type for name in key_columns]
        key = property_choice(
            KeyFormat, settings, _KEY_FORMAT, _key_format(value, key_types), table=table
        )
        record_format = cls(
            value=value,
            key=key,
            key_columns=key_columns,
            value_column=_value_column(schema, {*key_columns, *names.values()}, table)
            if value is ValueFormat.RAW
            else None,
            timestamp_column=names["timestamp"],
            headers_column=names["headers"],
            on_error=property_choice(OnError, settings, _ON_ERROR, OnError.REFUSE, table=table),
            on_schema=property_choice(OnSchema, settings, _ON_SCHEMA, OnSchema.KEEP, table=table),
            changes=property_choice(
                ChangesFormat, settings, _CHANGES, ChangesFormat.UPSERT, table=table
            ),
            topic=_topic(settings, table),
        )
        if settings:
            record_format._check(schema, primary_key, table)
        return record_format

    def _check(self, schema: Schema, primary_key: Sequence[str], table: str) -> None:
        where = f"table '{table}': property"
        named = [*self.key_columns]
        for key, name in ((_TIMESTAMP, self.timestamp_column), (_HEADERS, self.headers_column)):
            if name is None:
                continue
            if name in named:
                raise InvalidSchemaError(
                    f"{where} {key} = '{name}': the column has another part of the record"
                )
            named.append(name)
        if primary_key and set(self.key_columns) != set(primary_key):
            raise InvalidSchemaError(
                f"{where} {_KEY_COLUMNS} = '{', '.join(self.key_columns)}': the record's key is the"
                f" primary key ({', '.join(primary_key)}); leave the property out"
            )
        types = {column.name: column.type for column in schema.columns}
        for name in self.key_columns:
            if pa.types.is_nested(types[name]):
                raise InvalidSchemaError(
                    f"{where} {_KEY_COLUMNS}: column '{name}' is {types[name]}; a key has columns"
                    " of simple types"
                )
        if self.key is KeyFormat.RAW and (
            len(self.key_columns) > 1 or not all(_is_bytes(types[n]) for n in self.key_columns)
        ):
            raise InvalidSchemaError(
                f"{where} {_KEY_FORMAT} = raw needs one key column of text or bytes, not"
                f" '{', '.join(self.key_columns)}'; use json"
            )
        t = types.get(self.timestamp_column or "")
        if t is not None and not pa.types.is_timestamp(t):
            raise InvalidSchemaError(
                f"{where} {_TIMESTAMP}: column '{self.timestamp_column}' is {t}, not a timestamp"
            )
        t = types.get(self.headers_column or "")
        if t is not None and not _is_headers(t):
            raise InvalidSchemaError(
                f"{where} {_HEADERS}: column '{self.headers_column}' is {t}, not"
                " array<struct<key: string, value: binary>>"
            )
        self._check_changes(primary_key, where)

    def _check_changes(self, primary_key: Sequence[str], where: str) -> None:
        is_keyed = bool(primary_key)
        if self.value is ValueFormat.DEBEZIUM_JSON and not is_keyed:
            raise InvalidSchemaError(
                f"{where} {_VALUE} = debezium-json needs a primary key: its records change rows"
            )
        if self.changes is ChangesFormat.DEBEZIUM_JSON:
            if not is_keyed:
                raise InvalidSchemaError(
                    f"{where} {_CHANGES} needs a primary key; the rows of a log table do not change"
                )
            if self.value not in (ValueFormat.JSON, ValueFormat.DEBEZIUM_JSON):
                raise InvalidSchemaError(
                    f"{where} {_CHANGES} = debezium-json has JSON, and {_VALUE} is {self.value}"
                )


def _column(settings: Mapping[str, str], key: str, schema: Schema, table: str) -> str | None:
    name = settings.get(key)
    return None if name is None else schema.column(name, table=table).name


def _key_columns(
    settings: Mapping[str, str],
    schema: Schema,
    primary_key: Sequence[str],
    raw: Mapping[str, str],
    table: str,
) -> tuple[str, ...]:
    text = settings.get(_KEY_COLUMNS)
    if text is None:
        return tuple(primary_key) or (("key",) if "key" in raw else ())
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        schema.column(name, table=table)
        if names.count(name) > 1:
            raise InvalidSchemaError(
                f"table '{table}': property {_KEY_COLUMNS} names column '{name}' twice"
            )
    return names


def _key_format(value: ValueFormat, types: Sequence[pa.DataType]) -> KeyFormat:
    if value is ValueFormat.AVRO:
        return KeyFormat.AVRO
    # Debezium's keys are always JSON.
    is_raw = len(types) == 1 and _is_bytes(types[0]) and value is not ValueFormat.DEBEZIUM_JSON
    return KeyFormat.RAW if is_raw else KeyFormat.JSON


def _raw_columns(schema: Schema) -> dict[str, str]:
    """Return the columns of a table, if all are columns of a raw topic."""
    for column in schema.columns:
        is_right = _RAW_COLUMNS.get(column.name)
        if is_right is None or not is_right(column.type):
            return {}
    names = {column.name: column.name for column in schema.columns}
    return names if "value" in names else {}


def _value_column(schema: Schema, used_columns: set[str | None], table: str) -> str:
    columns = [column for column in schema.columns if column.name not in used_columns]
    if len(columns) != 1 or not _is_bytes(columns[0].type):
        names = ", ".join(column.name for column in columns) or "none"
        raise InvalidSchemaError(
            f"table '{table}': property {_VALUE} = raw needs one column of text or bytes besides"
            f" the columns of key, timestamp and headers; its other columns are: {names}"
        )
    return columns[0].name


def _topic(settings: Mapping[str, str], table: str) -> str:
    name = settings.get(_TOPIC, "")
    if name and (not _TOPIC_NAME.fullmatch(name) or name in (".", "..")):
        raise InvalidSchemaError(
            f"table '{table}': property {_TOPIC} = '{name[:80]}' is no topic's name: use 1 to 249"
            " letters, digits, points, dashes and underscores"
        )
    return name
