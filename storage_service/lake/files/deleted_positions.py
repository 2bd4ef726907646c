"""Position delete files read: which rows of which data files are gone. pyarrow only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.storage_service.errors import CorruptDataError
from streamhouse.storage_service.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.storage_service.model.sorted_values import distinct

__all__ = ["data_paths_of", "read_deleted_positions"]

_PATH: Final = "file_path"
_POSITION: Final = "pos"


def read_deleted_positions(
    filesystem: LakeFilesystem, delete_paths: Iterable[str], *, data_paths: Iterable[str]
) -> dict[str, npt.NDArray[np.int64]]:
    """Return data path -> its deleted positions, sorted, each once; of `data_paths` only."""
    wanted = pa.array(sorted(set(data_paths)), pa.string())
    found: dict[str, list[npt.NDArray[np.int64]]] = {}
    for path in delete_paths:
        rows = _read(filesystem, path, [_PATH, _POSITION])
        rows = rows.filter(pc.is_in(rows.column(_PATH), value_set=wanted))
        for data_path, positions in _by_path(rows):
            found.setdefault(data_path, []).append(positions)
    return {path: distinct(np.concatenate(parts)) for path, parts in found.items()}


def data_paths_of(filesystem: LakeFilesystem, delete_path: str) -> Mapping[str, int]:
    """Return how many positions a delete file names of each data file."""
    column = _read(filesystem, delete_path, [_PATH]).column(_PATH)
    counts = pc.value_counts(column)
    names, numbers = counts.field(0), counts.field(1)
    return dict(zip(names.to_pylist(), numbers.to_pylist(), strict=True))


def _read(filesystem: LakeFilesystem, path: str, columns: list[str]) -> pa.Table:
    with filesystem.open_parquet(path) as file:
        table = file.read(columns=columns)
    if table.column_names != columns:
        raise CorruptDataError(f"lake file '{path}' is no file of position deletes")
    paths = table.column(_PATH)
    return table.set_column(0, _PATH, paths.cast(pa.string()))


def _by_path(rows: pa.Table) -> Iterable[tuple[str, npt.NDArray[np.int64]]]:
    """Yield each data path with its positions; one path's rows need not be together."""
    encoded = rows.column(_PATH).combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    positions = rows.column(_POSITION).to_numpy().astype(np.int64, copy=False)
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=len(encoded.dictionary)))
    start = 0
    for path, end in zip(encoded.dictionary.to_pylist(), ends.tolist(), strict=True):
        yield path, positions[order[start:end]]
        start = end
