"""The tasks that copy rows from a table's lake table into its batch layout.

A batch layout that was added late begins with a copy from the rows' own lake table, because the log
has dropped the oldest rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from streamhouse.core.errors import UnsupportedError
from streamhouse.core.model.offsets import OffsetRange
from streamhouse.core.model.table import TableInfo
from streamhouse.lake.commits.committer import IcebergLakeTable
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.files.parquet_writer import clustered_format
from streamhouse.lake.snapshots.inventory import InventoryReader, LiveFile
from streamhouse.tiering.maintain._maintenance_policy import MaintenancePolicy
from streamhouse.tiering.tasks._rewrite_task import RewriteTask

__all__ = ["copy_tasks"]

_logger = logging.getLogger(__name__)

TASK_BYTES_MAX: Final = 256 << 20


def copy_tasks(
    source: IcebergLakeTable,
    target: IcebergLakeTable,
    ranges: Sequence[OffsetRange],
    *,
    table: TableInfo,
    folder: str,
    files: LakeFilesystem,
) -> list[RewriteTask]:
    """Return tasks that write the rows of `ranges` in `source` into files for `target`.

    The files go below `folder`. Raises `UnsupportedError` when `source` has files of another
    engine that cannot be copied.
    """
    inventory = InventoryReader(files).read(source.iceberg)
    live = () if inventory is None else inventory.files
    for file in live:
        if file.is_fixed:
            raise UnsupportedError(
                f"lake table '{source.name}': the batch layout cannot begin with file"
                f" '{file.path}', which is not Parquet or to which another engine's equality"
                " deletes apply; rewrite it with that engine"
            )
    layout = target.layout
    file_bytes = table.properties().datalake_target_file_bytes
    slice_us = MaintenancePolicy.of(table).rewrite.slice_us
    groups = [
        (part, group)
        for part in ranges
        for group in _runs((f for f in live if _may_have(f, part)), slice_us)
    ]
    return [
        RewriteTask(
            number=number,
            table=str(table.path),
            data_paths=tuple((file.path, file.row_count) for file in group),
            deletes=tuple({deletes: None for file in group for deletes in file.deletes}),
            lake_schema=source.file_schema.serialize().to_pybytes(),
            copied_as=target.file_schema.serialize().to_pybytes(),
            bucket=part.bucket,
            partition=(),
            partitioning=layout.partitioning,
            folder=folder,
            file_format=clustered_format(file_bytes, layout.clustering),
            files=files,
            clustering=layout.clustering,
            only=part,
            name_mapping=source.name_mapping,
        )
        for number, (part, group) in enumerate(groups)
    ]


def _may_have(file: LiveFile, part: OffsetRange) -> bool:
    """Whether the file may have rows of the range; true for a file without bounds."""
    if file.bucket is None:
        return True
    is_before = file.end_offset is not None and file.end_offset <= part.start
    return file.bucket == part.bucket and file.start_offset < part.end and not is_before


def _runs(files: Iterable[LiveFile], slice_us: int | None) -> Iterator[list[LiveFile]]:
    """Yield the files in offset order, in groups of one task each.

    Each slice of time goes into separate files: old rows can leave file by file.
    """
    group: list[LiveFile] = []
    size = 0
    for file in sorted(files, key=lambda file: (file.start_offset, file.path)):
        is_next = bool(group) and file.slice_of(slice_us) != group[-1].slice_of(slice_us)
        if is_next or (group and size + file.size_bytes > TASK_BYTES_MAX):
            yield group
            group, size = [], 0
        group.append(file)
        size += file.size_bytes
    if group:
        yield group
