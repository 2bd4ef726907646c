"""Any Iceberg table as rows and as a stream of its appends, without a JVM."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType, StructType, UUIDType

from streamhouse.connector._spark_versions import ReadAllAvailable, ReadMaxRows
from streamhouse.connector.stream._append_stream import AppendStreamReader
from streamhouse.core.errors import (
    CorruptDataError,
    InvalidRequestError,
    SnapshotNotFoundError,
    StreamhouseError,
    TableNotFoundError,
    UnknownColumnError,
    UnsupportedError,
)
from tests.support.iceberg_world import IcebergWorld, ids_of, numbered

ALL = ReadAllAvailable()
ROWS = numbered(0, 0).schema


@pytest.fixture
def world(tmp_path: Path) -> Iterator[IcebergWorld]:
    with IcebergWorld(tmp_path) as opened:
        yield opened


def kept(position: Any) -> Any:
    """A position after its trip through the checkpoint."""
    return json.loads(json.dumps(position))


def drain(
    stream: AppendStreamReader, position: Any = None, *, limit: Any = ALL
) -> tuple[list[list[int]], Any]:
    """Read until there is nothing more: the micro-batches' ids, and where that was."""
    position = kept(position or stream.initialOffset())
    batches = []
    while (end := kept(stream.latestOffset(position, limit))) != position:
        batches.append(ids_of(stream, position, end))
        position = end
    return batches, position


# -- rows ------------------------------------------------------------------------------------------


def test_a_damaged_manifest_is_refused_with_a_sentence(world: IcebergWorld, tmp_path: Path) -> None:
    world.create(ROWS)
    world.append(numbered(0, 3))
    (path,) = tmp_path.rglob("*-m0.avro")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])

    with pytest.raises(CorruptDataError, match="its manifests are damaged"):
        world.read()


def test_the_rows_of_a_foreign_table_are_read_with_its_own_columns(world: IcebergWorld) -> None:
    world.create(ROWS)
    world.append(numbered(0, 5), numbered(5, 10))

    found = world.read(where="id >= 3 AND name <> 'n7'", columns="name,id")

    assert found.schema.names == ["name", "id"]
    assert sorted(found["id"].to_pylist()) == [3, 4, 5, 6, 8, 9]


def test_deleted_positions_are_left_out(world: IcebergWorld) -> None:
    world.create(ROWS)
    world.append(numbered(0, 5))
    world.delete_at(world.paths()[0], 1, 3)

    assert sorted(world.read()["id"].to_pylist()) == [0, 2, 4]
    assert world.read(asOfSnapshot=world.snapshot_ids()[0]).num_rows == 5


def test_a_table_without_a_snapshot_has_no_rows(world: IcebergWorld) -> None:
    world.create(ROWS)

    assert world.read().num_rows == 0
    assert drain(world.stream())[0] == []


def test_columns_are_found_by_id_after_a_rename_and_one_that_is_new_is_null(
    world: IcebergWorld,
) -> None:
    table = world.create(ROWS)
    world.append(numbered(0, 2))
    with table.update_schema() as change:
        change.rename_column("name", "label")
    with table.update_schema() as change:
        change.add_column("name", StringType())

    found = world.read(where="label = 'n1'")

    assert found.to_pylist() == [{"id": 1, "label": "n1", "name": None}]


def test_a_type_we_have_not_is_refused_by_name_unless_it_is_not_read(world: IcebergWorld) -> None:
    world.create(Schema(NestedField(1, "id", LongType()), NestedField(2, "key", UUIDType())))

    with pytest.raises(UnsupportedError, match=r"column 'key' cannot be read: its type uuid"):
        world.read()
    assert world.read(columns="id").schema.names == ["id"]


def test_without_a_name_mapping_a_renamed_column_of_a_file_without_ids_is_refused(
    world: IcebergWorld,
) -> None:
    world.create(ROWS)
    world.append(numbered(0, 1))
    world.add_without_ids(numbered(1, 2), "bare")
    with world.table().transaction() as change:
        change.remove_properties("schema.name-mapping.default")
    assert world.read().num_rows == 2

    with world.table().update_schema() as change:
        change.rename_column("name", "title")

    with pytest.raises(UnsupportedError, match=r"bare\.parquet' has no field ids, and no name"):
        world.read()


@pytest.mark.parametrize(
    "text", ["[1", '[{"names": ["id"], "field-id": 1}, {"names": ["id"], "field-id": 2}]']
)
def test_a_name_mapping_that_cannot_be_read_is_said(world: IcebergWorld, text: str) -> None:
    world.create(ROWS)
    world.append(numbered(0, 1))
    with world.table().transaction() as change:
        change.set_properties({"schema.name-mapping.default": text})

    with pytest.raises(CorruptDataError, match=r"shop\.clicks': property 'schema\.name-mapping"):
        world.read()
    with world.table().transaction() as change:
        change.remove_properties("schema.name-mapping.default")
    assert world.read().num_rows == 1


def test_a_nested_field_that_was_renamed_is_refused(world: IcebergWorld) -> None:
    place = StructType(NestedField(3, "zone", LongType()))
    table = world.create(Schema(NestedField(1, "id", LongType()), NestedField(2, "place", place)))
    with table.update_schema() as change:
        change.rename_column(("place", "zone"), "area")

    with pytest.raises(UnsupportedError, match=r"'place' cannot be read: its field 'area' was"):
        world.read()


def test_options_of_logs_are_refused(world: IcebergWorld) -> None:
    with pytest.raises(InvalidRequestError, match=r"'includeMetadata' has no meaning for 'shop"):
        world.read(includeMetadata=True)
    with pytest.raises(InvalidRequestError, match=r"'startingOffsets' of .* is 'full'"):
        world.stream(startingOffsets="earliest")


def test_system_columns_are_not_columns_of_the_table(world: IcebergWorld) -> None:
    world.create(pa.schema([("id", pa.int64()), ("__offset", pa.int64())]))

    assert world.read().schema.names == ["id"]
    with pytest.raises(UnknownColumnError, match=r"load .shop\.clicks. for them"):
        world.read(columns="__offset")


def test_a_table_that_is_not_there_is_named(world: IcebergWorld) -> None:
    with pytest.raises(NoSuchTableError):
        world.table()
    with pytest.raises(TableNotFoundError, match=r"has no Iceberg table .shop\.clicks."):
        world.read()


# -- the stream ------------------------------------------------------------------------------------


def test_a_stream_begins_with_the_rows_there_are_then_follows_appends(world: IcebergWorld) -> None:
    world.create(ROWS)
    world.append(numbered(0, 5))
    world.append(numbered(5, 10))
    stream = world.stream()

    batches, position = drain(stream)
    assert batches == [list(range(10))]

    world.append(numbered(10, 12), numbered(12, 15))
    world.append(numbered(15, 20))
    assert drain(stream, position)[0] == [list(range(10, 20))]


def test_latest_begins_with_the_next_append(world: IcebergWorld) -> None:
    world.create(ROWS)
    world.append(numbered(0, 5))
    stream = world.stream(startingOffsets="latest")
    start = stream.initialOffset()
    world.append(numbered(5, 7))

    assert drain(stream, start)[0] == [[5, 6]]


def test_a_micro_batch_has_whole_files_up_to_its_limit_and_at_least_one(
    world: IcebergWorld,
) -> None:
    world.create(ROWS)
    world.append(numbered(0, 5))
    world.append(numbered(5, 9))
    world.append(numbered(9, 20))
    stream = world.stream(maxOffsetsPerTrigger="9")

    batches, position = drain(stream, limit=stream.getDefaultReadLimit())
    assert batches == [list(range(9)), list(range(9, 20))]

    for start in (20, 22, 24, 26):
        world.append(numbered(start, start + 2))
    assert drain(stream, position, limit=ReadMaxRows(5))[0] == [[20, 21, 22, 23], [24, 25, 26, 27]]


def test_the_same_range_is_the_same_rows_after_a_restart_and_later_appends(
    world: IcebergWorld,
) -> None:
    world.create(ROWS)
    world.append(numbered(0, 5))
    world.append(numbered(5, 10))
    first = world.stream()
    start = kept(first.initialOffset())
    middle = kept(first.latestOffset(start, ReadMaxRows(5)))
    before = ids_of(first, start, middle)

    world.append(numbered(10, 15))
    world.rewrite()
    again = world.stream()

    assert ids_of(again, start, middle) == before == [0, 1, 2, 3, 4]
    assert drain(again, middle)[0] == [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]]


def test_compaction_adds_no_rows_and_leaves_nothing_out(world: IcebergWorld) -> None:
    world.create(ROWS)
    world.append(numbered(0, 5), numbered(5, 7))
    stream = world.stream()
    _, position = drain(stream)

    world.append(numbered(7, 9))
    world.rewrite()
    world.append(numbered(9, 12))

    assert drain(stream, position)[0] == [[7, 8, 9, 10, 11]]


def test_available_now_ends_where_it_began(world: IcebergWorld) -> None:
    world.create(ROWS)
    world.append(numbered(0, 5))
    world.append(numbered(5, 10))
    stream = world.stream()
    stream.prepareForTriggerAvailableNow()
    world.append(numbered(10, 15))

    batches, position = drain(stream, limit=ReadMaxRows(5))

    assert batches == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert drain(world.stream(), position)[0] == [[10, 11, 12, 13, 14]]


def test_deletes_and_overwrites_end_the_stream_unless_they_are_skipped(
    world: IcebergWorld,
) -> None:
    world.create(ROWS)
    world.append(numbered(0, 5))
    stream = world.stream()
    _, position = drain(stream)
    world.delete_at(world.paths()[0], 0)
    world.append(numbered(5, 7))

    with pytest.raises(UnsupportedError, match=r"streaming-skip-overwrite-snapshots' to 'true'"):
        drain(stream, position)
    skipping = world.stream(**{"streaming-skip-overwrite-snapshots": "true"})
    batches, position = drain(skipping, position)
    assert batches == [[5, 6]]

    world.table().delete("id >= 0")
    with pytest.raises(UnsupportedError, match="deletes rows"):
        drain(skipping, position)
    both = {
        "streaming-skip-overwrite-snapshots": "true",
        "streaming-skip-delete-snapshots": "true",
    }
    assert drain(world.stream(**both), position)[0] == [[]]


def test_the_rows_a_stream_begins_with_have_their_deletes(world: IcebergWorld) -> None:
    world.create(ROWS)
    world.append(numbered(0, 5))
    world.delete_at(world.paths()[0], 0, 4)

    assert drain(world.stream())[0] == [[1, 2, 3]]


def test_snapshots_that_were_read_may_expire_and_others_may_not(world: IcebergWorld) -> None:
    world.create(ROWS)
    world.append(numbered(0, 5))
    stream = world.stream()
    _, position = drain(stream)
    for start in (5, 7, 9):
        world.append(numbered(start, start + 2))
    read, *unread = world.snapshot_ids()

    world.expire(read)
    assert drain(stream, position)[0] == [[5, 6, 7, 8, 9, 10]]
    world.expire(unread[1])
    with pytest.raises(SnapshotNotFoundError, match="were expired before their rows were read"):
        drain(stream, position)


def test_the_first_snapshot_must_stay_until_its_rows_are_read(world: IcebergWorld) -> None:
    world.create(ROWS)
    world.append(numbered(0, 5))
    world.append(numbered(5, 10))
    stream = world.stream()
    middle = kept(stream.latestOffset(stream.initialOffset(), ReadMaxRows(5)))
    gone = world.snapshot_ids()[-1]
    world.append(numbered(10, 15))
    world.expire(gone)

    with pytest.raises(SnapshotNotFoundError, match=f"has no snapshot {gone}: .* was expired"):
        drain(stream, middle)


def test_a_table_rolled_back_behind_the_stream_is_an_error(world: IcebergWorld) -> None:
    world.create(ROWS)
    world.append(numbered(0, 5))
    world.append(numbered(5, 7))
    stream = world.stream()
    _, position = drain(stream)
    first = world.snapshot_ids()[0]
    world.table().manage_snapshots().rollback_to_snapshot(first).commit()

    with pytest.raises(UnsupportedError, match="it was rolled back"):
        drain(stream, position)


def test_a_checkpoint_of_another_table_is_refused(world: IcebergWorld) -> None:
    world.create(ROWS)
    position = world.stream().initialOffset()
    world.catalog.drop_table(world.NAME)
    world.create(ROWS)
    stream = world.stream()

    with pytest.raises(StreamhouseError, match="was dropped and created again since"):
        stream.latestOffset(position, ALL)
    with pytest.raises(StreamhouseError, match="is not a position in an Iceberg table"):
        stream.latestOffset({"offsets": {"0": 1}}, ALL)


def test_what_travels_to_executors_is_small(world: IcebergWorld) -> None:
    world.create(ROWS)
    world.append(numbered(0, 5))
    stream = world.stream()
    stream.latestOffset(stream.initialOffset(), ALL)

    assert len(pickle.dumps(stream)) < 2_000
