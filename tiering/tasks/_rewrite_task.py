"""One task of maintenance: neighbouring lake files become one, without their deleted rows.

Plain Python on purpose, like the tasks of a round: a task runs in a thread or in a Spark executor
and imports neither pyspark nor pyiceberg. Rows keep every column, also `__offset`, and are sorted
by offset, or in the order of a batch layout, across all files of the task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import CorruptDataError, UnavailableError
from streamhouse.core.model.lake.partition_fields import (
    LakePartitionField,
)
from streamhouse.core.model.offsets import OffsetRange
from streamhouse.core.model.partitioning import Clustering
from streamhouse.core.model.schema import BUCKET_COLUMN, OFFSET_COLUMN
from streamhouse.lake.files.clustering import ClusteredWriter
from streamhouse.lake.files.deletes.deleted_positions import Deletes, read_deleted_positions
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.files.name_mapping import NameMapping
from streamhouse.lake.files.parquet_writer import (
    FileFormat,
    PartitionedParquetWriter,
    WrittenFile,
)
from streamhouse.lake.files.partition_layout import (
    PartitionValues,
)
from streamhouse.lake.files.projection import project
from streamhouse.lake.files.row_lineage import (
    FileLineage,
    lineage_columns,
    with_lineage_fields,
)

__all__ = ["RewriteResult", "RewriteTask", "run_rewrite"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteTask:
    """The inputs of a task, as plain data.

    `data_paths` are read in order, each with its row count; `deletes` are the deletes of their
    rows, and `lineage` is that of each file, or empty where rows get no lineage. `number`
    identifies the task within its rewrite.

    A copy into another lake table has the target's `partitioning` instead of a `partition`, and
    the target's file schema in `copied_as`: the same columns, perhaps with other ids of nested
    fields. `only` limits the copy to the rows of a range.
    """

    number: int
    table: str
    data_paths: tuple[tuple[str, int], ...]
    deletes: tuple[Deletes, ...]
    lineage: tuple[FileLineage, ...] = ()
    lake_schema: bytes = field(repr=False)
    bucket: int
    partition: PartitionValues
    folder: str
    file_format: FileFormat
    files: LakeFilesystem
    clustering: Clustering = field(default_factory=Clustering)
    partitioning: tuple[LakePartitionField, ...] = ()
    copied_as: bytes = field(default=b"", repr=False)
    only: OffsetRange | None = None
    name_mapping: NameMapping | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteResult:
    """The files with the task's live rows; no file when all rows are deleted."""

    number: int
    files: tuple[WrittenFile, ...]
    rows_read: int
    rows_deleted: int

    @property
    def paths(self) -> tuple[str, ...]:
        """Every file of the result."""
        return tuple(file.path for file in self.files)


def run_rewrite(
    task: RewriteTask,
    *,
    on_rows: Callable[[int], None] = lambda _: None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> RewriteResult:
    """Write the task's rows and return the files; on any failure the files are deleted.

    Raises:
        StreamhouseError: a file cannot be read or written, or differs from the plan.
    """
    if task.clustering.columns:
        return _rewrite(task, iter, on_rows, is_cancelled)
    try:
        return _rewrite(task, _in_order, on_rows, is_cancelled)
    except _OutOfOrderError:
        # Another engine wrote some of the files, in an order of its own.
        return _rewrite(task, _sorted, on_rows, is_cancelled)


class _OutOfOrderError(Exception):
    """The files are not consecutive ranges."""


def _rewrite(
    task: RewriteTask,
    in_order: Callable[[Iterator[pa.Table]], Iterator[pa.Table]],
    on_rows: Callable[[int], None],
    is_cancelled: Callable[[], bool],
) -> RewriteResult:
    schema = pa.ipc.read_schema(pa.py_buffer(task.lake_schema))
    deleted = read_deleted_positions(
        task.files, task.deletes, data_paths=[path for path, _ in task.data_paths]
    )
    writer = PartitionedParquetWriter(
        task.files,
        folder=task.folder,
        name=f"b{task.bucket:05d}-r{task.number:05d}",
        bucket=task.bucket,
        schema=_written_schema(task, schema),
        partitioning=task.partitioning,
        file_format=task.file_format,
    )
    target = ClusteredWriter(writer=writer, clustering=task.clustering)
    try:
        for rows in in_order(_live_rows(task, schema, deleted)):
            if is_cancelled():
                raise UnavailableError(f"maintenance of '{task.table}' was cancelled")
            target.write(rows)
            on_rows(rows.num_rows)
        target.flush()
        files = writer.close()
        rows_read = sum(count for _, count in task.data_paths)
        rows_deleted = sum(len(positions) for positions in deleted.values())
        written = sum(file.row_count for file in files)
        if task.only is None and written != rows_read - rows_deleted:
            raise CorruptDataError(
                f"lake table '{task.table}', bucket {task.bucket}: {written} rows were written of"
                f" {rows_read}, of which {rows_deleted} are deleted"
            )
    except BaseException:
        writer.abort()
        raise
    return RewriteResult(
        number=task.number,
        files=tuple(
            file if task.partitioning else replace(file, partition=task.partition) for file in files
        ),
        rows_read=rows_read,
        rows_deleted=rows_deleted,
    )


def _written_schema(task: RewriteTask, schema: pa.Schema) -> pa.Schema:
    if task.copied_as:
        return pa.ipc.read_schema(pa.py_buffer(task.copied_as))
    return with_lineage_fields(schema) if task.lineage else schema


def _live_rows(
    task: RewriteTask, schema: pa.Schema, deleted: dict[str, npt.NDArray[np.int64]]
) -> Iterator[pa.Table]:
    """Yield the live rows, a row group at a time."""
    for number, (path, row_count) in enumerate(task.data_paths):
        with task.files.open_parquet(path) as file:
            positions = deleted.get(path, np.empty(0, dtype=np.int64))
            if file.metadata.num_rows != row_count or (positions >= row_count).any():
                raise CorruptDataError(
                    f"lake file '{path}' has {file.metadata.num_rows} rows, not the {row_count}"
                    " of its table's metadata, or rows beyond its end are deleted"
                )
            start = 0
            for group in range(file.metadata.num_row_groups):
                stored = file.read_row_group(group)
                rows = project(stored, schema, path=path, names=task.name_mapping)
                if task.lineage:
                    columns = lineage_columns(stored, task.lineage[number], first_row=start)
                    rows = pa.table([*rows.columns, *columns], schema=with_lineage_fields(schema))
                end = start + rows.num_rows
                first, last = np.searchsorted(positions, [start, end])
                if last > first:
                    keep = np.ones(rows.num_rows, dtype=np.bool_)
                    keep[positions[first:last] - start] = False
                    rows = rows.filter(pa.array(keep))
                start = end
                if task.only is not None:
                    rows = _in_range(rows, task.only)
                if rows.num_rows:
                    yield rows


def _in_range(rows: pa.Table, offset_range: OffsetRange) -> pa.Table:
    offsets = rows.column(OFFSET_COLUMN)
    is_inside = pc.and_(
        pc.equal(rows.column(BUCKET_COLUMN), offset_range.bucket),
        pc.and_(pc.greater_equal(offsets, offset_range.start), pc.less(offsets, offset_range.end)),
    )
    # Most files are inside the range as a whole.
    return rows if pc.all(is_inside).as_py() else rows.filter(is_inside)


def _in_order(parts: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Yield the parts unchanged; raises `_OutOfOrderError` where offsets do not grow."""
    last = -1
    for rows in parts:
        offsets = rows.column(OFFSET_COLUMN).to_numpy()
        if offsets[0] <= last or not (offsets[1:] > offsets[:-1]).all():
            raise _OutOfOrderError
        last = int(offsets[-1])
        yield rows


def _sorted(parts: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Yield all rows at once, sorted; files of other engines are rare."""
    collected = list(parts)
    if collected:
        yield pa.concat_tables(collected).sort_by(OFFSET_COLUMN)
