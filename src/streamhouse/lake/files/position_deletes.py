"""Retracted rows of the lake: the positions in data files, and the position delete files.

A row's address is its offset. A few files have the offset within their `__offset` bounds; the
column itself, sorted in every Streamhouse file, gives the position. No key is ever compared.
"""

from __future__ import annotations

import contextlib
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from streamhouse.core.errors import StreamhouseError, UnsupportedError
from streamhouse.core.model.lake.facts import ROW_ID_COLUMN
from streamhouse.core.model.schema import BUCKET_COLUMN, OFFSET_COLUMN
from streamhouse.core.model.values.numpy_arrays import integer_array, integer_values
from streamhouse.lake.files._field_ids import FIELD_ID_KEY
from streamhouse.lake.files.bounds import integer_range
from streamhouse.lake.files.deletes._deletion_vectors import encode_positions
from streamhouse.lake.files.lake_filesystem import (
    LakeFilesystem,
    file_name_metadata,
)
from streamhouse.lake.files.partition_layout import PartitionValues
from streamhouse.lake.files.row_lineage import row_ids

__all__ = [
    "PATH_FIELD_ID",
    "POSITION_FIELD_ID",
    "DeletedRows",
    "LakeFile",
    "LocatedRows",
    "Positions",
    "WrittenDeletes",
    "delete_written",
    "deleted_rows",
    "locate_below",
    "locate_offsets",
    "write_position_deletes",
]

Positions = npt.NDArray[np.int64]

# Reserved by Iceberg's spec for the columns of position delete files.
PATH_FIELD_ID: Final = 2_147_483_546
POSITION_FIELD_ID: Final = 2_147_483_545
# Deletes of more data files than this share one file a partition: small files cost more than the
# rows of other data files that a reader has to skip.
FILE_SCOPED_MAX: Final = 8

_SCHEMA: Final = pa.schema(
    [
        pa.field(
            "file_path",
            pa.dictionary(pa.int32(), pa.string()),
            nullable=False,
            metadata={FIELD_ID_KEY: str(PATH_FIELD_ID).encode()},
        ),
        pa.field(
            "pos",
            pa.int64(),
            nullable=False,
            metadata={FIELD_ID_KEY: str(POSITION_FIELD_ID).encode()},
        ),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeFile:
    """A live data file as plain data, for finding rows: address and bounds.

    `path` is byte for byte the path in the metadata. `is_shared`: it may have rows of other
    buckets. `first_row_id` is the id of its first row; None before the table has row ids.
    """

    path: str
    file_format: str
    spec_id: int
    partition: PartitionValues
    first_offset: int
    last_offset: int
    is_shared: bool = False
    first_row_id: int | None = None


@dataclass(frozen=True, slots=True)
class LocatedRows:
    """Rows of a data file by position, ascending, and the offset and the id of each.

    `row_ids` is None unless asked for; a row without an id has null.
    """

    positions: Positions
    offsets: npt.NDArray[np.int64]
    row_ids: pa.Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenDeletes:
    """One closed position delete file: plain data, to cross processes.

    `data_paths` are the data files with deleted rows, ascending; all have its spec and partition.
    """

    path: str
    size_bytes: int
    row_count: int
    spec_id: int
    partition: PartitionValues
    data_paths: tuple[str, ...]
    first_position: int
    last_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedRows:
    """Deleted rows of a data file of format version 3: plain data, to cross processes.

    `positions` are in the form of a deletion vector; the commit makes the data file's vector.
    """

    data_path: str
    spec_id: int
    partition: PartitionValues
    positions: bytes = field(repr=False)
    row_count: int


def deleted_rows(located: Mapping[LakeFile, Positions]) -> list[DeletedRows]:
    """Return the located rows for the deletion vectors of their data files."""
    return [
        DeletedRows(
            data_path=file.path,
            spec_id=file.spec_id,
            partition=file.partition,
            positions=encode_positions(positions),
            row_count=len(positions),
        )
        for file, positions in located.items()
    ]


def locate_below(
    files: LakeFilesystem, candidates: Iterable[LakeFile], end: int, *, bucket: int
) -> dict[LakeFile, Positions]:
    """Return the positions of the bucket's rows with offsets below `end`, by data file."""
    positions_by_file = {}
    for file in candidates:
        parts, row_start = list[Positions](), 0
        with _parquet(files, file) as parquet:
            for rows in parquet.iter_batches(columns=[OFFSET_COLUMN, BUCKET_COLUMN]):
                is_ours = integer_values(rows.column(BUCKET_COLUMN)) == bucket
                is_below = integer_values(rows.column(OFFSET_COLUMN)) < end
                parts.append(row_start + np.flatnonzero(is_ours & is_below))
                row_start += rows.num_rows
        positions = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        if len(positions):
            positions_by_file[file] = positions
    return positions_by_file


@contextlib.contextmanager
def _parquet(files: LakeFilesystem, file: LakeFile) -> Iterator[pq.ParquetFile]:
    """Open a file to delete rows of; raises `UnsupportedError` for another format."""
    if file.file_format.upper() != "PARQUET":
        raise UnsupportedError(
            f"lake file '{file.path}' is {file.file_format}: rows are deleted from Parquet files"
            " only; rewrite it as Parquet"
        )
    with files.open_parquet(file.path) as parquet:
        yield parquet


def locate_offsets(
    files: LakeFilesystem,
    candidates: Iterable[LakeFile],
    offsets: npt.NDArray[np.int64],
    *,
    bucket: int,
    has_row_ids: bool = False,
) -> dict[LakeFile, LocatedRows]:
    """Return the bucket's rows with these offsets, by data file.

    `offsets` is ascending and without repetition. Offsets in no file are left out: another engine
    deleted the row and rewrote the file. With `has_row_ids` the rows come with their ids.
    """
    rows_by_file = {}
    for file in candidates:
        first, end = np.searchsorted(offsets, [file.first_offset, file.last_offset + 1])
        if first == end:
            continue
        rows = _located(files, file, offsets[first:end], bucket=bucket, has_row_ids=has_row_ids)
        if len(rows.positions):
            rows_by_file[file] = rows
    return rows_by_file


def _located(
    files: LakeFilesystem,
    file: LakeFile,
    offsets: npt.NDArray[np.int64],
    *,
    bucket: int,
    has_row_ids: bool,
) -> LocatedRows:
    parts = list[LocatedRows]()
    row_start = 0
    with _parquet(files, file) as parquet:
        columns = [OFFSET_COLUMN]
        if file.is_shared:
            columns.append(BUCKET_COLUMN)
        if has_row_ids:
            columns += [name for name in parquet.schema.names if name == ROW_ID_COLUMN]
        for number in range(parquet.metadata.num_row_groups):
            group = parquet.metadata.row_group(number)
            first, last = integer_range(group, OFFSET_COLUMN) or (0, np.iinfo(np.int64).max - 1)
            group_offsets = offsets[slice(*np.searchsorted(offsets, [first, last + 1]))]
            if len(group_offsets):
                rows = parquet.read_row_group(number, columns=columns, use_threads=False)
                is_ours = None
                if file.is_shared:
                    is_ours = integer_values(rows.column(BUCKET_COLUMN)) == bucket
                row_offsets = integer_values(rows.column(OFFSET_COLUMN))
                positions = _find(row_offsets, group_offsets, is_ours)
                ids = None
                if has_row_ids:
                    ids = row_ids(rows, file.first_row_id, first_row=row_start).take(positions)
                parts.append(LocatedRows(row_start + positions, row_offsets[positions], ids))
            row_start += group.num_rows
    return LocatedRows(
        np.concatenate([np.empty(0, dtype=np.int64), *(part.positions for part in parts)]),
        np.concatenate([np.empty(0, dtype=np.int64), *(part.offsets for part in parts)]),
        pa.chunked_array([part.row_ids for part in parts], pa.int64()).combine_chunks()
        if has_row_ids
        else None,
    )


def _find(
    values: npt.NDArray[np.int64],
    wanted: npt.NDArray[np.int64],
    is_ours: npt.NDArray[np.bool_] | None,
) -> Positions:
    """Return where in `values` the `wanted` values are, ascending.

    Other engines' files are not sorted.
    """
    rows = np.arange(len(values)) if is_ours is None else np.flatnonzero(is_ours)
    values = values[rows]
    if not np.all(values[:-1] < values[1:]):
        order = np.argsort(values, kind="stable")
        rows, values = rows[order], values[order]
    if not len(values):
        return rows
    positions = np.minimum(np.searchsorted(values, wanted), len(values) - 1)
    row_positions: Positions = np.sort(rows[positions[values[positions] == wanted]])
    return row_positions


def write_position_deletes(
    files: LakeFilesystem, located: Mapping[LakeFile, Positions], *, folder: str, name: str
) -> list[WrittenDeletes]:
    """Write the position delete files for `located` into `folder`; on failure none stays.

    Each has the spec and partition of its data files, and covers a single data file unless many
    files of a partition are touched.
    """
    groups: dict[tuple[int, PartitionValues], list[LakeFile]] = defaultdict(list)
    for file in sorted(located, key=lambda f: f.path.encode()):
        groups[(file.spec_id, file.partition)].append(file)
    scopes = [
        scope
        for members in groups.values()
        for scope in ([[m] for m in members] if len(members) <= FILE_SCOPED_MAX else [members])
    ]
    written: list[WrittenDeletes] = []
    try:
        for scope in scopes:
            path = f"{folder.rstrip('/')}/{name}-{uuid.uuid4().hex[:16]}-deletes.parquet"
            written.append(_write(files, path, scope, [located[file] for file in scope]))
    except BaseException:
        delete_written(files, written)
        raise
    return written


def delete_written(files: LakeFilesystem, written: Iterable[WrittenDeletes]) -> None:
    """Delete these files. Never raises: what cannot be deleted becomes an orphan."""
    for deletes in written:
        with contextlib.suppress(StreamhouseError):
            files.delete(deletes.path)


def _write(
    files: LakeFilesystem, path: str, scope: Sequence[LakeFile], positions: Sequence[Positions]
) -> WrittenDeletes:
    paths = [file.path for file in scope]
    codes = np.repeat(np.arange(len(scope), dtype=np.int32), [len(p) for p in positions])
    every: npt.NDArray[Any] = np.concatenate(positions)
    rows = pa.table(
        [
            pa.DictionaryArray.from_arrays(
                integer_array(codes, pa.int32()), pa.array(paths, pa.string())
            ),
            integer_array(every, pa.int64()),
        ],
        schema=_SCHEMA,
    )
    try:
        with files.errors("write", path), files.open_output(path) as sink:
            with pq.ParquetWriter(
                sink,
                _SCHEMA,
                version="2.6",
                compression="zstd",
                use_dictionary=["file_path"],
                write_page_checksum=True,
                store_schema=False,
            ) as writer:
                writer.write_table(rows)
                writer.add_key_value_metadata(file_name_metadata(path))
            size = sink.tell()
    except BaseException:
        with contextlib.suppress(StreamhouseError):
            files.delete(path)
        raise
    return WrittenDeletes(
        path=path,
        size_bytes=size,
        row_count=len(every),
        spec_id=scope[0].spec_id,
        partition=scope[0].partition,
        data_paths=tuple(paths),
        first_position=int(every.min()),
        last_position=int(every.max()),
    )
