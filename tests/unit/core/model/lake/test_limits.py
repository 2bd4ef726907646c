"""The rule by which writes refuse what the lake cannot hold: exact, by column and row."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.transforms import TruncateTransform
from pyiceberg.types import LongType

from streamhouse.core.errors import SchemaMismatchError
from streamhouse.core.model.lake.limits import LakeLimits, time_units
from streamhouse.core.model.partitioning import PartitionField
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TablePath

HOUR_US = 3_600_000_000


def decimals(t: pa.DataType, *unscaled: int) -> pa.Array:
    """Return decimals as a client sends them: 128 bits each, unchecked."""
    data = b"".join(number.to_bytes(16, "little", signed=True) for number in unscaled)
    return pa.Array.from_buffers(t, len(unscaled), [None, pa.py_buffer(data)])


def check(column: pa.Array, *partitioned_by: str, properties: dict[str, str] | None = None) -> None:
    rows = pa.record_batch({"n": pa.array(range(len(column))), "v": column})
    descriptor = TableDescriptor(
        path=TablePath.parse("db.t"),
        schema=Schema.from_arrow(rows.schema),
        partitioned_by=tuple(PartitionField.parse(text) for text in partitioned_by),
        properties=properties or {},
    )
    LakeLimits.of(descriptor).check(rows, table="db.t")


def test_a_decimal_that_arrow_takes_for_one_of_any_precision_is_refused() -> None:
    column = decimals(pa.decimal128(5, 2), 99_999, -99_999, -(2**127))
    pa.record_batch({"v": column}).validate(full=True)

    with pytest.raises(SchemaMismatchError, match=r"'db.t': column 'v' of row 2 has a value with"):
        check(column)
    check(column.slice(0, 2))


@pytest.mark.parametrize("number", [10**38, -(10**38), 2**127 - 1, -(2**127)])
def test_decimals_inside_of_nested_values_are_found(number: int) -> None:
    t = pa.decimal128(38, 3)
    inner = decimals(t, 1, 2, number)
    good = decimals(t, 1, 2, 3)
    entries = pa.array([0, 0, 1, 3], pa.int32())
    keys = pa.array(["a", "b", "c"])
    columns = [
        (pa.ListArray.from_arrays(entries, inner), 2),
        (pa.StructArray.from_arrays([good, inner], ["a", "b"]), 2),
        (pa.MapArray.from_arrays(entries, keys, inner), 2),
        (pa.MapArray.from_arrays(entries, inner, keys), 2),
        (pa.ListArray.from_arrays([0, 1, 2, 3], pa.StructArray.from_arrays([inner], ["b"])), 2),
    ]
    for column, row in columns:
        with pytest.raises(SchemaMismatchError, match=rf"column 'v' of row {row} has"):
            check(column)
        check(column.slice(0, row))


@pytest.mark.parametrize(
    ("t", "width", "lowest"),
    [
        (pa.int32(), 10, -2_147_483_640),
        (pa.int64(), 10, -9_223_372_036_854_775_800),
        (pa.int32(), 2**31 - 1, -(2**31 - 1)),
        (pa.int64(), 16, -(2**63)),
    ],
)
def test_integers_that_would_be_cut_below_their_type(
    t: pa.DataType, width: int, lowest: int
) -> None:
    check(pa.array([lowest, 2 ** (t.bit_width - 1) - 1, None], t), f"truncate({width}, v)")
    if lowest == -(2 ** (t.bit_width - 1)):
        return
    with pytest.raises(SchemaMismatchError, match=rf"row 1 has .* truncate.*below {lowest}"):
        check(pa.array([0, lowest - 1], t), f"truncate({width}, v)")
    check(pa.array([0, lowest - 1], t), "v", f"bucket({16}, v)")


def test_small_integers_are_wider_in_the_lake() -> None:
    check(pa.array([-128, 127], pa.int8()), "truncate(10, v)")


def test_decimals_that_would_be_cut_to_more_digits() -> None:
    t = pa.decimal128(5, 2)
    check(pa.array([Decimal("-999.90"), Decimal("999.99")], t), "truncate(10, v)")
    with pytest.raises(SchemaMismatchError, match=r"row 0 has .* no value below -999\.90"):
        check(pa.array([Decimal("-999.91")], t), "truncate(10, v)")


@pytest.mark.parametrize("zone", [None, "UTC"])
def test_times_whose_hours_need_more_than_32_bits(zone: str | None) -> None:
    t = pa.timestamp("us", tz=zone)
    edges = [-(2**31) * HOUR_US, 2**31 * HOUR_US - 1]
    check(pa.array([*edges, None], t), "hour(v)")
    for number in (edges[0] - 1, edges[1] + 1, -(2**63), 2**63 - 1):
        column = pa.array([0, number], pa.int64()).view(t)
        with pytest.raises(SchemaMismatchError, match=r"row 1 has .* hour\(v\) .* takes -243"):
            check(column, "hour(v)")
        check(column, "day(v)")
        with pytest.raises(SchemaMismatchError, match="row 1 has"):
            check(column, properties={"table.datalake.batch-layout.partition": "hour(v)"})


def test_rows_of_an_earlier_schema_keep_to_todays_partitioning() -> None:
    earlier = Schema.from_arrow(pa.schema([("a", pa.int32()), ("b", pa.timestamp("us"))]))
    now = Schema.from_arrow(pa.schema([("wide", pa.int64()), ("at", pa.timestamp("us"))]))
    descriptor = TableDescriptor(
        path=TablePath.parse("db.t"),
        schema=now,
        partitioned_by=(
            PartitionField.parse("truncate(10, wide)"),
            PartitionField.parse("hour(at)"),
        ),
    )
    limits = LakeLimits.of(descriptor, earlier)
    far = pa.array([2**63 - 1], pa.int64()).view(pa.timestamp("us"))

    low = pa.record_batch({"a": pa.array([-(2**31)], pa.int32()), "b": pa.array([0], far.type)})
    limits.check(low, table="db.t")
    with pytest.raises(SchemaMismatchError, match="column 'b' of row 7 has"):
        limits.check(pa.record_batch({"b": far}), table="db.t", row_numbers=np.array([7]))


def test_types_without_such_values_cost_nothing() -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.string()), ("c", pa.timestamp("us"))])
    descriptor = TableDescriptor(path=TablePath.parse("db.t"), schema=Schema.from_arrow(schema))

    assert LakeLimits.of(descriptor).limits == ()


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31))
def test_what_is_refused_is_what_iceberg_cuts_below_the_type(width: int, above: int) -> None:
    value = -(2**63) + above
    truncated: Any = TruncateTransform(width).transform(LongType())(value)

    fits = truncated >= -(2**63)
    try:
        check(pa.array([value]), f"truncate({width}, v)")
    except SchemaMismatchError:
        assert not fits
    else:
        assert fits


def test_hours_beyond_32_bits_are_the_nearest() -> None:
    numbers = np.array([-(2**63), 2**63 - 1, -1], dtype=np.int64)

    hours = time_units(numbers, pa.timestamp("us"), "hour").tolist()

    assert hours == [-(2**31), 2**31 - 1, -1]
