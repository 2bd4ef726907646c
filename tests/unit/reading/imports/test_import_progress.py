"""How an import is cut and counted, and why it copies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.exceptions import ResolveError

from streamhouse.reading.files.appends import SourceTable
from streamhouse.reading.imports._import_origin import ImportOrigin
from streamhouse.reading.imports._import_progress import (
    _last_true,
    last_position,
    steps,
    version_of,
)
from streamhouse.reading.options.connection import TableName
from streamhouse.reading.plan.iceberg_read import open_source
from tests.support.held_step import lower
from tests.support.iceberg_world import IcebergWorld, numbered

ROWS = numbered(0, 0).schema


@pytest.fixture
def world(tmp_path: Path) -> Iterator[IcebergWorld]:
    with IcebergWorld(tmp_path) as opened:
        yield opened


def source(world: IcebergWorld) -> SourceTable:
    return open_source(world.client, TableName.parse(f"{world.NAME}$iceberg"))


@given(st.integers(0, 40), st.integers(0, 40))
def test_the_last_that_is_true_is_found(count: int, true: int) -> None:
    expected = min(count, true) - 1
    found = _last_true(range(count), lambda item: item < true)

    assert found == (None if expected < 0 else expected)


def test_wherever_an_import_stopped_it_goes_on_there(
    world: IcebergWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower(monkeypatch, "import-step", 3)
    world.create(ROWS)
    world.append(numbered(0, 2), numbered(2, 3), numbered(3, 7))
    world.append(numbered(7, 8))
    origin = ImportOrigin.of(source(world), world.NAME)
    world.append(numbered(8, 10), numbered(10, 12), numbered(12, 13))
    world.rewrite()
    world.append(numbered(13, 14))
    table = source(world)
    start = table.start(origin.snapshot_id)
    whole = list(steps(table, start, until=table.snapshot_id))
    versions = [version_of(step.end) for step in whole]

    assert [step.row_count for step in whole] == [3, 4, 1, 4, 1, 0, 1]
    assert versions == sorted(set(versions))
    for done in range(len(whole) + 1):
        last = versions[done - 1] if done else -1
        at = last_position(table, origin, lambda version, last=last: version <= last)
        assert list(steps(table, at, until=table.snapshot_id)) == whole[done:]


def test_files_without_our_columns_cannot_be_rows_of_our_lake(world: IcebergWorld) -> None:
    """decisions/0010: no metadata gives a file a column that differs in every row."""
    world.create(ROWS)
    world.append(numbered(0, 5))
    offset = pa.field("__offset", pa.int64())
    optional = world.catalog.create_table("shop.optional", ROWS.append(offset))
    required = world.catalog.create_table("shop.required", ROWS.append(offset.with_nullable(False)))

    with pytest.raises(ValueError, match="Mismatch in fields"):
        required.add_files(world.paths())
    with required.transaction() as change, change.update_snapshot().fast_append() as snapshot:
        for task in world.table().scan().plan_files():
            snapshot.append_data_file(task.file)
    with pytest.raises(ResolveError, match="could not be found in the file"):
        required.scan(selected_fields=("__offset",)).to_arrow()
    optional.add_files(world.paths())
    assert optional.scan().to_arrow()["__offset"].to_pylist() == [None] * 5
