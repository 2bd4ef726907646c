"""What values of JSON become as values of columns: what they say, or the record is a bad one."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa
import pytest

from streamhouse.core.model.table import TableInfo
from streamhouse.core.rows.checked_rows import CheckedRows
from tests.support.kafka_records import columns_of, read_alone_and_among_many, record_table

COLUMNS: Final = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("s", pa.string()),
        pa.field("n", pa.int64()),
        pa.field("d", pa.float64()),
        pa.field("f", pa.float32()),
        pa.field("day", pa.date32()),
        pa.field("l", pa.list_(pa.string())),
        pa.field("st", pa.struct([("x", pa.string())])),
    ]
)
TABLES: Final[dict[str, tuple[TableInfo, str]]] = {
    "json": (
        record_table(COLUMNS, ("id",), value_format="json", on_error="reject"),
        '{"id":1,"%s":%s}',
    ),
    "debezium": (
        record_table(COLUMNS, ("id",), value_format="debezium-json", on_error="reject"),
        '{"op":"c","after":{"id":1,"%s":%s}}',
    ),
}


def _read(form: str, column: str, value: str) -> CheckedRows:
    info, text = TABLES[form]
    return read_alone_and_among_many(columns_of([(text % (column, value)).encode()]), info)


@pytest.mark.parametrize("form", TABLES)
@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("s", value) for value in ("1e400", "1.50", "5", "true", '{"a":true}', '[1,"x",null]')),
        ("n", '"5_0"'),
        ("n", '"0x1f"'),
        ("n", '"\\u0665"'),
        ("n", "5.5"),
        ("n", "1e100000000"),
        ("n", "true"),
        ("d", '"1e400"'),
        ("d", "1e400"),
        ("d", '"1_0.5"'),
        ("d", "true"),
        ("f", "1e39"),
        ("f", '"1e39"'),
        ("day", "5.5"),
        ("day", "true"),
        ("l", '"abc"'),
        ("l", '{"a":1}'),
        ("l", "[1]"),
        ("st", '{"x":true}'),
        ("st", '["x"]'),
    ],
)
def test_what_is_no_value_of_a_column_is_not_made_one(form: str, column: str, value: str) -> None:
    found = _read(form, column, value)

    assert found.rows.num_rows == 0
    assert (found.misfits[0].column, "is no " in found.misfits[0].reason) == (column, True)


@pytest.mark.parametrize("form", TABLES)
@pytest.mark.parametrize(
    ("column", "value", "known"),
    [
        ("s", '"1.50"', "1.50"),
        ("n", "9007199254740993.0", 9_007_199_254_740_993),
        ("n", "1e1", 10),
        ("n", '" 5 "', 5),
        ("d", "9007199254740993", 9_007_199_254_740_992.0),
        ("d", "1e-400", 0.0),
        ("d", "1e-99999999999999999999", 0.0),
        ("d", '"-Infinity"', float("-inf")),
        ("l", '["a",null]', ["a", None]),
        ("st", '{"x":"a"}', {"x": "a"}),
        ("st", "{}", {"x": None}),
    ],
)
def test_a_value_is_what_it_says(form: str, column: str, value: str, known: Any) -> None:
    found = _read(form, column, value)

    assert [row[column] for row in found.rows.to_pylist()] == [known]


def test_a_field_that_a_struct_has_not_is_named_as_a_column_is() -> None:
    (bad,) = _read("json", "st", '{"x":"a","y":1}').misfits.values()

    assert bad.column == "st"
    assert bad.reason.endswith("the struct has no field 'y' (fields: x)")


@pytest.mark.parametrize(
    ("column", "value", "kept"),
    [("s", "1.50", 1.5), ("s", "0.1234567890123456789", "0.1234567890123456789"), ("n", "5", 5)],
)
def test_what_is_kept_of_a_bad_record_is_what_it_had(column: str, value: str, kept: Any) -> None:
    read = _read("json", column, value + ',"zz":1')

    assert str(read.original_of(0)[column]) == str(kept)


@pytest.mark.parametrize("column", ["s", "l", "zz"])
@pytest.mark.parametrize("depth", [63, 64, 500, 950, 5_000])
def test_json_is_as_deep_as_it_may_be(column: str, depth: int) -> None:
    (bad,) = _read("json", column, "[" * depth + "]" * depth).misfits.values()

    assert ("nested deeper than 64" in bad.reason) == (depth > 63)


def test_a_value_of_another_encoding_is_no_json() -> None:
    info, _ = TABLES["json"]
    values = ['{"id":1}'.encode("utf-16"), b'{"id":1,"s":"\xed\xa0\x80"}', b'\xef\xbb\xbf{"id":2}']

    found = read_alone_and_among_many(columns_of(values), info)

    assert found.rows.column("id").to_pylist() == [2]
    assert all("is not UTF-8" in misfit.reason for misfit in found.misfits.values())
