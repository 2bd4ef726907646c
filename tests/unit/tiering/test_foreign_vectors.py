"""A table of ours in format version 3, of which another engine has deleted rows by vectors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from streamhouse.client import StorageClient
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.snapshots.inventory import InventoryReader
from streamhouse.reading.options.options import BATCH, read_options
from streamhouse.reading.plan.pinned_table import read_table
from tests.support.log_table_world import Address, LogTableWorld, addresses_in
from tests.support.v3_tables import commit_vectors, written_vectors

VERSION_3 = {"table.datalake.format-version": "3"}


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[LogTableWorld]:
    with LogTableWorld(tmp_path) as opened:
        yield opened


def _delete(lake: LogTableWorld, *addresses: Address) -> None:
    """Delete rows, with the vectors of all data files in one Puffin file."""
    table = lake.tiering.lake_table()
    positions, partitions = {}, {}
    for task in table.scan().plan_files():
        path = task.file.file_path
        places = [n for n, address in enumerate(addresses_in(path)) if address in addresses]
        if places:
            positions[path], partitions[path] = places, task.file.partition
    commit_vectors(table, written_vectors(table, positions), partitions=partitions)
    lake.deleted.update(addresses)


def _vectors(lake: LogTableWorld) -> list[bool]:
    """Which deletes the lake table has: True for a vector."""
    inventory = InventoryReader(LakeFilesystem({})).read(lake.tiering.lake_table())
    assert inventory is not None
    return [deletes.is_vector for deletes in inventory.deletes]


def _ids(lake: LogTableWorld) -> list[int]:
    client = cast("StorageClient", lake.tiering.service)
    rows = read_table(client, read_options({"table": "db.t", "columns": "__bucket,id"}, use=BATCH))
    return sorted(zip(rows["__bucket"].to_pylist(), rows["id"].to_pylist(), strict=True))


def test_union_reads_and_rounds_go_on(lake: LogTableWorld) -> None:
    lake.tiering.create_table(properties=VERSION_3, bucket_count=2)
    for bucket in (0, 1, 0):
        lake.tier_rows(10, bucket=bucket)
    _delete(lake, (0, 3), (0, 19), (1, 0), (1, 9))

    lake.tier_rows(10)

    lake.check_addresses()
    assert _ids(lake) == lake.expected()
    assert _vectors(lake) == [True, True, True]


def test_a_compaction_drops_the_vectors_of_its_files_alone(lake: LogTableWorld) -> None:
    """One file stays, whose vector is in the same Puffin file."""
    lake.tiering.create_table(properties=VERSION_3, bucket_count=2)
    lake.tier_rows(10, bucket=1)
    lake.tier_small_files(8)
    _delete(lake, *((0, offset) for offset in range(0, 80, 3)), (1, 4))
    lake.tier_rows(10)
    assert _vectors(lake) == [True] * 9

    report = lake.tiering.maintain()

    assert report.rewritten is not None
    assert report.rewritten.rows_dropped == 27
    assert _vectors(lake) == [True]
    lake.check_addresses()
    assert _ids(lake) == lake.expected()
