"""Partition fields and values: what Iceberg's own scalar transforms say, for every row."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.io.pyarrow import pyarrow_to_schema
from pyiceberg.table.name_mapping import MappedField, NameMapping
from pyiceberg.transforms import parse_transform

from streamhouse.core.model.lake.partition_fields import (
    LakePartitionField,
    lake_partitioning,
)
from streamhouse.core.model.partitioning import PartitionField
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TablePath
from streamhouse.lake.files.partition_layout import (
    split_by_partition,
)

COLUMNS = pa.schema(
    [
        ("id", pa.int64()),
        ("code", pa.int16()),
        ("region", pa.string()),
        ("flag", pa.bool_()),
        ("price", pa.float64()),
        ("ts", pa.timestamp("us", tz="UTC")),
        ("ts_day", pa.string()),
    ]
)


def _fields(
    *partitioned_by: str, bucket_key: tuple[str, ...] = (), bucket_count: int = 4
) -> list[tuple[str, str, str]]:
    descriptor = TableDescriptor(
        path=TablePath.parse("db.t"),
        schema=Schema.from_arrow(COLUMNS),
        bucket_count=bucket_count,
        bucket_key=bucket_key,
        partitioned_by=tuple(PartitionField.parse(text) for text in partitioned_by),
    )
    return [(f.name, f.iceberg_transform, f.source) for f in lake_partitioning(descriptor)]


def test_without_a_bucket_key_the_bucket_number_is_the_last_field() -> None:
    assert _fields("region") == [
        ("region", "identity", "region"),
        ("__bucket", "identity", "__bucket"),
    ]


def test_one_bucketable_key_is_icebergs_own_bucket_transform() -> None:
    assert _fields(bucket_key=("code",)) == [("code_bucket", "bucket[4]", "code")]


@pytest.mark.parametrize("key", [("id", "region"), ("price",), ("flag",)])
def test_a_key_iceberg_cannot_bucket_falls_back_to_the_bucket_number(key: tuple[str, ...]) -> None:
    assert _fields(bucket_key=key) == [("__bucket", "identity", "__bucket")]


def test_a_field_named_like_a_column_or_another_field_gets_a_number() -> None:
    assert _fields("day(ts)", "bucket(16, id)", bucket_key=("id",)) == [
        ("ts_day_2", "day", "ts"),
        ("id_bucket", "bucket[16]", "id"),
        ("id_bucket_2", "bucket[4]", "id"),
    ]


def test_the_bucketing_is_not_repeated_when_the_user_partitions_by_it() -> None:
    assert _fields("bucket(4, id)", bucket_key=("id",)) == [("id_bucket", "bucket[4]", "id")]


def _split(
    rows: pa.Table, *fields: LakePartitionField, bucket: int = 3
) -> dict[tuple[Any, ...], list[Any]]:
    found = {}
    for values, part in split_by_partition(rows, fields, bucket=bucket):
        assert values not in found
        found[values] = part["n"].to_pylist()
    return found


def test_rows_are_grouped_by_all_fields_and_keep_their_order() -> None:
    rows = pa.table({"n": range(7), "a": list("xyxxyxy"), "b": [1, 1, 2, 1, None, 1, None]})
    by_a = LakePartitionField(name="a", source="a", transform="identity")
    by_b = LakePartitionField(name="b", source="b", transform="identity")
    bucket = LakePartitionField(name="__bucket", source="__bucket", transform="identity")

    assert _split(rows, by_a, by_b, bucket) == {
        ("x", 1, 3): [0, 3, 5],
        ("x", 2, 3): [2],
        ("y", 1, 3): [1],
        ("y", None, 3): [4, 6],
    }


def test_without_fields_or_rows_nothing_is_cut() -> None:
    rows = pa.table({"n": [1, 2]})

    assert _split(rows) == {(): [1, 2]}
    assert list(split_by_partition(rows.slice(0, 0), (), bucket=0)) == []


def test_many_fields_of_many_values_stay_apart() -> None:
    """Combined naively, the codes of twelve fields of 300 values would overflow 64 bits."""
    columns = {f"c{i}": np.roll(np.arange(300), i) for i in range(12)}
    rows = pa.table({"n": range(300), **columns})
    fields = [LakePartitionField(name=c, source=c, transform="identity") for c in columns]

    assert len(_split(rows, *fields)) == 300


_MOMENT = st.datetimes()
_CASES: list[tuple[pa.DataType, st.SearchStrategy[Any], list[str]]] = [
    (pa.int32(), st.integers(-(2**31) + 20, 2**31 - 1), ["identity", "bucket[7]", "truncate[10]"]),
    (pa.int64(), st.integers(-(2**63) + 20, 2**63 - 1), ["identity", "bucket[7]", "truncate[10]"]),
    (pa.string(), st.text(max_size=9), ["identity", "bucket[7]", "truncate[3]"]),
    (pa.binary(), st.binary(max_size=9), ["identity", "bucket[7]", "truncate[3]"]),
    (pa.bool_(), st.booleans(), ["identity"]),
    (
        pa.decimal128(9, 2),
        st.decimals(-9_999_999, 9_999_999, places=2),
        ["identity", "bucket[7]", "truncate[50]"],
    ),
    (
        pa.date32(),
        st.dates(),
        ["identity", "bucket[7]", "year", "month", "day"],
    ),
    (pa.timestamp("us"), _MOMENT, ["identity", "bucket[7]", "year", "month", "day", "hour"]),
    (
        pa.timestamp("us", tz="UTC"),
        _MOMENT.map(lambda moment: moment.replace(tzinfo=dt.UTC)),
        ["identity", "bucket[7]", "year", "month", "day", "hour"],
    ),
]


@pytest.mark.parametrize(
    ("data_type", "values", "transform"),
    [(t, s, transform) for t, s, transforms in _CASES for transform in transforms],
    ids=[f"{transform}({t})" for t, _, transforms in _CASES for transform in transforms],
)
@given(data=st.data())
def test_values_are_those_of_icebergs_scalar_transforms(
    data: st.DataObject, data_type: pa.DataType, values: st.SearchStrategy[Any], transform: str
) -> None:
    column = data.draw(st.lists(st.none() | values, min_size=1, max_size=20))
    rows = pa.table({"n": range(len(column)), "c": pa.array(column, data_type)})
    parsed = PartitionField.parse("c" if transform == "identity" else _as_call(transform))
    field = LakePartitionField(
        name="p", source="c", transform=parsed.transform, parameter=parsed.parameter
    )
    names = NameMapping(
        [MappedField(field_id=1, names=["n"]), MappedField(field_id=2, names=["c"])]
    )
    iceberg_type = pyarrow_to_schema(rows.schema, names).find_type("c")
    scalar = parse_transform(transform).transform(iceberg_type)

    found = _split(rows, field)

    expected: dict[tuple[Any, ...], list[int]] = {}
    for n, value in enumerate(column):
        expected.setdefault((scalar(_internal(value)),), []).append(n)
    assert found == expected


def _as_call(transform: str) -> str:
    name, _, parameter = transform.rstrip("]").partition("[")
    return f"{name}({parameter}, c)" if parameter else f"{name}(c)"


def _internal(value: Any) -> Any:
    """The value as Iceberg stores it."""
    if isinstance(value, dt.datetime):
        moment = value if value.tzinfo else value.replace(tzinfo=dt.UTC)
        return (moment - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)
    if isinstance(value, dt.date):
        return (value - dt.date(1970, 1, 1)).days
    return value


_DAYS = [-(2**31), -719_163, -1, 2_932_897, 2**31 - 1]
_MICROSECONDS = [-(2**63), -62_135_596_800_000_001, -1, 253_402_300_800_000_000, 2**63 - 1]


@pytest.mark.parametrize(
    ("width", "t", "transform", "expected"),
    [
        (pa.int32(), pa.date32(), "day", _DAYS),
        (pa.int32(), pa.date32(), "month", [-70_555_327, -23_629, -1, 96_360, 70_555_326]),
        (pa.int32(), pa.date32(), "year", [-5_879_611, -1_970, -1, 8_030, 5_879_610]),
        (pa.int64(), pa.timestamp("us"), "year", [-292_278, -1_970, -1, 8_030, 292_277]),
        (
            pa.int64(),
            pa.timestamp("us", tz="UTC"),
            "day",
            [-106_751_992, -719_163, -1, 2_932_897, 106_751_991],
        ),
        (
            pa.int64(),
            pa.timestamp("us"),
            "hour",
            [-(2**31), -17_259_889, -1, 70_389_528, 2**31 - 1],
        ),
    ],
)
def test_times_of_every_year_have_a_partition(
    width: pa.DataType, t: pa.DataType, transform: str, expected: list[int]
) -> None:
    """Iceberg's own library gives null for most of them, and wraps hours around."""
    numbers = _DAYS if width == pa.int32() else _MICROSECONDS
    rows = pa.table({"n": range(5), "c": pa.array(numbers, width).view(t)})

    found = _split(rows, LakePartitionField(name="p", source="c", transform=transform))

    assert found == {(value,): [n] for n, value in enumerate(expected)}


@pytest.mark.parametrize(
    ("column", "least"),
    [
        (pa.array([-(2**31), -(2**31) + 9, 2**31 - 1], pa.int32()), -(2**31)),
        (pa.array([-(2**63), -(2**63) + 9, 2**63 - 1], pa.int64()), -(2**63)),
        (
            pa.array([Decimal("-999.99"), Decimal("-999.90"), Decimal("999.99")]).cast(
                pa.decimal128(5, 2)
            ),
            Decimal("-999.99"),
        ),
    ],
)
def test_what_would_be_cut_below_its_type_has_the_least_partition(
    column: pa.Array, least: Any
) -> None:
    rows = pa.table({"n": range(3), "c": column})
    field = LakePartitionField(name="p", source="c", transform="truncate", parameter=10)

    found = list(_split(rows, field))

    assert found[0] == (least,)
    assert found[1] > found[0]
    assert found[2] > found[1]
