"""PostgreSQL's types, and values as Debezium writes them."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.cdc_source._array_texts import array_items
from streamhouse.cdc_source._source_types import (
    SourceColumn,
    WireType,
    is_known_type,
    to_array,
)
from streamhouse.core.errors import SchemaMismatchError

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
            WireType("STRING", type_name="_timestamptz"),
            '{"2024-01-02 05:34:05+02:30",NULL}',
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


LAST: Final = dt.datetime(9999, 12, 31, 23, 59, 59, 999_999)
FIRST: Final = dt.datetime(1, 1, 1)
DATE_WIRE: Final = WireType("INT32", "io.debezium.time.Date", "date")
MICROS_WIRE: Final = WireType("INT64", "io.debezium.time.MicroTimestamp", "timestamp")
INSTANT_WIRE: Final = WireType("STRING", "io.debezium.time.ZonedTimestamp", "timestamptz")


@pytest.mark.parametrize(
    ("data_type", "wire", "sent", "expected"),
    [
        # As Debezium writes infinity, a date of 44 BC, and timestamps that went round.
        (pa.date32(), DATE_WIRE, -2_147_472_692, LAST.date()),
        (pa.date32(), DATE_WIRE, -2_147_472_691, FIRST.date()),
        (pa.date32(), DATE_WIRE, -735_160, FIRST.date()),
        (pa.date32(), DATE_WIRE, 2_932_897, LAST.date()),
        (pa.timestamp("us"), MICROS_WIRE, 9_223_372_036_825_200_000, LAST),
        (pa.timestamp("us"), MICROS_WIRE, -9_223_372_036_832_400_000, FIRST),
        (pa.timestamp("us"), MICROS_WIRE, -9_223_372_036_853_775_810, LAST),
        (INSTANT, INSTANT_WIRE, "infinity", LAST.replace(tzinfo=dt.UTC)),
        (INSTANT, INSTANT_WIRE, "-infinity", FIRST.replace(tzinfo=dt.UTC)),
        (INSTANT, INSTANT_WIRE, "-0043-03-15T00:00:00.000000Z", FIRST.replace(tzinfo=dt.UTC)),
        (INSTANT, INSTANT_WIRE, "0000-12-31T00:00:00.000000Z", FIRST.replace(tzinfo=dt.UTC)),
    ],
)
def test_a_time_of_no_calendar_is_the_first_or_the_last_and_no_key(
    data_type: pa.DataType, wire: WireType, sent: Any, expected: Any
) -> None:
    assert to_array([sent], data_type, wire, where="here").to_pylist() == [expected]
    with pytest.raises(SchemaMismatchError, match="does not fit type"):
        to_array([sent], data_type, wire, where="here", is_key=True)


@pytest.mark.parametrize(
    ("sent", "scale", "expected"),
    [
        ("NAN", 0, "NaN"),
        ("POSITIVE_INFINITY", 0, "Infinity"),
        ("NEGATIVE_INFINITY", 0, "-Infinity"),
        ("1.500", 3, "1.500"),
        ("1200." + "0" * 2_046, 2_046, "1200"),
    ],
)
def test_a_number_as_text_is_as_postgresql_prints_it(sent: str, scale: int, expected: str) -> None:
    wire = WireType("STRING", type_name="numeric", scale=scale)

    assert to_array([sent], pa.string(), wire, where="here").to_pylist() == [expected]
    assert to_array([sent], pa.string(), TEXT, where="here").to_pylist() == [sent]


def _list(t: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", t))


@pytest.mark.parametrize(
    ("data_type", "type_name", "sent", "expected"),
    [
        (pa.int32(), "_int4", "[0:1]={5,NULL}", [5, None]),
        (pa.bool_(), "_bool", "{t,f}", [True, False]),
        (pa.float64(), "_float8", "{1.5,Infinity}", [1.5, float("inf")]),
        (pa.decimal128(4, 2), "_numeric", "{1.50}", [Decimal("1.50")]),
        (pa.string(), "_numeric", "{NaN,1e30}", ["NaN", "1e30"]),
        (pa.string(), "_time", "{24:00:00,01:02:03.000004}", ["24:00:00", "01:02:03.000004"]),
        (pa.date32(), "_date", '{1500-03-01,"0044-03-15 BC",infinity}', None),
        (pa.binary(), "_bytea", '{"\\\\x00ff",NULL}', [b"\x00\xff", None]),
        (pa.binary(), "_bit", "{101,000}", [b"\x05", b"\x00"]),
        (pa.string(), "_box", "{(1,1),(0,0);(2,2),(0,0)}", ["(1,1),(0,0)", "(2,2),(0,0)"]),
        (pa.timestamp("us"), "_timestamp", '{"1500-03-01 00:00:00.5"}', None),
    ],
)
def test_arrays(data_type: pa.DataType, type_name: str, sent: str, expected: Any) -> None:
    special = {
        "_date": [dt.date(1500, 3, 1), FIRST.date(), LAST.date()],
        "_timestamp": [dt.datetime(1500, 3, 1, 0, 0, 0, 500_000)],
    }
    wire = WireType("STRING", type_name=type_name)

    (found,) = to_array([sent], _list(data_type), wire, where="here").to_pylist()

    assert found == (special[type_name] if expected is None else expected)


@pytest.mark.parametrize(
    ("data_type", "sent"),
    [
        (pa.int32(), "{{1,2},{3,4}}"),
        (pa.string(), "{{a,b},{c,d}}"),
        (pa.decimal128(10, 2), "{1.5,NaN}"),
        (pa.int16(), "{40000}"),
        (pa.binary(), "{abc}"),
    ],
)
def test_an_array_that_has_no_form_is_refused(data_type: pa.DataType, sent: str) -> None:
    with pytest.raises(SchemaMismatchError, match="does not fit type array"):
        to_array([sent], _list(data_type), WireType("STRING"), where="here")


def _element(text: str | None) -> str:
    """An element as PostgreSQL prints it."""
    if text is None:
        return "NULL"
    is_plain = text and text.upper() != "NULL" and not set(text) & set('",{}\\ \t\n\r\v\f')
    return text if is_plain else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@given(st.lists(st.none() | st.text() | st.text(alphabet='",{}\\;NUL ab'), max_size=6))
def test_elements_of_any_texts(items: list[str | None]) -> None:
    assert list(array_items("{" + ",".join(map(_element, items)) + "}")) == items
