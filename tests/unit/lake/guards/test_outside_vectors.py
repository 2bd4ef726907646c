"""Deletion vectors that another engine commits are judged as position deletes are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyiceberg.exceptions import ForbiddenError as RefusedByCatalog
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat

from streamhouse.core.errors import ForbiddenError
from streamhouse.core.model.lake.facts import LakeRole
from streamhouse.lake.snapshots._outside_changes import _Change, check_outside_commit
from tests.support.foreign_deletes import commit_delete_files, deletion_vector
from tests.support.key_table_world import KeyTableWorld
from tests.support.rest_world import RestWorld
from tests.support.tiering_world import TieringWorld, rows
from tests.support.v3_tables import commit_vectors, written_vectors


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
