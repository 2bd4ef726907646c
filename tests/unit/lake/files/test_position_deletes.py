"""Where rows lie by offset, in our files and foreign ones, and the delete files that say so."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamhouse.core.errors import StorageFailedError, UnsupportedError
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.files.position_deletes import (
    LakeFile,
    WrittenDeletes,
    locate_offsets,
    write_position_deletes,
)
from tests.support.held_step import lower

FILES = LakeFilesystem({})


def _file(
    folder: Path,
    offsets: Sequence[int],
    *,
    buckets: Sequence[int] | None = None,
    name: str = "f",
    row_group_rows: int = 3,
    partition: tuple[object, ...] = (0,),
    statistics: bool = True,
) -> LakeFile:
    path = folder / f"{name}.parquet"
    table = pa.table(
        {
            "id": offsets,
            "__bucket": pa.array(buckets or [0] * len(offsets), pa.int32()),
            "__offset": pa.array(offsets, pa.int64()),
        }
    )
    pq.write_table(table, path, row_group_size=row_group_rows, write_statistics=statistics)
    return LakeFile(
        path=f"file://{path}",
        file_format="PARQUET",
        spec_id=0,
        partition=partition,
        first_offset=min(offsets),
        last_offset=max(offsets),
        is_shared=buckets is not None,
    )


def _located(file: LakeFile, *offsets: int, bucket: int = 0) -> list[int]:
    found = locate_offsets(FILES, [file], np.array(offsets, dtype=np.int64), bucket=bucket)
    return found[file].positions.tolist() if file in found else []


def test_positions_come_from_the_offset_column(tmp_path: Path) -> None:
    file = _file(tmp_path, [5, 7, 8, 20, 21, 22, 40, 41])

    assert _located(file, 5, 8, 21, 41) == [0, 2, 4, 7]
    assert _located(file, 4, 6, 23, 42) == []
    assert _located(file, 6, 22) == [5]


@pytest.mark.parametrize("statistics", [True, False])
def test_files_that_are_not_sorted(tmp_path: Path, statistics: bool) -> None:
    file = _file(tmp_path, [9, 1, 5, 30, 2, 0], statistics=statistics)

    assert _located(file, 0, 1, 5, 6, 30) == [1, 2, 3, 5]


def test_files_with_rows_of_several_buckets(tmp_path: Path) -> None:
    file = _file(tmp_path, [1, 1, 2, 3, 0, 2], buckets=[0, 1, 1, 0, 1, 0])

    assert _located(file, 1, 2, 3, bucket=0) == [0, 3, 5]
    assert _located(file, 0, 1, 2, 3, bucket=1) == [1, 2, 4]
    assert _located(file, 0, 1, 2, 3, bucket=2) == []


def test_only_files_whose_bounds_hold_an_offset_are_opened(tmp_path: Path) -> None:
    gone = LakeFile(
        path=f"file://{tmp_path}/gone.parquet",
        file_format="PARQUET",
        spec_id=0,
        partition=(),
        first_offset=10,
        last_offset=19,
    )

    assert _located(gone, 9, 20) == []
    with pytest.raises(StorageFailedError, match=r"gone\.parquet"):
        _located(gone, 9, 10)


def test_files_of_another_format_are_refused() -> None:
    file = LakeFile(
        path="file:///x.orc",
        file_format="ORC",
        spec_id=0,
        partition=(),
        first_offset=0,
        last_offset=9,
    )

    with pytest.raises(UnsupportedError, match=r"'file:///x\.orc' is ORC"):
        _located(file, 3)


def _written(folder: Path, files: Sequence[LakeFile]) -> list[WrittenDeletes]:
    located = {file: np.array([1, 3], dtype=np.int64) for file in files}
    return write_position_deletes(FILES, located, folder=f"file://{folder}/out", name="b0")


def _content(deletes: WrittenDeletes) -> list[tuple[str, int]]:
    table = pq.read_table(deletes.path.removeprefix("file://"))
    assert [field.type for field in table.schema] == [pa.string(), pa.int64()]
    ids = [field.metadata[b"PARQUET:field_id"] for field in table.schema]
    assert ids == [b"2147483546", b"2147483545"]
    return list(zip(table["file_path"].to_pylist(), table["pos"].to_pylist(), strict=True))


def test_a_few_data_files_get_a_delete_file_each(tmp_path: Path) -> None:
    files = [_file(tmp_path, [1, 2, 3, 4], name=name) for name in ("b", "a")]

    written = _written(tmp_path, files)

    assert [d.data_paths for d in written] == [(files[1].path,), (files[0].path,)]
    assert [_content(d) for d in written] == [
        [(p, 1), (p, 3)] for (p,) in (d.data_paths for d in written)
    ]
    assert [(d.row_count, d.first_position, d.last_position) for d in written] == [(2, 1, 3)] * 2
    sizes = [Path(d.path.removeprefix("file://")).stat().st_size for d in written]
    assert [d.size_bytes for d in written] == sizes
    assert pickle.loads(pickle.dumps(written)) == written


def test_many_data_files_of_a_partition_share_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower(monkeypatch, "deletes-of-one-file", 2)
    many = [_file(tmp_path, [1], name=f"n{i}") for i in (2, 0, 1)]
    other = _file(tmp_path, [1], name="other", partition=(None,))

    written = {d.partition: d for d in _written(tmp_path, [*many, other])}

    assert set(written) == {(0,), (None,)}
    paths = sorted(file.path for file in many)
    assert written[(0,)].data_paths == tuple(paths)
    assert _content(written[(0,)]) == [(path, n) for path in paths for n in (1, 3)]


def test_nothing_stays_when_a_file_cannot_be_written(tmp_path: Path) -> None:
    class FullDisk(LakeFilesystem):
        def open_output(self, uri: str) -> pa.NativeFile:
            if any((tmp_path / "out").glob("*")):
                raise StorageFailedError("full")
            return super().open_output(uri)

    located = {
        _file(tmp_path, [1], name=name): np.array([0], dtype=np.int64) for name in ("a", "b")
    }

    with pytest.raises(StorageFailedError, match="full"):
        write_position_deletes(FullDisk({}), located, folder=f"file://{tmp_path}/out", name="b0")

    assert list((tmp_path / "out").glob("*")) == []
