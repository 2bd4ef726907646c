"""PostgreSQL's types, and values as Debezium writes them."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pytest

from streamhouse.connector.cdc.source.source_types import (
    SourceColumn,
    WireType,
    is_known_type,
    to_array,
)
from streamhouse.storage_service.errors import SchemaMismatchError

INSTANT: Final = pa.timestamp("us", tz="UTC")
TEXT: Final = WireType("STRING")


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (SourceColumn("c", "int2"), pa.int16()),
        (SourceColumn("c", "BIGSERIAL"), pa.int64()),
        (SourceColumn("c", "numeric", 12, 2), pa.decimal128(12, 2)),
        (SourceColumn("c", "numeric", 50, 2), pa.string()),
        (SourceColumn("c", "numeric", 2, 5), pa.string()),
        (SourceColumn("c", "numeric"), pa.string()),
        (SourceColumn("c", "money"), pa.decimal128(19, 2)),
        (SourceColumn("c", "timestamptz"), INSTANT),
        (SourceColumn("c", "_numeric", 5, 1), pa.list_(pa.field("element", pa.decimal128(5, 1)))),
        (SourceColumn("c", "_uuid"), pa.list_(pa.field("element", pa.string()))),
        (SourceColumn("c", "positive", wire=WireType("INT32")), pa.int32()),
        (SourceColumn("c", "never_heard_of", wire=WireType("BYTES")), pa.string()),
    ],
)
def test_types(column: SourceColumn, expected: pa.DataType) -> None:
    assert column.arrow_type() == expected


def test_what_is_not_known() -> None:
    assert not is_known_type(SourceColumn("c", "never_heard_of"))
    assert is_known_type(SourceColumn("c", "mood", is_enum=True))
    assert is_known_type(SourceColumn("c", "_int4"))


@pytest.mark.parametrize(
    ("data_type", "wire", "sent", "expected"),
    [
        (pa.decimal128(10, 2), TEXT, "1.5", Decimal("1.50")),
        (pa.float64(), WireType("FLOAT64"), "Infinity", float("inf")),
        (pa.date32(), WireType("INT32", "io.debezium.time.Date"), 1, dt.date(1970, 1, 2)),
        (
            pa.timestamp("us"),
            WireType("INT64", "io.debezium.time.Timestamp"),
            1_500,
            dt.datetime(1970, 1, 1, 0, 0, 1, 500_000),
        ),
        (
            pa.timestamp("us"),
            WireType("INT64", "io.debezium.time.MicroTimestamp"),
            2**62,
            dt.datetime(9999, 12, 31, 23, 59, 59, 999_999),
        ),
        (
            INSTANT,
            WireType("STRING", "io.debezium.time.ZonedTimestamp"),
            "2024-01-02T03:04:05.6Z",
            dt.datetime(2024, 1, 2, 3, 4, 5, 600_000, tzinfo=dt.UTC),
        ),
        (
            INSTANT,
            WireType("STRING", "io.debezium.time.ZonedTimestamp"),
            "+294247-01-10T04:00:25.200Z",
            dt.datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=dt.UTC),
        ),
        (pa.string(), WireType("INT64", "io.debezium.time.MicroTime"), 3_661_500_000, "01:01:01.5"),
        (pa.string(), WireType("BYTES"), "bmV3", "new"),
        (pa.string(), WireType("STRUCT"), {"x": 1.5}, '{"x":1.5}'),
        (pa.binary(), WireType("BYTES"), "AP8=", b"\x00\xff"),
        (
            pa.list_(pa.field("element", INSTANT)),
            WireType("ARRAY", "", WireType("STRING", "io.debezium.time.ZonedTimestamp")),
            ["2024-01-02T03:04:05Z", None],
            [dt.datetime(2024, 1, 2, 3, 4, 5, tzinfo=dt.UTC), None],
        ),
    ],
)
def test_values(data_type: pa.DataType, wire: WireType, sent: Any, expected: Any) -> None:
    found = to_array([sent, None], data_type, wire, where="here")

    assert found.type == data_type
    assert found.to_pylist() == [expected, None]


@pytest.mark.parametrize(
    ("data_type", "value"),
    [
        (pa.decimal128(10, 2), "NaN"),
        (pa.decimal128(4, 2), "123.45"),
        (pa.decimal128(4, 2), "1.234"),
        (pa.int16(), 40_000),
        (pa.binary(), "no base64!"),
    ],
)
def test_a_value_that_does_not_fit_is_named(data_type: pa.DataType, value: Any) -> None:
    with pytest.raises(SchemaMismatchError, match=r"^table 't', column 'c': the value"):
        to_array([None, value], data_type, TEXT, where="table 't', column 'c'")
