"""The judges themselves: each reads a table that stock pyiceberg wrote, and agrees with it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog

from integration.judges.engines import read_many_with_spark35, read_with_duckdb

ROWS = pa.table(
    {
        "id": pa.array([1, 2, 3], pa.int64()),
        "name": pa.array(["a", None, "ü"], pa.string()),
        "price": pa.array([Decimal("1.50"), Decimal("-2.25"), None], pa.decimal128(10, 2)),
        "at": pa.array(
            [datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)] * 3, pa.timestamp("us", tz="UTC")
        ),
        "day": pa.array([date(2026, 1, 2)] * 3, pa.date32()),
        "raw": pa.array([b"\x00\xff", b"", None], pa.binary()),
        "tags": pa.array([["x", "y"], [], None], pa.list_(pa.string())),
    }
)
ALL = "SELECT * FROM lake_table ORDER BY id"
TOTALS = "SELECT count(*) AS n, sum(id) AS total FROM lake_table"
EXPECTED_ALL: list[dict[str, Any]] = [
    {
        "id": 1,
        "name": "a",
        "price": "1.50",
        "at": "2026-01-02T03:04:05.678901+00:00",
        "day": "2026-01-02",
        "raw": "00ff",
        "tags": ["x", "y"],
    },
    {
        "id": 2,
        "name": None,
        "price": "-2.25",
        "at": "2026-01-02T03:04:05.678901+00:00",
        "day": "2026-01-02",
        "raw": "",
        "tags": [],
    },
    {
        "id": 3,
        "name": "ü",
        "price": None,
        "at": "2026-01-02T03:04:05.678901+00:00",
        "day": "2026-01-02",
        "raw": None,
        "tags": None,
    },
]


@pytest.fixture(scope="module")
def metadata_location(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home: Path = tmp_path_factory.mktemp("lake")
    catalog = SqlCatalog("judged", uri=f"sqlite:///{home}/catalog.db", warehouse=f"file://{home}")
    catalog.create_namespace("shop")
    table = catalog.create_table("shop.orders", schema=ROWS.schema)
    table.append(ROWS.slice(0, 2))
    table.append(ROWS.slice(2, 1))
    yield table.metadata_location
    catalog.close()


@pytest.mark.slow
@pytest.mark.end_to_end
def test_duckdb_reads_what_pyiceberg_wrote(metadata_location: str) -> None:
    assert read_with_duckdb(metadata_location, ALL) == EXPECTED_ALL
    assert read_with_duckdb(metadata_location, TOTALS) == [{"n": 3, "total": 6}]


@pytest.mark.slow
@pytest.mark.end_to_end
def test_a_judge_that_cannot_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no-such"):
        read_with_duckdb(str(tmp_path / "no-such.metadata.json"), TOTALS)


@pytest.mark.slow
@pytest.mark.judge
def test_iceberg_java_reads_what_pyiceberg_wrote(metadata_location: str) -> None:
    rows, totals = read_many_with_spark35([(metadata_location, ALL), (metadata_location, TOTALS)])

    # Spark gives a timestamp without its zone; the session's zone is UTC.
    assert rows == [{**row, "at": row["at"].removesuffix("+00:00")} for row in EXPECTED_ALL]
    assert totals == [{"n": 3, "total": 6}]
