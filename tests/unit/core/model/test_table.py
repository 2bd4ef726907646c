"""Table descriptors are checked as a whole and survive JSON."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from streamhouse.core.errors import (
    InvalidNameError,
    InvalidRequestError,
    InvalidSchemaError,
    StreamhouseError,
    UnknownColumnError,
    UnknownOptionError,
)
from streamhouse.core.model.partitioning import PartitionField
from streamhouse.core.model.properties import (
    TableProperties,
)
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath

SCHEMA = Schema.from_arrow(
    pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("region", pa.string()),
            pa.field("at", pa.timestamp("us", tz="UTC")),
            pa.field("score", pa.float64()),
            pa.field("tags", pa.list_(pa.string())),
        ]
    )
)


def _descriptor(**changes: Any) -> TableDescriptor:
    fields: dict[str, Any] = {"path": TablePath("db", "t"), "schema": SCHEMA} | changes
    return TableDescriptor(**fields)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("db.t", TablePath("db", "t")),
        ("t", TablePath("default", "t")),
    ],
)
def test_paths_default_to_database_default(text: str, path: TablePath) -> None:
    assert TablePath.parse(text) == path


@pytest.mark.parametrize(
    "text",
    ["", ".", "a.", ".b", "a.b.c", "a/b", "../x", "a b", "1a", "a.é", "x" * 200, "a$log", "a.b "],
)
def test_bad_paths_are_refused(text: str) -> None:
    with pytest.raises(InvalidNameError):
        TablePath.parse(text)


def test_info_survives_json() -> None:
    info = TableInfo(
        descriptor=_descriptor(
            bucket_count=4,
            bucket_key=("id",),
            partitioned_by=(PartitionField.parse("day(at)"), PartitionField.parse("bucket(8, id)")),
            properties={"table.log.ttl": "1h"},
        ),
        table_id=7,
        created_at_us=123,
        nodes={0: "http://a", 1: ""},
    )

    assert TableInfo.from_json(info.to_json()) == info
    assert info.properties().log_ttl_ms == 3_600_000


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"bucket_count": 0}, InvalidSchemaError, "bucket count 0 is not in 1..4096"),
        ({"bucket_key": ("nope",)}, UnknownColumnError, "has no column 'nope'"),
        ({"bucket_key": ("id", "id")}, InvalidSchemaError, "names a column twice"),
        ({"bucket_key": ("tags",)}, InvalidSchemaError, "nested type"),
        ({"primary_key": ("region",)}, InvalidSchemaError, "must not be nullable"),
        (
            {"primary_key": ("id",), "bucket_key": ("region",)},
            InvalidSchemaError,
            "must be part of the primary key",
        ),
        (
            {"partitioned_by": (PartitionField.parse("day(region)"),)},
            InvalidSchemaError,
            "partition field 'day(region)' does not fit column 'region'",
        ),
        (
            {"partitioned_by": (PartitionField.parse("bucket(4, score)"),)},
            InvalidSchemaError,
            "does not fit column 'score'",
        ),
        (
            {"partitioned_by": (PartitionField.parse("region"), PartitionField.parse("region"))},
            InvalidSchemaError,
            "is given twice",
        ),
        (
            {"properties": {"table.log.tll": "1d"}},
            UnknownOptionError,
            "did you mean 'table.log.ttl'",
        ),
        ({"properties": {"table.log.ttl": "soon"}}, InvalidRequestError, "must be a duration"),
        ({"properties": {"table.log.segment-bytes": "1kb"}}, InvalidRequestError, "at least 64KiB"),
        (
            {"properties": {"table.datalake.enabled": "yes"}},
            InvalidRequestError,
            "must be true or false",
        ),
    ],
)
def test_impossible_tables_are_refused_by_name(
    changes: dict[str, Any], error: type[StreamhouseError], message: str
) -> None:
    with pytest.raises(error) as refused:
        _descriptor(**changes)

    assert message in refused.value.message
    assert "'db.t'" in refused.value.message


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"path": "a.b", "schema": [], "colour": 1}, "no field 'colour'"),
        ({"schema": []}, "needs 'path'"),
        ({"path": "a.b", "schema": [{"name": "x", "type": "int"}], "bucket_count": "4"}, "integer"),
        (
            {"path": "a.b", "schema": [{"name": "x", "type": "int"}], "bucket_key": "x"},
            "list of str",
        ),
        ({"path": "a.b", "schema": [{"name": "x", "type": "int"}], "properties": []}, "an object"),
    ],
)
def test_malformed_descriptors_say_what_is_wrong(value: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        TableDescriptor.from_json(value)

    assert message in refused.value.message


@pytest.mark.parametrize(
    ("text", "transform", "parameter"),
    [
        ("region", "identity", None),
        ("`region`", "identity", None),
        ("days(at)", "day", None),
        ("hour( at )", "hour", None),
        ("bucket(16, id)", "bucket", 16),
        ("TRUNCATE(4,region)", "truncate", 4),
    ],
)
def test_partition_expressions_are_read(text: str, transform: str, parameter: int | None) -> None:
    field = PartitionField.parse(text)

    assert (field.transform, field.parameter) == (transform, parameter)
    assert PartitionField.parse(str(field)) == field


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dya(at)", "did you mean 'day'"),
        ("bucket(id)", "bucket(16, col)"),
        ("day(3, at)", "the other transforms without"),
        ("bucket(0, id)", "positive"),
        ("day(at", "not a partition expression"),
    ],
)
def test_bad_partition_expressions_say_what_to_write(text: str, message: str) -> None:
    with pytest.raises(InvalidSchemaError) as refused:
        PartitionField.parse(text)

    assert message in refused.value.message


def test_unset_properties_have_their_defaults() -> None:
    properties = TableProperties.parse({}, table="a.b")

    assert properties.datalake_enabled
    assert properties.log_ttl_ms == 7 * 86_400_000
    assert properties.datalake_freshness_ms == 60_000


@pytest.mark.parametrize(("text", "ttl_ms"), [("2s", 180_000), ("3m", 180_000), ("1h", 3_600_000)])
def test_a_consumer_that_reports_once_a_minute_is_known_whatever_the_ttl(
    text: str, ttl_ms: int
) -> None:
    properties = TableProperties.parse({"table.log.consumers.ttl": text}, table="t")
    assert properties.log_consumers_ttl_ms == ttl_ms
