"""Rows have the bucket that Iceberg's own library gives them: these numbers are stored for ever."""

from __future__ import annotations

import datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg_core import transform

from streamhouse.core.model.bucketing import buckets_for_rows

_LARGE = 10**38 - 1
_TEXT = st.one_of(st.text(max_size=9), st.text(max_size=9).map(lambda text: text * 40))
VALUES: dict[pa.DataType, st.SearchStrategy[object]] = {
    pa.int8(): st.integers(-(2**7), 2**7 - 1),
    pa.int16(): st.integers(-(2**15), 2**15 - 1),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.date32(): st.dates(),
    pa.timestamp("us"): st.datetimes(),
    pa.timestamp("us", tz="UTC"): st.datetimes(timezones=st.just(datetime.UTC)),
    pa.decimal128(38, 0): st.integers(-_LARGE, _LARGE).map(Decimal),
    pa.decimal128(9, 2): st.decimals(-9_999_999, 9_999_999, places=2),
    pa.string(): _TEXT,
    pa.binary(): st.one_of(st.binary(max_size=9), st.binary(min_size=120, max_size=140)),
}


def _theirs(column: pa.Array, bucket_count: int) -> list[int]:
    if pa.types.is_integer(column.type) and column.type.bit_width < 32:
        column = column.cast(pa.int32())
    # A copy of the rows alone, which their library can read.
    column = pa.concat_arrays([column, column.slice(0, 0)])
    return [bucket or 0 for bucket in transform.bucket(column, bucket_count).to_pylist()]


@pytest.mark.parametrize("data_type", VALUES, ids=str)
@given(data=st.data(), bucket_count=st.integers(2, 5_000))
def test_buckets_are_those_of_icebergs_library(
    data_type: pa.DataType, data: st.DataObject, bucket_count: int
) -> None:
    """Few rows, more, and many take ways of their own."""
    values = data.draw(st.lists(st.none() | VALUES[data_type], min_size=1, max_size=12))
    repeated = data.draw(st.sampled_from([1, 80, 600]))
    skipped = data.draw(st.integers(0, 3))
    column = pa.array(values * repeated, data_type)[skipped:]

    found = buckets_for_rows(pa.record_batch({"k": column}), ["k"], bucket_count)

    assert found.tolist() == _theirs(column, bucket_count)


def test_rows_beyond_one_chunk_have_their_buckets() -> None:
    for column in (pa.array(range(40_000)), pa.array([f"{n * 7919}" for n in range(40_000)])):
        found = buckets_for_rows(pa.record_batch({"k": column}), ["k"], 97)

        assert found.tolist() == _theirs(column, 97)
