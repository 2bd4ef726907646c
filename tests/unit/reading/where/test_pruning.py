"""Statistics do prune, and are read from Parquet without trusting too much.

That nothing is pruned wrongly is tests/property's job.
"""

from __future__ import annotations

import datetime
import io
import math
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamhouse.core.model.schema import Schema
from streamhouse.lake.files.bounds import ColumnStatistics, row_group_statistics
from streamhouse.reading.where._pruning import may_match
from streamhouse.reading.where.parser import parse_predicate

SCHEMA = Schema.from_arrow(
    pa.schema(
        [
            ("id", pa.int64()),
            ("other", pa.int32()),
            ("amount", pa.float64()),
            ("name", pa.string()),
            ("price", pa.decimal128(9, 2)),
            ("at", pa.timestamp("us", tz="UTC")),
            ("place", pa.struct([("zone", pa.int32())])),
        ]
    )
)
STATISTICS = {
    "id": ColumnStatistics(minimum=10, maximum=20, null_count=0, row_count=5),
    "other": ColumnStatistics(minimum=15, maximum=15, null_count=0, row_count=5),
    "amount": ColumnStatistics(minimum=1.0, maximum=2.0, null_count=0, row_count=5),
    "name": ColumnStatistics(minimum="berlin", maximum="paris", null_count=5, row_count=10),
    "price": ColumnStatistics(null_count=5, row_count=5),
}


def _may(where: str) -> bool:
    return may_match(parse_predicate(where, SCHEMA, table="db.t"), STATISTICS)


@pytest.mark.parametrize(
    "where",
    [
        "id < 10",
        "id > 20",
        "id = 9",
        "id IN (1, 21)",
        "id IS NULL",
        "NOT id >= 10",
        "NOT (id > 5 OR name = 'x')",
        "id > 20 AND name = 'berlin'",
        "id > 20 OR id < 10",
        "other != 15",
        "other NOT IN (15)",
        "amount < 1",
        "amount = 3",
        "name LIKE 'x%'",
        "name LIKE 'a%b'",
        "price IS NOT NULL",
        "price = 1",
        "price <=> 1",
        "id = other AND id > 20",
        "other = NULL",
    ],
)
def test_rows_that_cannot_match_are_pruned(where: str) -> None:
    assert not _may(where)


@pytest.mark.parametrize(
    "where",
    [
        "id <= 10",
        "id = 15",
        "id <=> 15",
        "id NOT IN (15)",
        "id < other",
        "id != other",
        "amount > 2",
        "amount >= 3",
        "isnan(amount)",
        "amount != 1",
        "name IS NULL",
        "name LIKE 'p%'",
        "name LIKE '%x'",
        "name NOT LIKE 'b%'",
        "price IS NULL",
        "at = '2024-01-01'",
        "place.zone = 1",
    ],
)
def test_rows_that_may_match_are_kept(where: str) -> None:
    assert _may(where)


def test_columns_whose_ranges_do_not_meet_are_pruned() -> None:
    predicate = parse_predicate("id <= other", SCHEMA, table="db.t")
    apart = {
        "id": ColumnStatistics(minimum=10, maximum=20),
        "other": ColumnStatistics(minimum=1, maximum=9),
    }

    assert not may_match(predicate, apart)


def test_parquet_bounds_are_plain_values() -> None:
    times = [datetime.datetime(1969, 12, 31, 23, 59, 59, 999_999), None]
    table = pa.table(
        {
            "small": pa.array([-1, 5], pa.int8()),
            "price": pa.array([Decimal("-1.50"), Decimal("2.00")], pa.decimal128(38, 2)),
            "day": pa.array([datetime.date(1969, 12, 31), None]),
            "at": pa.array(times, pa.timestamp("us", tz="UTC")),
            "place": [{"zone": 1, "tags": ["a"]}, None],
            "name": ["a", "é"],
            "amount": [math.nan, 1.0],
            "nothing": pa.array([None, None], pa.int32()),
            "nan": [math.nan, math.nan],
            "a.b": [1, 2],
        }
    )
    buffer = io.BytesIO()
    pq.write_table(table, buffer)

    found = row_group_statistics(pq.ParquetFile(buffer).metadata, 0)

    def bounds(key: str) -> tuple[object, object, int | None]:
        return found[key].minimum, found[key].maximum, found[key].null_count

    assert bounds("small") == (-1, 5, 0)
    assert bounds("price") == (Decimal("-1.50"), Decimal("2.00"), 0)
    assert bounds("day") == (-1, -1, 1)
    assert bounds("at") == (-1, -1, 1)
    assert bounds("place.zone") == (1, 1, 1)
    assert bounds("name") == ("a", "é", 0)
    assert bounds("amount") == (1.0, 1.0, 0)
    assert bounds("nothing") == (None, None, 2)
    assert bounds("nan") == (None, None, 0)
    assert bounds("`a.b`") == (1, 2, 0)
    assert "place.tags.element" not in found
    assert {s.row_count for s in found.values()} == {2}


@pytest.mark.parametrize(("unit", "low", "high"), [("ns", -2, 2), ("ms", -1_001_000, 1_001_000)])
def test_bounds_in_other_time_units_are_widened_to_microseconds(
    unit: str, low: int, high: int
) -> None:
    times = pa.array([-1_001, 1_001], pa.timestamp(unit))
    buffer = io.BytesIO()
    pq.write_table(pa.table({"at": times}), buffer)

    found = row_group_statistics(pq.ParquetFile(buffer).metadata, 0)["at"]

    assert (found.minimum, found.maximum) == (low, high)


def test_a_file_without_statistics_is_never_pruned_by_value() -> None:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"id": [1]}), buffer, write_statistics=False)

    found = row_group_statistics(pq.ParquetFile(buffer).metadata, 0)

    assert may_match(parse_predicate("id = 7", SCHEMA, table="db.t"), found)


def test_only_the_asked_columns_are_read() -> None:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"id": [1, None], "name": ["a", "b"]}), buffer)

    found = row_group_statistics(pq.ParquetFile(buffer).metadata, 0, columns=["id", "missing"])

    assert found == {"id": ColumnStatistics(minimum=1, maximum=1, null_count=1, row_count=2)}
