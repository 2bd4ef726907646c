"""Removal of old rows from a lake table: whole files with all rows below an offset.

Time never goes back within a bucket: a single offset a bucket marks the rows past their time to
live. Every read of the table begins at the offset, in each lake table, and the order of removing
files does not matter. A removal reads and writes no data file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from streamhouse.lake.commits.committer import IcebergLakeTable
from streamhouse.lake.commits.replacement import LakeReplacement, commit_replacement
from streamhouse.lake.snapshots.inventory import Inventory, LiveFile

__all__ = ["Removed", "ends_before", "files_below", "remove_files"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """The files and rows that a removal took out; the commit made the snapshot `snapshot_id`."""

    snapshot_id: int
    files: int
    rows: int
    size_bytes: int


def ends_before(files: Iterable[LiveFile], timestamp_us: int) -> dict[int, int]:
    """Return bucket -> end offset of the last file with only rows older than `timestamp_us`.

    Buckets without an old file are left out. Files without timestamps, and files that may have
    rows of several buckets, are ignored.
    """
    placed = [f for f in files if f.bucket is not None and f.end_offset is not None]
    limits: dict[int, int] = {}
    for file in placed:
        # Young files below old files occur only in tables adopted from a service with a fast clock.
        if file.first_timestamp_us is not None and file.first_timestamp_us >= timestamp_us:
            assert file.bucket is not None
            limits[file.bucket] = min(limits.get(file.bucket, file.start_offset), file.start_offset)
    ends: dict[int, int] = {}
    for file in placed:
        assert file.bucket is not None
        assert file.end_offset is not None
        is_old = file.last_timestamp_us is not None and file.last_timestamp_us < timestamp_us
        if is_old and file.end_offset <= limits.get(file.bucket, file.end_offset):
            ends[file.bucket] = max(ends.get(file.bucket, 0), file.end_offset)
    return ends


def files_below(files: Iterable[LiveFile], ends: Mapping[int, int]) -> list[LiveFile]:
    """Return the files with all rows below the offset of their bucket in `ends`."""
    return [
        file
        for file in files
        if file.bucket is not None
        and file.end_offset is not None
        and file.end_offset <= ends.get(file.bucket, 0)
    ]


def remove_files(
    lake_table: IcebergLakeTable,
    inventory: Inventory,
    files: Collection[LiveFile],
    *,
    expired_offsets: Mapping[int, int],
    expired_at_us: int = 0,
    epoch: int,
    check_lease: Callable[[], None] = lambda: None,
    checkpoint: Callable[[str], None] = lambda _: None,
) -> Removed:
    """Commit a snapshot without `files` and without delete files for `files` only.

    The snapshot records that rows below `expired_offsets`, the newest of which was written at
    `expired_at_us`, have reached their time to live.

    Raises:
        FencedError: another worker has the table now; nothing was removed.
        StreamhouseError: nothing was removed; a later maintenance tries again.
    """
    doomed = {file.path for file in files}
    staying = {file.path for file in inventory.files} - doomed
    deletes = [file.deletes for file in inventory.deletes if not file.data_paths & staying]
    snapshot_id = commit_replacement(
        lake_table,
        LakeReplacement(
            base=inventory,
            removed=(*sorted(doomed), *deletes),
            epoch=epoch,
            is_removal=True,
            expired_offsets=expired_offsets,
            expired_at_us=expired_at_us,
        ),
        check_lease=check_lease,
        checkpoint=checkpoint,
    )
    checkpoint("removal-committed")
    return Removed(
        snapshot_id=snapshot_id,
        files=len(doomed),
        rows=sum(file.row_count - file.deleted_rows for file in files),
        size_bytes=sum(file.size_bytes for file in files),
    )
