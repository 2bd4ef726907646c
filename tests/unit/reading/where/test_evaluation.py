"""Spark's corner cases of evaluation, each by name; random ones are in tests/property."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.core.errors import SchemaMismatchError, UnknownColumnError
from streamhouse.core.model.schema import Schema
from streamhouse.reading.where._evaluation import filter_batch
from streamhouse.reading.where.parser import parse_predicate
from tests.support.predicate_model import truth_values

NAN = math.nan


def _mask(where: str, column: pa.Array) -> list[bool | None]:
    batch = pa.record_batch([column], names=["x"])
    predicate = parse_predicate(where, Schema.from_arrow(batch.schema), table="db.t")
    return truth_values(predicate, batch)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("x = 'NaN'", [False, True, None, False]),
        ("x > 1", [False, True, None, True]),
        ("x < 'NaN'", [True, False, None, True]),
        ("x <= 'NaN'", [True, True, None, True]),
        ("x > 'NaN'", [False, False, None, False]),
        ("x != 'NaN'", [True, False, None, True]),
        ("x = -0.0", [True, False, None, False]),
        ("x IN (0, double('NaN'))", [True, True, None, False]),
        ("NOT x IN (0)", [False, True, None, True]),
        ("isnan(x)", [False, True, False, False]),
        ("x <=> 2", [False, False, False, True]),
    ],
)
def test_nan_is_above_all_numbers_and_equals_itself(where: str, expected: list[Any]) -> None:
    assert _mask(where, pa.array([-0.0, NAN, None, 2.0])) == expected
    assert _mask(where, pa.array([-0.0, NAN, None, 2.0], pa.float32())) == expected


def test_null_and_or_not_follow_three_valued_logic() -> None:
    flags = pa.array([True, False, None])

    assert _mask("x AND NULL", flags) == [None, False, None]
    assert _mask("x OR NULL", flags) == [True, None, None]
    assert _mask("NOT x", flags) == [False, True, None]
    assert _mask("x IN (true, NULL)", flags) == [True, None, None]


def test_strings_compare_by_bytes_and_like_by_characters() -> None:
    texts = pa.array(["\uffff", "\U0001f600", "é", "a\nb", "a.b"])

    assert _mask("x < '\U0001f600'", texts) == [True, False, True, True, True]
    assert _mask("x LIKE '_'", texts) == [True, True, True, False, False]
    assert _mask("x LIKE 'a_b'", texts) == [False, False, False, True, True]
    assert _mask("x LIKE '%.b'", texts) == [False, False, False, False, True]


def test_a_field_of_a_null_struct_is_null() -> None:
    structs = pa.array([{"y": 1}, None, {"y": None}], pa.struct([("y", pa.int32())]))

    assert _mask("x.y = 1", structs) == [True, None, None]
    assert _mask("x.y IS NULL", structs.slice(1)) == [True, True]


def test_wide_decimals_are_exact() -> None:
    big = Decimal("1234567890123456789012345678.0000000001")
    column = pa.array([big, None], pa.decimal128(38, 10))

    assert _mask(f"x = {big}", column) == [True, None]
    assert _mask(f"x > {big}", column) == [False, None]


def test_a_layout_variant_of_the_column_is_read_as_the_column() -> None:
    schema = Schema.from_arrow(pa.schema([("x", pa.int8()), ("s", pa.string())]))
    predicate = parse_predicate("x > 1 AND s = 'b'", schema, table="db.t")
    batch = pa.record_batch(
        [pa.array([1, 2], pa.int32()), pa.array(["b", "b"]).dictionary_encode()], names=["x", "s"]
    )

    assert filter_batch(predicate, batch).num_rows == 1


def test_a_batch_without_the_column_or_with_values_it_cannot_hold_is_refused() -> None:
    schema = Schema.from_arrow(pa.schema([("x", pa.int8())]))
    predicate = parse_predicate("x > 1", schema, table="db.t")

    with pytest.raises(UnknownColumnError, match="no column 'x'"):
        filter_batch(predicate, pa.record_batch({"y": [1]}))
    with pytest.raises(SchemaMismatchError, match="column 'x' arrived as bigint"):
        filter_batch(predicate, pa.record_batch({"x": [1_000]}))


def test_all_rows_are_kept_without_a_copy_and_none_leave_an_empty_batch() -> None:
    batch = pa.record_batch({"x": [1, 2]})
    schema = Schema.from_arrow(batch.schema)

    def kept(where: str) -> pa.RecordBatch:
        return filter_batch(parse_predicate(where, schema, table="db.t"), batch)

    assert kept("x > 0") is batch
    assert kept("true") is batch
    assert kept("NULL").equals(batch.slice(0, 0))
    assert kept("x > 2").equals(batch.slice(0, 0))
