"""One task of a round: a range of one bucket, from the service's log into sorted Parquet files.

Plain Python on purpose: a task is pickled, runs in a thread of the worker or in a Spark executor,
and imports neither pyspark nor pyiceberg.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.client import StorageClient
from streamhouse.core.errors import (
    CorruptDataError,
    UnavailableError,
)
from streamhouse.core.model.lake.partition_fields import (
    LakePartitionField,
)
from streamhouse.core.model.offsets import OffsetRange
from streamhouse.core.model.partitioning import Clustering
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
    Positions,
    WrittenDeletes,
    deleted_rows,
    locate_offsets,
    write_position_deletes,
)
from streamhouse.reading.tail._lake_rows import FoldedSplit, fold_split, lake_rows
from streamhouse.reading.tail._log_chunks import LogReads, read_chunks

__all__ = ["LogReads", "Retraction", "RowsObserver", "SplitResult", "TieringSplit", "run_split"]

RowsObserver = Callable[[int], None]
"""Called with the number of log rows processed since the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retraction:
    """The inputs for retracting rows of the lake; with them a task writes surviving versions only.

    The round moves the bucket's changes [boundary, bucket_end); the split is a part of the range.
    `lake_files` are the live data files with possible rows of the bucket. With `has_vectors` the
    task leaves the writing of deletes to the commit.
    """

    boundary: int
    bucket_end: int
    lake_files: tuple[LakeFile, ...] = field(repr=False)
    has_vectors: bool = False


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
    writer = PartitionedParquetWriter(
        split.files,
        folder=split.folder,
        name=_file_name(split),
        bucket=split.range.bucket,
        schema=pa.ipc.read_schema(pa.py_buffer(split.lake_schema)),
        partitioning=split.partitioning,
        file_format=split.file_format,
    )
    try:
        with open_log(split) as log:
            folded = _folded(log, split)
            survives = None if folded is None else folded.survives
            _write_rows(log, split, writer, survives, on_rows=on_rows, is_cancelled=is_cancelled)
        files = writer.close()
        row_count = split.range.row_count if survives is None else int(np.count_nonzero(survives))
        written = sum(file.row_count for file in files)
        if written != row_count:
            raise CorruptDataError(
                f"table '{split.table}', bucket {split.range.bucket}: wrote {written} of"
                f" {row_count} rows of [{split.range.start}, {split.range.end})"
            )
        located = _located(split, folded)
        deletes, rows = list[WrittenDeletes](), list[DeletedRows]()
        if split.retraction is not None and split.retraction.has_vectors:
            rows = deleted_rows(located)
        else:
            deletes = write_position_deletes(
                split.files, located, folder=split.folder, name=_file_name(split)
            )
    except BaseException:
        writer.abort()
        raise
    retracted = 0 if folded is None else len(folded.retracted)
    return SplitResult(
        range=split.range,
        files=tuple(files),
        deletes=tuple(deletes),
        deleted_rows=tuple(rows),
        not_found=retracted - sum(len(positions) for positions in located.values()),
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
    )


def _write_rows(
    log: LogReads,
    split: TieringSplit,
    writer: PartitionedParquetWriter,
    survives: npt.NDArray[np.bool_] | None,
    *,
    on_rows: RowsObserver,
    is_cancelled: Callable[[], bool],
) -> None:
    if survives is not None and not survives.any():
        on_rows(split.range.row_count)
        return
    schema = pa.ipc.read_schema(pa.py_buffer(split.lake_schema))
    target = ClusteredWriter(writer=writer, clustering=split.clustering)
    position = 0
    chunks = read_chunks(
        log, split.table, split.range, table_id=split.table_id, schema_id=split.schema_id
    )
    for chunk in chunks:
        if is_cancelled():
            raise UnavailableError(f"tiering of '{split.table}' was cancelled")
        end = position + chunk.row_count
        keep = None if survives is None else survives[position:end]
        position = end
        if keep is None or keep.any():
            target.write(lake_rows(chunk.batches, schema, keep=keep))
        on_rows(chunk.row_count)
    target.flush()


def _located(split: TieringSplit, folded: FoldedSplit | None) -> dict[LakeFile, Positions]:
    """Return where in live files the rows are that the split retracts."""
    if folded is None or split.retraction is None or not len(folded.retracted):
        return {}
    return locate_offsets(
        split.files,
        split.retraction.lake_files,
        folded.retracted,
        bucket=split.range.bucket,
    )
