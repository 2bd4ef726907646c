"""Decimals that leave for Spark as numbers without a point, and come back as they were."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import DecimalType, IntegerType, LongType, StructField, StructType

from streamhouse.connector._partition_reader import in_schema, unscaled
from streamhouse.connector.format._decimal_numbers import as_numbers, stored_schema

_WHOLE = st.integers(-(10**18 - 1), 10**18 - 1)


@given(
    numbers=st.lists(st.none() | _WHOLE, max_size=40),
    scale=st.integers(0, 18),
    start=st.integers(0, 40),
)
def test_a_decimal_without_its_point_is_its_number(
    numbers: list[int | None], scale: int, start: int
) -> None:
    values = [None if n is None else Decimal(n).scaleb(-scale) for n in numbers]
    decimals = pa.array(values, pa.decimal128(18, scale))

    assert unscaled(decimals).to_pylist() == numbers
    assert unscaled(decimals.slice(start)).to_pylist() == numbers[start:]
    unscaled(decimals.slice(start)).validate(full=True)


def test_a_schema_keeps_which_numbers_are_decimals() -> None:
    fields = [
        StructField("id", IntegerType(), nullable=False),
        StructField("price", DecimalType(18, 2), nullable=False),
        StructField("large", DecimalType(19, 2)),
        StructField("count", LongType()),
    ]

    numbers = as_numbers(StructType(fields))

    kinds = [field.dataType for field in numbers]
    assert kinds == [IntegerType(), LongType(), DecimalType(19, 2), LongType()]
    assert [field.nullable for field in numbers] == [False, False, True, True]
    assert stored_schema(numbers).types == [
        pa.int32(),
        pa.decimal128(18, 2),
        pa.decimal128(19, 2),
        pa.int64(),
    ]
    assert not stored_schema(numbers).field("price").nullable


def test_batches_get_the_numbers_that_the_schema_asks_for() -> None:
    batch = pa.RecordBatch.from_pydict(
        {"price": pa.array([Decimal("1.25"), None, Decimal("-0.01")], pa.decimal128(15, 2))}
    )

    found = next(in_schema(iter([batch]), pa.schema([("price", pa.int64())])))

    assert found.column("price").to_pylist() == [125, None, -1]
