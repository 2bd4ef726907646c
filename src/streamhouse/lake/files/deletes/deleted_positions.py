"""Deletes read: which rows of which data files are gone. pyarrow and numpy only.

Deletes are a Parquet file with the positions of any number of data files, or the deletion vector of
a single data file.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import CorruptDataError
from streamhouse.core.model.values.numpy_arrays import integer_values
from streamhouse.core.model.values.sorted_values import distinct
from streamhouse.lake.files.deletes._deletion_vectors import (
    DeletionVector,
    read_deletion_vectors,
)
from streamhouse.lake.files.lake_filesystem import LakeFilesystem

if TYPE_CHECKING:
    import pyarrow.parquet as pq

__all__ = ["DeleteFile", "Deletes", "data_paths_of", "read_deleted_positions"]

_PATH: Final = "file_path"
_POSITION: Final = "pos"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteFile:
    """A Parquet file of position deletes: plain data, to cross processes."""

    path: str
    file_bytes: int


Deletes = DeleteFile | DeletionVector


def read_deleted_positions(
    filesystem: LakeFilesystem, deletes: Iterable[Deletes], *, data_paths: Iterable[str]
) -> dict[str, npt.NDArray[np.int64]]:
    """Return data path -> deleted positions, sorted, each once; of `data_paths` only.

    Paths without deleted positions are left out. A file of another size than its table's metadata
    say is damage. A delete file may name many data files: only row groups with possible positions
    of `data_paths` are read.
    """
    deletes, wanted = list(deletes), set(data_paths)
    parts_by_path: dict[str, list[npt.NDArray[np.int64]]] = {}
    vectors = (d for d in deletes if isinstance(d, DeletionVector) and d.data_path in wanted)
    for vector, positions in read_deletion_vectors(filesystem, vectors):
        parts_by_path.setdefault(vector.data_path, []).append(positions)
    # Arrays made of Python's values import pandas, which an executor has no other use for.
    if files := [file for file in deletes if isinstance(file, DeleteFile)]:
        for path, some in _positions_in(filesystem, files, sorted(wanted)):
            parts_by_path.setdefault(path, []).append(some)
    return {path: distinct(np.concatenate(parts)) for path, parts in parts_by_path.items()}


def _positions_in(
    filesystem: LakeFilesystem, files: Iterable[DeleteFile], paths: Sequence[str]
) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
    """Yield positions of `paths`, which ascend, in delete files; in no order."""
    values = pa.array(paths, pa.string())
    wanted = [path.encode() for path in paths]
    for deletes in files:
        with filesystem.open_parquet(deletes.path, file_bytes=deletes.file_bytes) as file:
            _check_columns(file, deletes.path)
            groups = _groups_with(file.metadata, wanted)
            for batch in file.iter_batches(row_groups=groups, columns=[_PATH, _POSITION]):
                names = batch.column(_PATH).cast(pa.string())
                is_ours = pc.is_in(names, value_set=values)
                positions = batch.column(_POSITION).cast(pa.int64()).filter(is_ours)
                parts = (
                    [(paths[0], integer_values(positions))]
                    if len(paths) == 1
                    else _by_path(names.filter(is_ours), positions)
                )
                yield from ((path, some) for path, some in parts if len(some))


def data_paths_of(filesystem: LakeFilesystem, delete_path: str) -> Mapping[str, int]:
    """Return how many positions a delete file names of each data file."""
    with filesystem.open_parquet(delete_path) as file:
        _check_columns(file, delete_path)
        column = file.read(columns=[_PATH]).column(_PATH).cast(pa.string())
    counts = pc.value_counts(column)
    names, numbers = counts.field(0), counts.field(1)
    return dict(zip(names.to_pylist(), numbers.to_pylist(), strict=True))


def _check_columns(file: pq.ParquetFile, path: str) -> None:
    if not {_PATH, _POSITION} <= set(file.schema_arrow.names):
        raise CorruptDataError(f"lake file '{path}' is no file of position deletes")


def _groups_with(metadata: pq.FileMetaData, wanted: Sequence[bytes]) -> list[int]:
    """Return the row groups whose bounds, where they have some, leave room for a wanted path."""
    index = metadata.schema.names.index(_PATH)
    groups = []
    for group in range(metadata.num_row_groups):
        statistics = metadata.row_group(group).column(index).statistics
        if statistics is not None and statistics.has_min_max:
            low, high = bytes(statistics.min_raw), bytes(statistics.max_raw)
            first = bisect.bisect_left(wanted, low)
            if first == len(wanted) or wanted[first] > high:
                continue
        groups.append(group)
    return groups


def _by_path(
    paths: pa.StringArray, positions: pa.Int64Array
) -> Iterable[tuple[str, npt.NDArray[np.int64]]]:
    """Yield each data path with its positions; one path's rows need not be together."""
    encoded = paths.dictionary_encode()
    codes = integer_values(encoded.indices)
    numbers = integer_values(positions)
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=len(encoded.dictionary)))
    start = 0
    for path, end in zip(encoded.dictionary.to_pylist(), ends.tolist(), strict=True):
        yield path, numbers[order[start:end]]
        start = end
