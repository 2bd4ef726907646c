"""What Kafka's records are to a table: read from properties, refused where it makes no sense."""

from __future__ import annotations

import pyarrow as pa
import pytest

from streamhouse.core.errors import (
    InvalidSchemaError,
    StreamhouseError,
    UnknownColumnError,
    UnknownOptionError,
)
from streamhouse.core.model.records.record_format import (
    RAW_TOPIC,
    ChangesFormat,
    KeyFormat,
    OnError,
    RecordFormat,
    ValueFormat,
)
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.schema_change import change_schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath

PLAIN = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("tags", RAW_TOPIC.field("headers").type),
    ]
)


def _table(
    schema: pa.Schema = PLAIN, key: tuple[str, ...] = (), **properties: str
) -> TableDescriptor:
    return TableDescriptor(
        path=TablePath("default", "t"),
        schema=Schema.from_arrow(schema),
        primary_key=key,
        properties={f"kafka.{name.replace('_', '.')}": value for name, value in properties.items()},
    )


def test_a_table_of_a_topics_columns_is_raw() -> None:
    assert _table(RAW_TOPIC).record_format() == RecordFormat(
        value=ValueFormat.RAW,
        key=KeyFormat.RAW,
        key_columns=("key",),
        value_column="value",
        timestamp_column="timestamp",
        headers_column="headers",
    )


@pytest.mark.parametrize(
    "schema",
    [
        pa.schema([("key", pa.binary())]),
        pa.schema([("value", pa.int64())]),
        pa.schema([("value", pa.binary()), ("other", pa.int64())]),
        pa.schema([("value", pa.binary()), ("timestamp", pa.int64())]),
    ],
)
def test_any_other_table_is_json(schema: pa.Schema) -> None:
    wanted = RecordFormat(value=ValueFormat.JSON, key=KeyFormat.JSON)

    assert _table(schema).record_format() == wanted


@pytest.mark.parametrize(
    ("names", "key"),
    [
        ("key value", "key value"),
        ("value", "value"),
        ("key value", "value"),
        ("key value timestamp", "timestamp"),
        ("key value timestamp", "key timestamp"),
        ("value timestamp", "timestamp"),
    ],
)
def test_a_table_whose_values_or_times_are_keys_was_not_made_as_a_topic(
    names: str, key: str
) -> None:
    keys = tuple(key.split())
    types = {"key": pa.string(), "value": pa.string(), "timestamp": pa.timestamp("us", tz="UTC")}
    schema = pa.schema([pa.field(name, types[name], name not in keys) for name in names.split()])

    found = _table(schema, keys).record_format()

    assert (found.value, found.value_column, found.key_columns) == (ValueFormat.JSON, None, keys)
    assert found.timestamp_column is None


def test_the_key_of_a_primary_key_table_is_its_primary_key() -> None:
    found = _table(key=("id",)).record_format()

    assert (found.key_columns, found.key) == (("id",), KeyFormat.JSON)


def test_a_key_of_one_text_is_raw_unless_values_are_debeziums() -> None:
    names = pa.schema([pa.field("name", pa.string(), nullable=False), ("n", pa.int64())])

    assert _table(names, ("name",)).record_format().key is KeyFormat.RAW
    assert (
        _table(names, ("name",), value_format="debezium-json").record_format().key is KeyFormat.JSON
    )


def test_all_that_is_set_is_read() -> None:
    found = _table(
        topic="a.b-c",
        value_format="JSON",
        key_columns=" name , id",
        timestamp_column="at",
        headers_column="tags",
        on_error="reject",
    ).record_format()

    assert found == RecordFormat(
        value=ValueFormat.JSON,
        key=KeyFormat.JSON,
        key_columns=("name", "id"),
        timestamp_column="at",
        headers_column="tags",
        on_error=OnError.REJECT,
        topic="a.b-c",
    )
    changes = _table(key=("id",), changes_format="debezium-json").record_format().changes
    assert changes is ChangesFormat.DEBEZIUM_JSON


@pytest.mark.parametrize(
    ("properties", "error", "said"),
    [
        ({"value_format": "jsn"}, UnknownOptionError, "did you mean 'json'"),
        ({"value_format": "raw"}, InvalidSchemaError, "raw needs one column of text or bytes"),
        ({"value_format": "debezium-json"}, InvalidSchemaError, "needs a primary key"),
        ({"changes_format": "debezium-json"}, InvalidSchemaError, "needs a primary key"),
        ({"key_columns": "nme"}, UnknownColumnError, "'nme'"),
        ({"key_columns": "id, id"}, InvalidSchemaError, "names column 'id' twice"),
        ({"key_columns": "tags"}, InvalidSchemaError, "columns of simple types"),
        ({"key_columns": "id", "key_format": "raw"}, InvalidSchemaError, "use json"),
        ({"timestamp_column": "name"}, InvalidSchemaError, "not a timestamp"),
        ({"headers_column": "name"}, InvalidSchemaError, "not array<struct"),
        (
            {"key_columns": "at", "timestamp_column": "at"},
            InvalidSchemaError,
            "the column has another part",
        ),
        ({"on_error": "skip"}, UnknownOptionError, "refuse, reject"),
        ({"topic": "a b"}, InvalidSchemaError, "is no topic's name"),
        ({"topic": ".."}, InvalidSchemaError, "is no topic's name"),
    ],
)
def test_what_makes_no_sense_is_refused(
    properties: dict[str, str], error: type[StreamhouseError], said: str
) -> None:
    with pytest.raises(error, match=r"table 'default.t'") as raised:
        _table(**properties)

    assert said in raised.value.message


@pytest.mark.parametrize(
    ("properties", "said"),
    [
        ({"key_columns": "name"}, "the record's key is the primary key (id)"),
        ({"value_format": "avro", "changes_format": "debezium-json"}, "value.format is avro"),
    ],
)
def test_what_makes_no_sense_with_a_primary_key_is_refused(
    properties: dict[str, str], said: str
) -> None:
    with pytest.raises(InvalidSchemaError) as raised:
        _table(key=("id",), **properties)

    assert said in raised.value.message


def _info(descriptor: TableDescriptor) -> TableInfo:
    return TableInfo(descriptor=descriptor, table_id=1, created_at_us=0)


def test_properties_follow_a_renamed_column() -> None:
    info = _info(_table(key_columns="name, id", timestamp_column="at"))

    for name, new in (("name", "title"), ("at", "moment")):
        info = change_schema(info, [{"rename": name, "to": new}])

    assert info.descriptor.properties["kafka.key.columns"] == "title, id"
    assert info.descriptor.record_format().timestamp_column == "moment"


def test_a_column_that_a_property_names_is_not_dropped() -> None:
    info = _info(_table(timestamp_column="at"))

    with pytest.raises(InvalidSchemaError, match=r"used by property kafka\.timestamp\.column"):
        change_schema(info, [{"drop": "at", "confirm": "at"}])


def test_an_earlier_version_of_a_table_has_no_properties_of_records() -> None:
    info = _info(_table(timestamp_column="at"))
    renamed = change_schema(info, [{"rename": "at", "to": "moment"}])

    assert renamed.in_version(0).descriptor.properties == {}
