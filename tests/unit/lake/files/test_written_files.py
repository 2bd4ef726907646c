"""What other engines prune by: bounds, counts and sort order of every data file."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.conversions import from_bytes
from pyiceberg.manifest import DataFile

from tests.support.tiering_world import TieringWorld

UTC = dt.UTC
COLUMNS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "flag": (pa.bool_(), [False, True, None]),
    "tiny": (pa.int8(), [-128, 127, None]),
    "big": (pa.int64(), [-(2**63), 2**63 - 1, None]),
    "ratio": (pa.float32(), [-1.5, 2.5, None]),
    "amount": (pa.float64(), [-1e300, 1e300, None]),
    "price": (pa.decimal128(9, 2), [Decimal("-0.01"), Decimal("1234567.89"), None]),
    "wide": (pa.decimal128(18, 3), [Decimal("-999999999999.999"), Decimal("0.001"), None]),
    "huge": (pa.decimal128(38, 0), [Decimal(-(10**37)), Decimal(10**37), None]),
    "name": (pa.string(), ["", "é", None]),
    "raw": (pa.binary(), [b"\x00", b"\xff\x01", None]),
    "day": (pa.date32(), [dt.date(1900, 1, 1), dt.date(2100, 1, 1), None]),
    "ts": (
        pa.timestamp("us", tz="UTC"),
        [
            dt.datetime(1969, 12, 31, 23, 59, 59, 999999, UTC),
            dt.datetime(2024, 1, 1, tzinfo=UTC),
            None,
        ],
    ),
    "ts_ntz": (pa.timestamp("us"), [dt.datetime(1, 1, 1), dt.datetime(9999, 1, 1), None]),
}


@pytest.fixture
def data_file(world: TieringWorld) -> DataFile:
    world.create_table(schema=pa.schema([(name, t) for name, (t, _) in COLUMNS.items()]))
    batch = {name: pa.array(values, t) for name, (t, values) in COLUMNS.items()}
    world.service.append("db.t", 0, pa.record_batch(batch))
    world.tier()
    (task,) = world.lake_table().scan().plan_files()
    return task.file


@pytest.mark.parametrize("name", list(COLUMNS))
def test_bounds_and_counts_of_each_type(
    world: TieringWorld, data_file: DataFile, name: str
) -> None:
    field = world.lake_table().schema().find_field(name)

    bounds = [
        from_bytes(field.field_type, limits[field.field_id])
        for limits in (data_file.lower_bounds, data_file.upper_bounds)
    ]

    assert bounds == [_stored(value) for value in COLUMNS[name][1][:2]]
    assert data_file.value_counts[field.field_id] == 3
    assert data_file.null_value_counts[field.field_id] == 1


def _stored(value: Any) -> Any:
    if isinstance(value, dt.datetime):
        moment = value if value.tzinfo else value.replace(tzinfo=UTC)
        return (moment - dt.datetime(1970, 1, 1, tzinfo=UTC)) // dt.timedelta(microseconds=1)
    if isinstance(value, dt.date):
        return (value - dt.date(1970, 1, 1)).days
    return value


def test_the_file_says_how_it_is_sorted_and_where_it_may_be_split(data_file: DataFile) -> None:
    assert data_file.sort_order_id == 1
    assert data_file.split_offsets == [4]
    assert data_file.record_count == 3
    assert data_file.spec_id == 0
    assert list(data_file.partition) == [0]


def test_offsets_have_exact_bounds_beyond_a_hundred_columns(world: TieringWorld) -> None:
    """Engines keep bounds of only the first hundred columns unless a table says otherwise."""
    names = [f"c{i}" for i in range(150)]
    world.create_table(schema=pa.schema([(name, pa.int64()) for name in names]))
    world.service.append("db.t", 0, pa.record_batch({name: [1, 2] for name in names}))

    world.tier()

    (task,) = world.lake_table().scan(row_filter="__offset = 1").plan_files()
    field = world.lake_table().schema().find_field("__offset")
    assert from_bytes(field.field_type, task.file.upper_bounds[field.field_id]) == 1
    assert list(world.lake_table().scan(row_filter="__offset = 2").plan_files()) == []


@pytest.mark.parametrize(
    ("row_filter", "names"),
    [
        ("price < 0", [""]),
        ("wide <= -999999999999.999", [""]),
        ("huge >= 1", ["é"]),
        ("ts < '1970-01-01T00:00:00+00:00'", [""]),
        ("day = '2100-01-01'", ["é"]),
        ("name is null", [None]),
        ("flag = true", ["é"]),
    ],
)
def test_stock_pyiceberg_finds_rows_by_them(
    world: TieringWorld, data_file: DataFile, row_filter: str, names: list[str | None]
) -> None:
    found = world.lake_table().scan(row_filter=row_filter).to_arrow()

    assert found["name"].to_pylist() == names
