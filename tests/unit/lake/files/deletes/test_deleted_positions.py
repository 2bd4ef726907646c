"""Which rows delete files take away: all those of the files asked for, whoever wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamhouse.core.errors import CorruptDataError
from streamhouse.lake.files.deletes._deletion_vectors import write_deletion_vectors
from streamhouse.lake.files.deletes.deleted_positions import (
    DeleteFile,
    Deletes,
    data_paths_of,
    read_deleted_positions,
)
from streamhouse.lake.files.lake_filesystem import LakeFilesystem

FILES = LakeFilesystem({})
# By their bytes, as by their characters; UTF-16 would have the last two the other way round.
NAMES = ("a", "b", "c/d", "ä", "\uff5e", "\U0001f600")


def _deletes(
    folder: Path, rows: Sequence[tuple[str, int]], *, name: str = "d", statistics: bool = True
) -> DeleteFile:
    path = folder / f"{name}.parquet"
    names, positions = zip(*rows, strict=True)
    table = pa.table({"file_path": names, "pos": pa.array(positions, pa.int64())})
    pq.write_table(table, path, row_group_size=2, write_statistics=statistics)
    return DeleteFile(path=f"file://{path}", file_bytes=path.stat().st_size)


def _read(paths: Sequence[Deletes], *wanted: str) -> dict[str, list[int]]:
    found = read_deleted_positions(FILES, paths, data_paths=wanted)
    return {path: positions.tolist() for path, positions in found.items()}


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("is_sorted", [True, False])
def test_every_row_of_the_files_asked_for(
    tmp_path: Path, statistics: bool, is_sorted: bool
) -> None:
    rows = [(name, position) for name in NAMES for position in (7, 3, 1 << 40)]
    rows = rows if is_sorted else rows[::-5] + rows[::-2] + rows[1::2] + rows[::2]
    path = _deletes(tmp_path, rows, statistics=statistics)
    other = _deletes(tmp_path, [("b", 3), ("b", 4)], name="e", statistics=statistics)
    all_of_one = [3, 7, 1 << 40]

    for name in NAMES:
        assert _read([path], name) == {name: all_of_one}
    assert _read([path], *NAMES) == dict.fromkeys(NAMES, all_of_one)
    found = _read([path, other], "b", "ä", "none")
    assert found == {"b": [3, 4, *all_of_one[1:]], "ä": all_of_one}
    assert set(data_paths_of(FILES, path.path)) == set(NAMES)


@pytest.mark.parametrize("statistics", [True, False])
def test_a_file_of_which_nothing_is_deleted_is_not_there(tmp_path: Path, statistics: bool) -> None:
    path = _deletes(tmp_path, [("a", 1), ("c", 1)], statistics=statistics)

    assert _read([path], "b") == {}
    assert _read([path], "b", "bb") == {}
    assert _read([path]) == {}
    assert _read([], "a") == {}


def test_what_is_not_the_delete_file_of_the_metadata_is_refused(tmp_path: Path) -> None:
    path = _deletes(tmp_path, [("a", 1)])
    rows = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"pos": [1]}), rows)

    with pytest.raises(CorruptDataError, match="bytes, not the 7 of its table's metadata"):
        _read([replace(path, file_bytes=7)], "a")
    with pytest.raises(CorruptDataError, match="is no file of position deletes"):
        _read([DeleteFile(path=f"file://{rows}", file_bytes=rows.stat().st_size)], "a")


def test_vectors_and_files_of_deletes_are_read_together(tmp_path: Path) -> None:
    path = _deletes(tmp_path, [("a", 1), ("b", 9), ("c", 4)])
    positions = {"b": np.array([2, 9]), "d": np.array([0])}
    vectors = write_deletion_vectors(FILES, f"file://{tmp_path}/v.puffin", positions)

    assert _read([path, *vectors], "a", "b", "d") == {"a": [1], "b": [2, 9], "d": [0]}
    assert _read(vectors, "c") == {}
