"""Bounds of data files: of every value, over all row groups, never below what they bound."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.io.pyarrow import pyarrow_to_schema
from pyiceberg.schema import Schema
from pyiceberg.table.name_mapping import MappedField, NameMapping
from pyiceberg.types import ListType, LongType, NestedField, StringType

from streamhouse.core.types._bytes import text_at_least, text_at_most
from streamhouse.lake.files._statistics import (
    StatisticsPlan,
)

LAST = "\U0010ffff"


def statistics_of(
    rows: pa.Table, *, row_group_size: int = 1_000, properties: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return the statistics of a file of one column, whose field id is 1."""
    (name,) = rows.column_names
    sink = io.BytesIO()
    pq.write_table(rows, sink, row_group_size=row_group_size, store_decimal_as_integer=True)
    mapping = NameMapping([MappedField(field_id=1, names=[name])])
    plan = StatisticsPlan(pyarrow_to_schema(rows.schema, mapping), properties or {})
    return plan.of_file(pq.read_metadata(sink))


@pytest.mark.parametrize("zone", [None, "UTC"])
def test_bounds_of_times_that_python_does_not_have(zone: str | None) -> None:
    ends = pa.array([-(2**63), 2**63 - 1], pa.int64()).view(pa.timestamp("us", tz=zone))
    found = statistics_of(pa.table({"c": ends}))

    assert found["lower_bounds"] == {1: (-(2**63)).to_bytes(8, "little", signed=True)}
    assert found["upper_bounds"] == {1: (2**63 - 1).to_bytes(8, "little", signed=True)}


def test_a_row_group_without_bounds_leaves_the_file_without() -> None:
    """Parquet writes no bounds of texts of over 4096 bytes; those of the rest are no bounds."""
    found = statistics_of(pa.table({"c": ["b", "z" * 5_000]}), row_group_size=1)

    assert found["lower_bounds"] == found["upper_bounds"] == {}
    assert found["value_counts"] == {1: 2}


def test_row_groups_of_nulls_or_of_nan_do_not_count() -> None:
    nulls = statistics_of(pa.table({"c": pa.array(["b", None])}), row_group_size=1)
    nans = statistics_of(pa.table({"c": [float("nan"), 1.5]}), row_group_size=1)

    assert nulls["upper_bounds"] == {1: b"b"}
    assert nulls["null_value_counts"] == {1: 1}
    assert nans["lower_bounds"] == nans["upper_bounds"]
    assert len(nans["lower_bounds"]) == 1


def test_columns_that_no_statistics_are_wanted_of_have_none() -> None:
    rows = pa.table({"c": ["b", None]})
    none = statistics_of(rows, properties={"write.metadata.metrics.default": "none"})
    counts = statistics_of(rows, properties={"write.metadata.metrics.column.c": "counts"})

    assert none["value_counts"] == none["null_value_counts"] == none["lower_bounds"] == {}
    assert counts["value_counts"] == {1: 2}
    assert counts["upper_bounds"] == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x" * 16, "x" * 16),
        ("x" * 17, "x" * 15 + "y"),
        ("x" * 15 + "\ud7ff" + "x", "x" * 15 + "\ue000"),
        ("x" * 14 + LAST * 3, "x" * 13 + "y"),
        (LAST * 16, LAST * 16),
        (LAST * 17, None),
    ],
)
def test_the_upper_bound_of_a_long_text(text: str, expected: str | None) -> None:
    found = text_at_least(text.encode(), 16)

    assert found == (None if expected is None else expected.encode())


@given(st.text(max_size=6), st.integers(1, 4))
def test_a_cut_text_is_between_its_bounds(text: str, length: int) -> None:
    raw = text.encode()
    low, high = text_at_most(raw, length), text_at_least(raw, length)

    assert low is not None
    assert low <= raw
    assert len(low.decode()) <= length
    if high is None:
        assert text[:length] == LAST * length
    else:
        assert high >= raw
        assert len(high.decode()) <= length


def test_upper_bounds_of_bytes() -> None:
    cut = statistics_of(pa.table({"c": [b"\xff" * 15 + b"\x01\x02"]}))
    none = statistics_of(pa.table({"c": [b"\xff" * 17]}))

    assert cut["upper_bounds"] == {1: b"\xff" * 15 + b"\x02"}
    assert none["upper_bounds"] == {}
    assert none["lower_bounds"] == {1: b"\xff" * 16}


def test_a_column_that_the_file_does_not_have_gets_no_statistics() -> None:
    """Another engine may have added it; and names with dots may look like those inside a list."""
    nested = pa.list_(pa.field("element", pa.int64()))
    file = pa.table({"l.list.element": [5], "l": pa.array([[7, 8]], nested)})
    sink = io.BytesIO()
    pq.write_table(file, sink)
    schema = Schema(
        NestedField(4, "theirs", StringType()),
        NestedField(1, "l.list.element", LongType()),
        NestedField(2, "l", ListType(3, LongType())),
        NestedField(5, "more", StringType()),
    )

    found = StatisticsPlan(schema, {}).of_file(pq.read_metadata(sink))

    assert found["value_counts"] == {1: 1, 3: 2}
    assert set(found["column_sizes"]) == {1, 3}
