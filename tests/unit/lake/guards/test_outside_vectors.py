"""Deletion vectors that another engine commits are judged as position deletes are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyiceberg.exceptions import ForbiddenError as RefusedByCatalog
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import Table

from streamhouse.core.errors import ForbiddenError
from streamhouse.core.model.lake.facts import LakeRole
from streamhouse.lake.files.deletes._deletion_vectors import DeletionVector
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.snapshots._outside_changes import _Change, check_outside_commit
from streamhouse.lake.snapshots.inventory import InventoryReader
from tests.support.foreign_deletes import commit_delete_files, deletion_vector
from tests.support.key_table_world import KeyTableWorld
from tests.support.rest_world import RestWorld
from tests.support.tiering_world import TieringWorld, rows
from tests.support.v3_tables import commit_vectors, send_vectors, written_vectors

VERSION_3 = {"table.datalake.format-version": "3"}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[TieringWorld]:
    with TieringWorld(tmp_path) as opened:
        yield opened


def _delete_some(world: TieringWorld, name: str) -> None:
    """Delete two rows by a vector in a table that is upgraded, and judge the commit."""
    table = world.lake_table(name)
    file = next(iter(table.scan().plan_files())).file
    vectors = written_vectors(table, {file.file_path: (0, 1)})
    table = commit_vectors(table, vectors, partitions={file.file_path: file.partition})
    info = world.service.table_state(name).table
    snapshot = table.current_snapshot()
    assert snapshot is not None
    check_outside_commit(
        name, table.metadata, [snapshot], info, LakeRole.ROWS, covered={0: 50}, io=table.io
    )


def test_a_vector_deletes_rows_of_a_log_table(world: TieringWorld) -> None:
    world.create_table()
    world.service.append("db.t", 0, rows(0, 50))
    world.tier()

    _delete_some(world, "db.t")


def test_a_vector_deletes_no_rows_of_a_primary_key_table(tmp_path: Path) -> None:
    with KeyTableWorld(tmp_path) as world:
        world.create_key_table()
        world.upsert(*({"id": i, "region": "r", "amount": 1.0} for i in range(10)))
        world.catch_up()

        with pytest.raises(ForbiddenError, match="through the streamhouse service only"):
            _delete_some(world.tiering, "db.t")


def test_format_version_2_has_no_vectors(world: TieringWorld) -> None:
    world.create_table()
    world.service.append("db.t", 0, rows(0, 50))
    world.tier()
    with RestWorld(world) as rest:
        table = rest.client().load_table("db.t")
        file = next(iter(table.scan().plan_files())).file
        vector = deletion_vector(table, file.file_path, offset=4, partition=file.partition)

        with pytest.raises(RefusedByCatalog, match="is a deletion vector, which format version 2"):
            commit_delete_files(table, [vector])


@pytest.fixture
def rest(world: TieringWorld) -> Iterator[RestWorld]:
    """A log table in format version 3, with two data files of 50 rows."""
    world.create_table(properties=VERSION_3)
    for start in (0, 50):
        world.service.append("db.t", 0, rows(start, 50))
        world.tier()
    with RestWorld(world) as opened:
        yield opened


def _vectors_of_first_file(table: Table, *positions: int) -> list[DeletionVector]:
    path = min(task.file.file_path for task in table.scan().plan_files())
    return written_vectors(table, {path: positions})


def test_a_vector_is_replaced_by_one_with_more_rows(rest: RestWorld) -> None:
    table = rest.client().load_table("db.t")
    before = _vectors_of_first_file(table, 1, 2)
    send_vectors(table, before)

    send_vectors(table.refresh(), _vectors_of_first_file(table, 1, 2, 3), replaced=[before[0].path])

    assert len(rest.world.addresses()) == 97


def test_a_data_file_has_one_vector(rest: RestWorld) -> None:
    """Every later read and maintenance of ours would refuse the table."""
    table = rest.client().load_table("db.t")
    twice = [*_vectors_of_first_file(table, 1), *_vectors_of_first_file(table, 2)]
    with pytest.raises(RefusedByCatalog, match="would have 2 deletion vectors"):
        send_vectors(table, twice)
    send_vectors(table, twice[:1])
    with pytest.raises(RefusedByCatalog, match="replace its vector by one with the rows of both"):
        send_vectors(table.refresh(), twice[1:])

    assert len(rest.world.addresses()) == 99


def test_no_deleted_row_comes_back(rest: RestWorld) -> None:
    table = rest.client().load_table("db.t")
    before = _vectors_of_first_file(table, 1, 2, 3)
    send_vectors(table, before)

    for after in (_vectors_of_first_file(table, 1), []):
        with pytest.raises(RefusedByCatalog, match=r"brings back \d deleted rows of data file"):
            send_vectors(table.refresh(), after, replaced=[before[0].path])

    assert len(rest.world.addresses()) == 97


def test_a_compaction_brings_no_row_of_a_key_table_back(tmp_path: Path) -> None:
    """Lookups would not have the row, and reads only until the log has forgotten its end."""
    with KeyTableWorld(tmp_path) as world, RestWorld(world.tiering) as rest:
        world.create_key_table(properties=VERSION_3)
        world.upsert(*({"id": i, "region": "r", "amount": 1.0} for i in range(10)))
        world.catch_up()
        world.upsert(*({"id": i, "region": "r", "amount": 2.0} for i in range(4)))
        world.catch_up()
        table = rest.client().load_table("db.t")
        inventory = InventoryReader(LakeFilesystem({})).read(table)
        assert inventory is not None
        puffins = [live.deletes.path for live in inventory.deletes]

        with pytest.raises(RefusedByCatalog, match="brings back 4 deleted rows of data file"):
            send_vectors(table, [], replaced=puffins, operation="replace")

        assert world.in_lake() == world.live


def _entry(data_path: str, count: int) -> DataFile:
    return DataFile.from_args(
        _table_format_version=3,
        content=DataFileContent.POSITION_DELETES,
        file_path="v.puffin",
        file_format=FileFormat.PUFFIN,
        record_count=count,
        referenced_data_file=data_path,
    )


def test_a_vector_counts_without_the_rows_of_the_vector_that_it_replaces() -> None:
    """Else an update could bring as many rows as were ever deleted of a file."""
    change = _Change()
    change.count(_entry("a", 100), is_added=False)
    change.count(_entry("a", 103), is_added=True)
    change.count(_entry("b", 5), is_added=True)
    change.count(_entry("c", 7), is_added=False)

    assert (change.hidden_rows, change.shown_rows, change.newly_hidden_rows) == (8, 7, 1)
