"""The row ids of a lake table in format version 3, as DuckDB reads them."""

from __future__ import annotations

import functools
from typing import NamedTuple

import duckdb

from integration.judges.duckdb_read import connect
from tests.support.key_table_world import Address, KeyTableWorld

__all__ = ["Lineage", "first_versions", "lineage_in_lake"]


class Lineage(NamedTuple):
    """What a row in the lake says of itself; the id is None before the table has row ids."""

    row_id: int | None
    sequence_number: int


@functools.cache
def _connection() -> duckdb.DuckDBPyConnection:
    return connect()


def lineage_in_lake(world: KeyTableWorld) -> dict[Address, Lineage]:
    """Return the lineage of each row in the lake by the row's address."""
    location = world.tiering.lake_table().metadata_location.removeprefix("file://")
    rows = (
        _connection()
        .execute(
            "SELECT __bucket, __offset, _row_id, _last_updated_sequence_number"
            f" FROM iceberg_scan('{location}')"
        )
        .fetchall()
    )
    return {(bucket, offset): Lineage(*lineage) for bucket, offset, *lineage in rows}


def first_versions(world: KeyTableWorld) -> dict[Address, Address]:
    """Return the address of the first version of each live row, by that of its last version.

    A row that was deleted and inserted again is another row.
    """
    first: dict[Address, Address] = {}
    for bucket, model in enumerate(world.buckets):
        for _, (last, _) in model.rows.items():
            offset = last
            while (older := model.log[offset].retracts) is not None:
                offset = older
            first[bucket, last] = (bucket, offset)
    return first
