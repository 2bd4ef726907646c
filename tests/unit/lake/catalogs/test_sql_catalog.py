"""Commits through our SQL catalog leave what pyiceberg's own leaves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import Table

from streamhouse.core.errors import UnsupportedError
from streamhouse.core.model.lake.facts import LakeCatalog
from streamhouse.lake._landing import StagedChange
from streamhouse.lake.catalogs._sql_catalog import LakeSqlCatalog, open_catalog
from streamhouse.lake.commits._staged_snapshot import (
    Operation,
    SnapshotChanges,
    stage_snapshot,
)

NAME = "db.t"


@pytest.fixture
def described(tmp_path: Path) -> LakeCatalog:
    return LakeCatalog(
        name="lake",
        properties={
            "type": "sql",
            "uri": f"sqlite:///{tmp_path}/catalog.db",
            "warehouse": f"file://{tmp_path}/lake",
        },
    )


@pytest.fixture
def ours(described: LakeCatalog) -> Iterator[LakeSqlCatalog]:
    catalog = open_catalog(described)
    assert isinstance(catalog, LakeSqlCatalog)
    catalog.create_namespace("db")
    catalog.create_table(NAME, pa.schema([pa.field("id", pa.int64())]))
    yield catalog
    catalog.close()


@pytest.fixture
def judge(described: LakeCatalog) -> Iterator[SqlCatalog]:
    catalog = SqlCatalog(described.name, **described.properties)
    yield catalog
    catalog.close()


def staged_on(table: Table, number: int) -> StagedChange:
    return stage_snapshot(
        table,
        SnapshotChanges(operation=Operation.APPEND),
        summary={"number": str(number)},
        table_properties=lambda _: {"last": str(number)},
    )


def advance(table: Table, number: int) -> int:
    staged = staged_on(table, number)
    table._do_commit(staged.updates, staged.requirements)
    return staged.snapshot_id


def test_metadata_is_what_pyiceberg_reads_back_after_every_commit(
    ours: LakeSqlCatalog, judge: SqlCatalog
) -> None:
    snapshot_ids = []
    for number in range(6):
        snapshot_ids.append(advance(ours.load_table(NAME), number))
        known, read = ours.load_table(NAME), judge.load_table(NAME)
        assert known.metadata_location == read.metadata_location
        assert known.metadata == read.metadata
        assert [s.snapshot_id for s in read.snapshots()] == snapshot_ids
        assert [entry.snapshot_id for entry in read.history()] == snapshot_ids
        assert [s.parent_snapshot_id for s in read.snapshots()] == [None, *snapshot_ids[:-1]]
        assert read.properties["last"] == str(number)


def test_commits_of_others_are_seen_and_never_overwritten(
    ours: LakeSqlCatalog, judge: SqlCatalog
) -> None:
    first = advance(ours.load_table(NAME), 0)
    stale = ours.load_table(NAME)
    second = advance(judge.load_table(NAME), 1)

    with pytest.raises(CommitFailedException):
        advance(stale, 2)
    third = advance(ours.load_table(NAME), 3)

    read = judge.load_table(NAME)
    assert [s.snapshot_id for s in read.snapshots()] == [first, second, third]


def test_other_kinds_of_commits_do_as_in_pyiceberg(ours: LakeSqlCatalog, judge: SqlCatalog) -> None:
    first, second, third = [advance(ours.load_table(NAME), number) for number in range(3)]
    ours.load_table(NAME).manage_snapshots().create_tag(first, "kept").commit()
    ours.load_table(NAME).maintenance.expire_snapshots().by_id(second).commit()
    fourth = advance(ours.load_table(NAME), 4)

    read = judge.load_table(NAME)
    assert [s.snapshot_id for s in read.snapshots()] == [first, third, fourth]
    assert read.metadata.refs["kept"].snapshot_id == first
    assert ours.load_table(NAME).metadata == read.metadata


def test_a_driver_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    described = LakeCatalog(
        name="lake", properties={"type": "sql", "uri": "postgresql+psycopg2://me@127.0.0.1:9/lake"}
    )

    with pytest.raises(UnsupportedError, match=r"'psycopg2'.*: pip install psycopg2-binary$"):
        open_catalog(described)
