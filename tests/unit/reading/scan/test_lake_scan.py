"""Reading Parquet pieces: by row group, by field id, minus deletes, inside ranges."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamhouse.core.errors import (
    CorruptDataError,
    SnapshotNotFoundError,
    UnsupportedError,
)
from streamhouse.core.model.offsets import OffsetRange
from streamhouse.core.model.schema import Schema
from streamhouse.lake.files.deletes.deleted_positions import DeleteFile
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.files.name_mapping import MappedField
from streamhouse.reading.plan.scan_schema import SYSTEM_COLUMNS
from streamhouse.reading.scan._lake_scan import read_lake_piece, row_group_start
from streamhouse.reading.scan.scan import LakePiece, ScanColumn, ScanContext
from streamhouse.reading.where.parser import parse_predicate
from tests.support.scan_context import scan_context

FILES = LakeFilesystem({})
ID = ScanColumn(name="id", type=pa.int64(), nullable=False, field_id=1)
NAME = ScanColumn(name="name", type=pa.string(), nullable=True, field_id=2)
BUCKET, OFFSET, TIMESTAMP = SYSTEM_COLUMNS


def context(*output: ScanColumn, **more: Any) -> ScanContext:
    return scan_context(**{"output": output or (ID, NAME), "lake_snapshot_id": 77, **more})


def lake_rows(count: int, *, bucket: int = 0) -> dict[ScanColumn, pa.Array]:
    ids = range(count)
    return {
        ID: pa.array(ids, pa.int64()),
        NAME: pa.array([f"n{i}" for i in ids]),
        BUCKET: pa.array([bucket] * count, pa.int32()),
        OFFSET: pa.array([100 + i for i in ids], pa.int64()),
        TIMESTAMP: pa.array([i * 10 for i in ids], pa.timestamp("us", tz="UTC")),
    }


def write(
    path: Path, columns: dict[ScanColumn, pa.Array], *, group_rows: int = 10, ids: bool = True
) -> LakePiece:
    fields = [
        pa.field(
            column.name,
            array.type,
            metadata={"PARQUET:field_id": str(column.field_id)} if ids else None,
        )
        for column, array in columns.items()
    ]
    table = pa.Table.from_arrays(list(columns.values()), schema=pa.schema(fields))
    pq.write_table(table, path, row_group_size=group_rows)
    return LakePiece(
        path=f"file://{path}",
        file_bytes=path.stat().st_size,
        start_byte=0,
        end_byte=path.stat().st_size,
        row_count=table.num_rows,
    )


def read(
    piece: LakePiece, scan: ScanContext, columns: Sequence[ScanColumn] | None = None
) -> pa.Table:
    wanted = scan.output if columns is None else columns
    batches = list(read_lake_piece(FILES, piece, scan, wanted))
    return pa.Table.from_batches(batches, schema=pa.schema([c.to_arrow() for c in wanted]))


def test_batches_have_exactly_the_wanted_schema(tmp_path: Path) -> None:
    small = ScanColumn(name="small", type=pa.int8(), nullable=True, field_id=3)
    rows = lake_rows(25) | {small: pa.array([i % 3 for i in range(25)], pa.int32())}
    piece = write(tmp_path / "f", rows)

    found = read(piece, context(small, ID))

    assert found.schema == pa.schema(
        [pa.field("small", pa.int8()), pa.field("id", pa.int64(), nullable=False)]
    )
    assert found["id"].to_pylist() == list(range(25))
    assert found["small"].to_pylist() == [i % 3 for i in range(25)]


def test_byte_ranges_cut_at_row_groups_give_every_row_once(tmp_path: Path) -> None:
    piece = write(tmp_path / "f", lake_rows(95))
    metadata = pq.read_metadata(tmp_path / "f")
    starts = [row_group_start(metadata.row_group(g)) for g in range(metadata.num_row_groups)]
    assert len(starts) == 10
    borders = [0, starts[3], starts[4], starts[9] + 1, piece.file_bytes]

    parts = [
        read(piece.between(a, b), context())["id"].to_pylist()
        for a, b in itertools.pairwise(borders)
    ]

    assert parts == [list(range(30)), list(range(30, 40)), list(range(40, 95)), []]


def test_a_renamed_column_is_found_by_its_id_and_a_new_one_is_null(tmp_path: Path) -> None:
    piece = write(tmp_path / "f", lake_rows(3))
    # In the file, the name `id` belongs to another field.
    renamed = ScanColumn(name="id", type=pa.string(), nullable=True, field_id=2)
    new = ScanColumn(name="name", type=pa.float64(), nullable=True, field_id=9)
    unknown = ScanColumn(name="later", type=pa.int32(), nullable=True, field_id=None)

    found = read(piece, context(renamed, new, unknown))

    assert found.to_pydict() == {
        "id": ["n0", "n1", "n2"],
        "name": [None] * 3,
        "later": [None] * 3,
    }


def test_a_file_without_ids_is_read_by_name(tmp_path: Path) -> None:
    piece = write(tmp_path / "f", lake_rows(3), ids=False)

    assert read(piece, context(NAME))["name"].to_pylist() == ["n0", "n1", "n2"]


def mapped(field_id: int | None, name: str | None, **fields: MappedField) -> MappedField:
    return MappedField(field_id, name, fields)


def test_a_file_without_ids_is_read_by_the_name_mapping(tmp_path: Path) -> None:
    piece = write(tmp_path / "f", lake_rows(3), ids=False)
    names = {"id": mapped(2, "name"), "name": mapped(1, "id"), "__offset": mapped(None, None)}
    name = ScanColumn(name="name", type=pa.int64(), nullable=True, field_id=2)
    new = ScanColumn(name="__offset", type=pa.int64(), nullable=True, field_id=9)

    found = read(replace(piece, name_mapping=names), context(name, new))

    assert found.to_pydict() == {"name": [0, 1, 2], "__offset": [None] * 3}


def test_a_column_with_an_id_goes_before_one_of_a_mapped_name(tmp_path: Path) -> None:
    fields = [pa.field("a", pa.int64(), metadata={"PARQUET:field_id": "1"}), ("b", pa.int64())]
    pq.write_table(pa.table([[1], [2]], schema=pa.schema(fields)), tmp_path / "f")
    size = (tmp_path / "f").stat().st_size
    names = {"a": mapped(2, "name"), "b": mapped(1, "id")}
    piece = LakePiece(
        path=f"file://{tmp_path / 'f'}",
        file_bytes=size,
        start_byte=0,
        end_byte=size,
        row_count=1,
        name_mapping=names,
    )

    assert read(piece, context(ID))["id"].to_pylist() == [1]
    names["b"] = mapped(3, "name")
    third = ScanColumn(name="name", type=pa.int64(), nullable=True, field_id=3)
    assert read(piece, context(third))["name"].to_pylist() == [2]


PLACE = pa.struct([("x", pa.int64()), ("y", pa.int64())])
SWAPPED = {"x": mapped(11, "y"), "y": mapped(12, "x")}


@pytest.mark.parametrize(
    ("kind", "inside", "values"),
    [
        (PLACE, SWAPPED, [{"x": 1, "y": 2}, None, {"x": None, "y": 4}]),
        (
            pa.list_(pa.field("element", PLACE)),
            {"element": mapped(13, "element", **SWAPPED)},
            [[{"x": 1, "y": 2}, None], None, []],
        ),
        (
            pa.map_(pa.string(), PLACE),
            {"key": mapped(14, "key"), "value": mapped(15, "value", **SWAPPED)},
            [[("k", {"x": 1, "y": 2})], None, []],
        ),
    ],
)
def test_fields_inside_a_column_without_ids_have_the_names_of_the_mapping(
    tmp_path: Path, kind: pa.DataType, inside: dict[str, MappedField], values: list[Any]
) -> None:
    column = ScanColumn(name="place", type=kind, nullable=True, field_id=3)
    rows = lake_rows(3) | {column: pa.array(values, kind)}
    names = {"place": mapped(3, "place", **inside), "id": mapped(1, "id")}
    piece = replace(write(tmp_path / "f", rows, ids=False), name_mapping=names)

    found = read(piece, context(column, batch_rows=2))["place"].to_pylist()

    def swap(value: Any) -> Any:
        if isinstance(value, dict):
            return {"x": value["y"], "y": value["x"]}
        if isinstance(value, tuple):
            return (value[0], swap(value[1]))
        return [swap(one) for one in value] if isinstance(value, list) else value

    assert found == swap(values)


def test_statistics_of_renamed_fields_rule_nothing_out(tmp_path: Path) -> None:
    column = ScanColumn(name="place", type=PLACE, nullable=True, field_id=3)
    rows = lake_rows(1) | {column: pa.array([{"x": 1, "y": 2}], PLACE)}
    names = {"place": mapped(3, "place", **SWAPPED)}
    piece = replace(write(tmp_path / "f", rows, ids=False), name_mapping=names)
    schema = Schema.from_arrow(pa.schema([("place", PLACE)]))
    predicate = parse_predicate("place.x = 2", schema, table="t")

    found = read(piece, context(column, predicate=predicate))

    assert found["place"].to_pylist() == [{"x": 2, "y": 1}]


def test_two_columns_that_are_one_field_are_damage(tmp_path: Path) -> None:
    names = {"id": mapped(1, "id"), "name": mapped(1, "id")}
    piece = replace(write(tmp_path / "f", lake_rows(1), ids=False), name_mapping=names)

    with pytest.raises(CorruptDataError, match=r"two columns are field 1 .*'name' and one before"):
        read(piece, context(ID))


def test_a_file_without_ids_of_which_no_name_is_mapped_is_refused(tmp_path: Path) -> None:
    piece = replace(write(tmp_path / "f", lake_rows(1), ids=False), name_mapping={})

    with pytest.raises(UnsupportedError, match="set the Iceberg table's property"):
        read(piece, context(ID))


def test_a_column_the_file_lacks_comes_from_its_partition(tmp_path: Path) -> None:
    rows = lake_rows(3)
    del rows[NAME]
    piece = replace(write(tmp_path / "f", rows), constants={2: "eu"})

    assert read(piece, context())["name"].to_pylist() == ["eu"] * 3


def test_a_required_column_the_file_lacks_is_corruption(tmp_path: Path) -> None:
    rows = lake_rows(3)
    del rows[ID]
    piece = write(tmp_path / "f", rows)

    with pytest.raises(CorruptDataError, match="lacks column 'id'"):
        read(piece, context())


def test_nulls_in_a_required_column_are_corruption(tmp_path: Path) -> None:
    rows = lake_rows(3)
    rows[ID] = pa.array([1, None, 2], pa.int64())
    piece = write(tmp_path / "f", rows)

    with pytest.raises(CorruptDataError, match="has nulls in column 'id'"):
        read(piece, context())


def test_columns_of_another_layout_become_the_tables_own(tmp_path: Path) -> None:
    nested = ScanColumn(
        name="l", type=pa.list_(pa.field("element", pa.int16())), nullable=True, field_id=5
    )
    rows = lake_rows(2)
    rows[NAME] = rows[NAME].cast(pa.large_string())
    rows[nested] = pa.array([[1, 2], None], pa.large_list(pa.int32()))
    piece = write(tmp_path / "f", rows)

    found = read(piece, context(NAME, nested))

    assert found.schema.types == [pa.string(), nested.type]
    assert found["l"].to_pylist() == [[1, 2], None]


def test_only_rows_inside_the_ranges_are_kept(tmp_path: Path) -> None:
    rows = lake_rows(50)
    rows[BUCKET] = pa.array([i % 2 for i in range(50)], pa.int32())
    ranges = (OffsetRange(bucket=0, start=105, end=109), OffsetRange(bucket=1, start=140, end=142))
    piece = replace(write(tmp_path / "f", rows), ranges=ranges)

    assert read(piece, context())["id"].to_pylist() == [6, 8, 41]


def test_row_groups_outside_the_ranges_are_not_decoded(tmp_path: Path) -> None:
    piece = write(tmp_path / "f", lake_rows(100))
    metadata = pq.read_metadata(tmp_path / "f")
    wanted = (OffsetRange(bucket=0, start=115, end=118),)
    _corrupt_row_group(tmp_path / "f", metadata, 0)

    assert read(replace(piece, ranges=wanted), context())["id"].to_pylist() == [15, 16, 17]
    with pytest.raises(CorruptDataError, match=f"lake file 'file://{tmp_path}/f' is damaged"):
        read(piece, context())


def _corrupt_row_group(path: Path, metadata: pq.FileMetaData, group: int) -> None:
    data = bytearray(path.read_bytes())
    column = metadata.row_group(group).column(0)
    start = row_group_start(metadata.row_group(group))
    data[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(data)


def test_the_predicate_skips_row_groups(tmp_path: Path) -> None:
    schema = Schema.from_arrow(pa.schema([("id", pa.int64()), ("name", pa.string())]))
    piece = write(tmp_path / "f", lake_rows(40))
    predicate = parse_predicate("id >= 12 and id < 15", schema, table="t")

    found = read(piece, context(predicate=predicate))

    # Whole row groups: the rows themselves are filtered later.
    assert found["id"].to_pylist() == list(range(10, 20))


def test_statistics_of_a_renamed_column_skip_nothing(tmp_path: Path) -> None:
    """The file's own `id` says nothing about the column that is called so today."""
    schema = Schema.from_arrow(pa.schema([("id", pa.int64())]))
    rows = lake_rows(10)
    other = ScanColumn(name="value", type=pa.int64(), nullable=True, field_id=8)
    rows[other] = pa.array([1_000 + i for i in range(10)], pa.int64())
    piece = write(tmp_path / "f", rows)
    renamed = replace(other, name="id")
    predicate = parse_predicate("id > 1004", schema, table="t")

    found = read(piece, context(renamed, predicate=predicate))

    assert found.num_rows == 10


@pytest.mark.parametrize(
    ("bounds", "ids"),
    [
        ({"from_timestamp_us": 20}, [2, 3, 4]),
        ({"to_timestamp_us": 20}, [0, 1]),
        ({"from_timestamp_us": 11, "to_timestamp_us": 31}, [2, 3]),
    ],
)
def test_rows_outside_the_times_are_left_out(
    tmp_path: Path, bounds: dict[str, int], ids: list[int]
) -> None:
    piece = replace(write(tmp_path / "f", lake_rows(5)), check_timestamp=True)

    assert read(piece, context(**bounds))["id"].to_pylist() == ids


def write_deletes(path: Path, deleted: Sequence[tuple[str, int]]) -> DeleteFile:
    rows = sorted(deleted)
    table = pa.table(
        {
            "file_path": pa.array([p for p, _ in rows], pa.string()),
            "pos": pa.array([n for _, n in rows], pa.int64()),
        }
    )
    pq.write_table(table, path, row_group_size=3)
    return DeleteFile(path=f"file://{path}", file_bytes=path.stat().st_size)


def test_position_deletes_remove_exactly_their_rows(tmp_path: Path) -> None:
    piece = write(tmp_path / "f", lake_rows(35))
    others = [(f"file://{tmp_path}/other", n) for n in range(9)]
    deletes = (
        write_deletes(tmp_path / "d1", [*others, *((piece.path, n) for n in (0, 9, 10, 34))]),
        write_deletes(tmp_path / "d2", [(piece.path, 9), (piece.path, 20)]),
    )
    gone = {0, 9, 10, 20, 34}

    found = read(replace(piece, deletes=deletes), context())

    assert found["id"].to_pylist() == [i for i in range(35) if i not in gone]


def test_positions_count_from_the_files_start_in_every_part(tmp_path: Path) -> None:
    piece = write(tmp_path / "f", lake_rows(40))
    metadata = pq.read_metadata(tmp_path / "f")
    middle = row_group_start(metadata.row_group(2))
    deletes = (write_deletes(tmp_path / "d", [(piece.path, n) for n in (5, 25, 39)]),)

    late = replace(piece.between(middle, piece.end_byte), deletes=deletes)

    assert read(late, context())["id"].to_pylist() == [i for i in range(20, 39) if i != 25]


def test_a_file_that_is_gone_names_snapshot_and_remedy(tmp_path: Path) -> None:
    piece = write(tmp_path / "f", lake_rows(3))
    (tmp_path / "f").unlink()

    with pytest.raises(SnapshotNotFoundError) as caught:
        read(piece, context())

    assert caught.value.message == (
        f"table 'db.t': cannot read lake file 'file://{tmp_path}/f': it is missing; if snapshot 77"
        " was expired after this read was planned, load the table again"
    )


@pytest.mark.slow
def test_wide_rows_come_in_small_batches(tmp_path: Path) -> None:
    rows = lake_rows(64)
    rows[NAME] = pa.array([f"{i}" * 2_000_000 for i in range(64)])
    piece = write(tmp_path / "f", rows, group_rows=64)

    sizes = [batch.nbytes for batch in read_lake_piece(FILES, piece, context(), (ID, NAME))]

    assert max(sizes) <= 64 << 20
    assert len(sizes) > 2


def test_counting_reads_no_column(tmp_path: Path) -> None:
    piece = write(tmp_path / "f", lake_rows(25))
    nothing_there = ScanColumn(name="new", type=pa.int8(), nullable=True, field_id=99)

    assert read(piece, context(nothing_there)).num_rows == 25
