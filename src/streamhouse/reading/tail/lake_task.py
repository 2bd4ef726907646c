"""One task of a round: a range of one bucket, from the service's log into sorted Parquet files.

Plain Python on purpose: a task is pickled, runs in a thread of the worker or in a Spark executor,
and imports neither pyspark nor pyiceberg.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.client import LogBatch, StorageClient
from streamhouse.core.errors import (
    CorruptDataError,
    UnavailableError,
)
from streamhouse.core.model.lake.partition_fields import (
    LakePartitionField,
)
from streamhouse.core.model.offsets import OffsetRange
from streamhouse.core.model.partitioning import Clustering
from streamhouse.core.model.values.numpy_arrays import boolean_array, integer_array
from streamhouse.lake.files.clustering import ClusteredWriter
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.files.parquet_writer import (
    FileFormat,
    PartitionedParquetWriter,
    WrittenFile,
)
from streamhouse.lake.files.position_deletes import (
    DeletedRows,
    LakeFile,
    LocatedRows,
    Positions,
    WrittenDeletes,
    deleted_rows,
    locate_offsets,
    write_position_deletes,
)
from streamhouse.lake.files.row_lineage import with_lineage_fields, with_row_ids
from streamhouse.reading.tail._lake_rows import FoldedSplit, fold_split, lake_rows
from streamhouse.reading.tail._log_chunks import LogReads, read_chunks

__all__ = ["LogReads", "Retraction", "RowsObserver", "SplitResult", "TieringSplit", "run_split"]

RowsObserver = Callable[[int], None]
"""Called with the number of log rows processed since the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retraction:
    """The inputs for retracting rows of the lake; with them a task writes surviving versions only.

    The round moves the bucket's changes [boundary, bucket_end); the split is a part of the range.
    `lake_files` are the live data files with possible rows of the bucket. In a lake table that
    `is_version_3` a later version of a row keeps the row's id, and the task leaves the writing of
    deletes to the commit.
    """

    boundary: int
    bucket_end: int
    lake_files: tuple[LakeFile, ...] = field(repr=False)
    is_version_3: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TieringSplit:
    """The inputs of a task, as plain data.

    `lake_schema` is the serialised Arrow schema of the lake files, with field ids. `folder` is the
    round's own folder in the lake table: files in it that no snapshot has may be deleted. Without
    a `retraction` every row of the range is written. A `clustering` replaces the order of the log.
    """

    endpoint: str
    token: str | None = field(repr=False)
    table: str
    table_id: int
    schema_id: int
    range: OffsetRange
    lake_schema: bytes = field(repr=False)
    partitioning: tuple[LakePartitionField, ...]
    folder: str
    file_format: FileFormat
    files: LakeFilesystem
    retraction: Retraction | None = None
    clustering: Clustering = field(default_factory=Clustering)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitResult:
    """The data files with exactly the surviving rows of `range`, and the deletes of old versions.

    `not_found` counts retracted rows in no live file: another engine had deleted the rows.
    """

    range: OffsetRange
    files: tuple[WrittenFile, ...]
    deletes: tuple[WrittenDeletes, ...] = ()
    deleted_rows: tuple[DeletedRows, ...] = ()
    not_found: int = 0

    @property
    def paths(self) -> tuple[str, ...]:
        """Every file of the result."""
        data = [file.path for file in self.files]
        return (*data, *(deletes.path for deletes in self.deletes))


def _open_client(split: TieringSplit) -> AbstractContextManager[LogReads]:
    return StorageClient(split.endpoint, token=split.token)


def run_split(
    split: TieringSplit,
    *,
    open_log: Callable[[TieringSplit], AbstractContextManager[LogReads]] = _open_client,
    on_rows: RowsObserver = lambda _: None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> SplitResult:
    """Write the split's rows and return the files; on any failure the files are deleted.

    Raises:
        StreamhouseError: the range cannot be read or written, or the log sent other rows.
    """
    with open_log(split) as log:
        folded = _folded(log, split)
        located = {} if folded is None else _located(split, folded)
        retracted = {} if folded is None else _retracted(located, folded)
        row_ids = None if folded is None else _row_ids(located, folded)
        schema = pa.ipc.read_schema(pa.py_buffer(split.lake_schema))
        writer = PartitionedParquetWriter(
            split.files,
            folder=split.folder,
            name=_file_name(split),
            bucket=split.range.bucket,
            schema=schema if row_ids is None else with_lineage_fields(schema),
            partitioning=split.partitioning,
            file_format=split.file_format,
        )
        deletes, deleted = list[WrittenDeletes](), list[DeletedRows]()
        try:
            rows = _SplitRows(schema, None if folded is None else folded.survives, row_ids)
            _write_rows(log, split, writer, rows, on_rows=on_rows, is_cancelled=is_cancelled)
            files = writer.close()
            _check_row_count(split, rows, files)
            if split.retraction is not None and split.retraction.is_version_3:
                deleted = deleted_rows(retracted)
            else:
                deletes = write_position_deletes(
                    split.files, retracted, folder=split.folder, name=_file_name(split)
                )
        except BaseException:
            writer.abort()
            raise
    retracted_count = 0 if folded is None else len(folded.retracted)
    return SplitResult(
        range=split.range,
        files=tuple(files),
        deletes=tuple(deletes),
        deleted_rows=tuple(deleted),
        not_found=retracted_count - sum(len(positions) for positions in retracted.values()),
    )


@dataclass(frozen=True, slots=True)
class _SplitRows:
    """Which rows of a split the lake gets, and the ids of those that are later versions.

    `schema` is that of the lake's columns. None means: all rows; rows without ids.
    """

    schema: pa.Schema
    survives: npt.NDArray[np.bool_] | None
    row_ids: pa.Array | None

    def lake_rows(self, batches: Sequence[LogBatch], start: int, end: int) -> pa.Table | None:
        """Return the surviving rows of rows [start, end) of the split; None if none survives."""
        keep = None if self.survives is None else self.survives[start:end]
        if keep is not None and not keep.any():
            return None
        rows = lake_rows(batches, self.schema, keep=keep)
        if self.row_ids is None:
            return rows
        ids = self.row_ids.slice(start, end - start)
        return with_row_ids(rows, ids if keep is None else ids.filter(boolean_array(keep)))


def _check_row_count(split: TieringSplit, rows: _SplitRows, files: Sequence[WrittenFile]) -> None:
    row_count = split.range.row_count
    if rows.survives is not None:
        row_count = int(np.count_nonzero(rows.survives))
    written = sum(file.row_count for file in files)
    if written != row_count:
        raise CorruptDataError(
            f"table '{split.table}', bucket {split.range.bucket}: wrote {written} of"
            f" {row_count} rows of [{split.range.start}, {split.range.end})"
        )


def _file_name(split: TieringSplit) -> str:
    return f"b{split.range.bucket:05d}-{split.range.start:020d}"


def _folded(log: LogReads, split: TieringSplit) -> FoldedSplit | None:
    if split.retraction is None:
        return None
    return fold_split(
        log,
        split.table,
        split.range,
        boundary=split.retraction.boundary,
        bucket_end=split.retraction.bucket_end,
        table_id=split.table_id,
        schema_id=split.schema_id,
        has_row_ids=split.retraction.is_version_3,
    )


def _write_rows(
    log: LogReads,
    split: TieringSplit,
    writer: PartitionedParquetWriter,
    rows: _SplitRows,
    *,
    on_rows: RowsObserver,
    is_cancelled: Callable[[], bool],
) -> None:
    if rows.survives is not None and not rows.survives.any():
        on_rows(split.range.row_count)
        return
    target = ClusteredWriter(writer=writer, clustering=split.clustering)
    position = 0
    chunks = read_chunks(
        log, split.table, split.range, table_id=split.table_id, schema_id=split.schema_id
    )
    for chunk in chunks:
        if is_cancelled():
            raise UnavailableError(f"tiering of '{split.table}' was cancelled")
        end = position + chunk.row_count
        surviving_rows = rows.lake_rows(chunk.batches, position, end)
        position = end
        if surviving_rows is not None:
            target.write(surviving_rows)
        on_rows(chunk.row_count)
    target.flush()


def _located(split: TieringSplit, folded: FoldedSplit) -> dict[LakeFile, LocatedRows]:
    """Return the rows of live files that the split retracts or has later versions of."""
    assert split.retraction is not None
    offsets = folded.retracted
    if folded.replaced is not None:
        # Another split of the round may retract the row, and this one have its last version.
        later = folded.replaced[folded.survives & (folded.replaced >= 0)]
        offsets = np.union1d(offsets, later)
    if not len(offsets):
        return {}
    return locate_offsets(
        split.files,
        split.retraction.lake_files,
        offsets,
        bucket=split.range.bucket,
        has_row_ids=folded.replaced is not None,
    )


def _retracted(
    located: Mapping[LakeFile, LocatedRows], folded: FoldedSplit
) -> dict[LakeFile, Positions]:
    """Return the positions of the rows that the split retracts."""
    positions = {
        file: rows.positions[np.isin(rows.offsets, folded.retracted)]
        for file, rows in located.items()
    }
    return {file: of_file for file, of_file in positions.items() if len(of_file)}


def _row_ids(located: Mapping[LakeFile, LocatedRows], folded: FoldedSplit) -> pa.Array | None:
    """Return the id of each row of the split, null for a new row; None if all are new."""
    if folded.replaced is None or not located:
        return None
    offsets = np.concatenate([rows.offsets for rows in located.values()])
    ids = pa.concat_arrays([rows.row_ids for rows in located.values()])
    order = np.argsort(offsets)
    places = np.minimum(np.searchsorted(offsets, folded.replaced, sorter=order), len(offsets) - 1)
    places = order[places]
    is_later = folded.survives & (offsets[places] == folded.replaced)
    row_ids = pc.if_else(
        boolean_array(is_later),
        ids.take(integer_array(places, pa.int64())),
        pa.scalar(None, pa.int64()),
    )
    return None if row_ids.null_count == len(row_ids) else row_ids
