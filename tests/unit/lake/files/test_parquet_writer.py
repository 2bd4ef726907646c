"""Files of one range: sorted, rolled, bounded in memory and in open files, gone when it fails."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.errors import CorruptDataError
from streamhouse.core.model.lake.partition_fields import (
    LakePartitionField,
)
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.files.parquet_writer import (
    FileFormat,
    PartitionedParquetWriter,
    WrittenFile,
)

SCHEMA = pa.schema(
    [
        pa.field("region", pa.string(), metadata={"PARQUET:field_id": "1"}),
        pa.field("text", pa.string(), metadata={"PARQUET:field_id": "2"}),
        pa.field("__offset", pa.int64(), nullable=False, metadata={"PARQUET:field_id": "3"}),
    ]
)
BY_REGION = (LakePartitionField(name="region", source="region", transform="identity"),)


def _rows(start: int, regions: list[str | None]) -> pa.Table:
    offsets = np.arange(start, start + len(regions))
    texts = [f"text {offset}" for offset in offsets]
    return pa.table([pa.array(regions, pa.string()), texts, offsets], schema=SCHEMA)


def _writer(
    folder: Path, *, partitioning: tuple[LakePartitionField, ...] = BY_REGION, **sizes: int
) -> PartitionedParquetWriter:
    return PartitionedParquetWriter(
        LakeFilesystem({}),
        folder=f"file://{folder}",
        name="b0",
        bucket=0,
        schema=SCHEMA,
        partitioning=partitioning,
        file_format=FileFormat(**sizes),
    )


def _read(file: WrittenFile) -> list[dict[str, object]]:
    return pq.read_table(file.path.removeprefix("file://")).to_pylist()


def test_each_partition_gets_its_rows_in_order(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    writer.write(_rows(10, ["eu", "us", "eu", None]))
    writer.write(_rows(14, ["us", "eu"]))

    files = {file.partition: file for file in writer.close()}

    assert {
        partition: [row["__offset"] for row in _read(file)] for partition, file in files.items()
    } == {("eu",): [10, 12, 15], ("us",): [11, 14], (None,): [13]}
    eu = files[("eu",)]
    assert (eu.start_offset, eu.end_offset, eu.row_count) == (10, 16, 3)
    assert eu.size_bytes == Path(eu.path.removeprefix("file://")).stat().st_size


def test_the_footer_that_is_returned_is_the_files_own(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    writer.write(_rows(0, ["eu"] * 5))

    (file,) = writer.close()

    returned = pq.read_metadata(pa.BufferReader(file.footer))
    assert returned.to_dict() == pq.read_metadata(file.path.removeprefix("file://")).to_dict()


def test_field_ids_codec_and_row_groups_are_in_the_file(tmp_path: Path) -> None:
    writer = _writer(tmp_path, row_group_rows=4)
    writer.write(_rows(0, ["eu"] * 10))

    (file,) = writer.close()

    parquet = pq.ParquetFile(file.path.removeprefix("file://"))
    assert [f.metadata[b"PARQUET:field_id"] for f in parquet.schema_arrow] == [b"1", b"2", b"3"]
    groups = [parquet.metadata.row_group(i) for i in range(parquet.metadata.num_row_groups)]
    assert [group.num_rows for group in groups] == [4, 4, 2]
    assert {group.column(0).compression for group in groups} == {"ZSTD"}
    assert groups[0].column(2).has_column_index


def test_wide_rows_make_smaller_row_groups(tmp_path: Path) -> None:
    writer = _writer(tmp_path, row_group_bytes=2_000)
    writer.write(_rows(0, ["x" * 1_000] * 10))

    (file,) = writer.close()

    assert pq.ParquetFile(file.path.removeprefix("file://")).metadata.num_row_groups >= 5


def test_a_full_file_is_followed_by_another(tmp_path: Path) -> None:
    writer = _writer(tmp_path, target_file_bytes=1, row_group_rows=10)
    writer.write(_rows(0, ["eu"] * 35))

    files = sorted(writer.close(), key=lambda file: file.start_offset)

    assert [(f.start_offset, f.end_offset) for f in files] == [
        (0, 10),
        (10, 20),
        (20, 30),
        (30, 35),
    ]
    assert len({file.path for file in files}) == 4


def test_more_partitions_than_open_files_lose_nothing(tmp_path: Path) -> None:
    writer = _writer(tmp_path, open_files_max=2, row_group_rows=3)
    for start in range(0, 60, 6):
        writer.write(_rows(start, [str(i % 5) for i in range(start, start + 6)]))

    files = writer.close()

    offsets = [row["__offset"] for file in files for row in _read(file)]
    assert sorted(offsets) == list(range(60))
    for file in files:
        own = [row["__offset"] for row in _read(file)]
        assert own == sorted(own)
        assert (own[0], own[-1] + 1) == (file.start_offset, file.end_offset)


def test_pending_rows_are_bounded_by_bytes(tmp_path: Path) -> None:
    writer = _writer(tmp_path, buffer_bytes_max=2_000)
    for start in range(0, 400, 40):
        writer.write(_rows(start, [str(i % 8) for i in range(40)]))
        assert writer._pending_bytes <= 2_000

    assert sum(file.row_count for file in writer.close()) == 400


def test_after_an_abort_nothing_is_there(tmp_path: Path) -> None:
    writer = _writer(tmp_path, target_file_bytes=1, row_group_rows=2)
    writer.write(_rows(0, ["eu", "us", "eu", "us", "eu"]))
    writer.write(_rows(5, ["ap"] * 2))

    writer.abort()

    assert list(tmp_path.iterdir()) == []
    assert writer.close() == []


@given(
    regions=st.lists(st.sampled_from(["eu", "us", None, "ap"]), max_size=80),
    cuts=st.lists(st.integers(0, 80), max_size=6),
    row_group_rows=st.integers(1, 20),
    open_files_max=st.integers(1, 3),
    buffer_bytes_max=st.integers(1, 2_000),
)
def test_every_row_is_in_one_file_of_its_partition(
    tmp_path_factory: pytest.TempPathFactory,
    regions: list[str | None],
    cuts: list[int],
    **sizes: int,
) -> None:
    writer = _writer(tmp_path_factory.mktemp("files"), target_file_bytes=3_000, **sizes)
    bounds = sorted({0, len(regions), *(cut for cut in cuts if cut < len(regions))})
    for start, end in itertools.pairwise(bounds):
        writer.write(_rows(start, regions[start:end]))

    files = writer.close()

    found = [(row["__offset"], file.partition) for file in files for row in _read(file)]
    assert sorted(found) == [(offset, (region,)) for offset, region in enumerate(regions)]
    for file in files:
        offsets = [row["__offset"] for row in _read(file)]
        assert offsets == sorted(offsets)


def test_a_flipped_bit_in_a_page_is_found_by_who_reads_it(tmp_path: Path) -> None:
    """Every page has a checksum: a flip anywhere between the pages' ends is no other value."""
    writer = _writer(tmp_path, partitioning=(), row_group_rows=50)
    writer.write(_rows(0, ["eu", None] * 100))
    (file,) = writer.close()
    path = Path(file.path.removeprefix("file://"))
    whole, expected = path.read_bytes(), _read(file)
    footer_bytes = int.from_bytes(whole[-8:-4], "little")
    chance = random.Random(7)
    found = []

    for _ in range(200):
        damaged = bytearray(whole)
        damaged[chance.randrange(4, len(whole) - footer_bytes - 8)] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            with LakeFilesystem({}).open_parquet(file.path, file_bytes=len(whole)) as opened:
                assert opened.read().to_pylist() == expected
        except CorruptDataError as error:
            found.append(error.message)

    # The others hit the page index, which nothing here reads.
    assert len(found) > 100
    assert all(file.path in message for message in found)


def test_a_file_that_was_exchanged_is_refused(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    writer.write(_rows(0, ["eu", "us"]))
    first, second = (Path(file.path.removeprefix("file://")) for file in writer.close())
    first.write_bytes(second.read_bytes())

    with (
        pytest.raises(CorruptDataError, match=f"is another one: it was written as '{second.name}'"),
        LakeFilesystem({}).open_parquet(f"file://{first}"),
    ):
        pass


def test_a_file_of_another_size_is_damaged(tmp_path: Path) -> None:
    writer = _writer(tmp_path, partitioning=())
    writer.write(_rows(0, ["eu"]))
    (file,) = writer.close()

    with (
        pytest.raises(CorruptDataError, match=f"has {file.size_bytes} bytes, not the 1 of its"),
        LakeFilesystem({}).open_parquet(file.path, file_bytes=1),
    ):
        pass


def _has_dictionary(file: WrittenFile) -> dict[str, bool]:
    parquet = pq.ParquetFile(file.path.removeprefix("file://"))
    group = parquet.metadata.row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    return {column.path_in_schema: column.has_dictionary_page for column in columns}


def test_values_that_differ_get_no_dictionary(tmp_path: Path) -> None:
    """It would be larger than the values, and slower to read in every engine."""
    with_dictionary = set()
    repeated, distinct = (["x" * 64, "y" * 64] * 10_000, [f"{n:064}" for n in range(20_000)])
    for regions in (repeated, distinct):
        writer = _writer(tmp_path, partitioning=())
        writer.write(_rows(0, [*regions]))
        (file,) = writer.close()
        assert [row["region"] for row in _read(file)] == regions
        with_dictionary.add(
            tuple(path for path, has_one in _has_dictionary(file).items() if has_one)
        )
    assert with_dictionary == {("region",), ()}


def test_small_files_get_no_dictionary(tmp_path: Path) -> None:
    writer = _writer(tmp_path, partitioning=())
    writer.write(_rows(0, ["eu"] * 1_000))
    (file,) = writer.close()

    assert [row["region"] for row in _read(file)] == ["eu"] * 1_000
    assert not any(_has_dictionary(file).values())


def test_columns_that_cannot_be_counted_get_a_dictionary(tmp_path: Path) -> None:
    element = pa.list_(pa.field("element", pa.string()))
    count = 20_000
    tags = pa.array([[f"{number:064}"] for number in range(count)], element)
    rows = pa.table({"tags": tags, "__offset": np.arange(count), "nothing": pa.nulls(count)})
    writer = PartitionedParquetWriter(
        LakeFilesystem({}),
        folder=f"file://{tmp_path}",
        name="b0",
        bucket=0,
        schema=rows.schema,
        partitioning=(),
        file_format=FileFormat(),
    )
    writer.write(rows)
    (file,) = writer.close()
    assert _has_dictionary(file)["tags.list.element"]
    assert not _has_dictionary(file)["__offset"]
