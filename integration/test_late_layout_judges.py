"""A batch layout that came later, copied from the lake, judged by DuckDB and Iceberg Java.

In Iceberg's format version 2 and 3, and in a table that goes from 2 to 3 between two layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.judges.engines import read_many_with_spark35, read_with_duckdb
from integration.judges.format_versions import EVERY, FormatVersion
from tests.support.key_table_world import KeyTableWorld

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

QUERY = "SELECT id, region, amount, __bucket, __offset FROM lake_table ORDER BY id"
FILTERED = "SELECT id, amount FROM lake_table WHERE region = 'r1' AND amount < 20 ORDER BY id"
LAYOUTS = (
    {"table.datalake.batch-layout.sort": "zorder(amount, id)"},
    {
        "table.datalake.batch-layout.partition": "region, bucket(2, id)",
        "table.datalake.batch-layout.sort": "amount",
    },
)


@pytest.fixture(params=EVERY, ids=str)
def version(request: pytest.FixtureRequest) -> FormatVersion:
    found: FormatVersion = request.param
    return found


@pytest.fixture
def world(tmp_path: Path, version: FormatVersion) -> Iterator[KeyTableWorld]:
    with KeyTableWorld(tmp_path) as opened:
        opened.create_key_table(
            bucket_count=2, partitioned_by=["region"], properties=version.properties
        )
        yield opened


def _live(world: KeyTableWorld, number: int) -> None:
    """New rows, changed ones, some that move between partitions, deletes; the log forgets them."""
    new = [{"id": number * 10 + i, "region": f"r{i % 3}", "amount": float(i)} for i in range(10)]
    changed = [
        {"id": i, "region": f"r{(i + number) % 3}", "amount": float(-number)}
        for i in range(0, number * 10, 7)
    ]
    world.upsert(*new, *changed)
    world.delete(*({"id": i} for i in range(number, number * 10, 13)))
    world.tiering.tier()


def _expected(world: KeyTableWorld) -> list[dict[str, Any]]:
    rows = [
        {**row, "__bucket": bucket, "__offset": offset}
        for bucket, model in enumerate(world.buckets)
        for offset, row in model.rows.values()
    ]
    return sorted(rows, key=lambda row: row["id"])


@pytest.mark.judge
def test_all_engines_read_every_row_of_a_copied_layout(
    world: KeyTableWorld, version: FormatVersion
) -> None:
    requests, expected = [], []
    for number in range(4):
        _live(world, number)
    for number, layout in enumerate(LAYOUTS):
        for bucket, end in world.tiering.service.table_state(world.PATH).reached_offsets().items():
            world.tiering.service.expire_log(world.PATH, bucket, end)
        upgrade = version.upgrade if number else {}
        world.tiering.service.change_layout(world.PATH, {**layout, **upgrade})
        # As it was copied, and once rows of the copy are retracted.
        for life in (None, 4 + number):
            if life is None:
                world.tiering.tier()
            else:
                _live(world, life)
            rows = _expected(world)
            location = world.tiering.lake_table(f"{world.PATH}$batch").metadata_location
            some = [
                {"id": row["id"], "amount": row["amount"]}
                for row in rows
                if row["region"] == "r1" and row["amount"] < 20
            ]
            for query, found in ((QUERY, rows), (FILTERED, some)):
                assert read_with_duckdb(location, query) == found
                requests.append((location, query))
                expected.append(found)

    assert world.tiering.lake_table(f"{world.PATH}$batch").format_version == version.at_the_end
    assert read_many_with_spark35(requests) == expected
