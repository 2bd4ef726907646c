"""Removal of old rows from a lake table: whole files, by when their newest row was written.

No file is read or written for it. A file of which one row is young enough stays as it is, and so
does one that does not say when its rows were written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from streamhouse.tiering.iceberg_committer import IcebergLakeTable
from streamhouse.tiering.iceberg_inventory import Inventory
from streamhouse.tiering.iceberg_replace import LakeReplacement, commit_replacement
from streamhouse.tiering.iceberg_snapshot import Operation
from streamhouse.tiering.maintenance_plan import LiveFile

__all__ = ["Removed", "files_written_before", "remove_files"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What was taken out of the lake table; `snapshot_id` is that of the commit."""

    snapshot_id: int
    files: int
    rows: int
    size_bytes: int


def files_written_before(inventory: Inventory, timestamp_us: int) -> list[LiveFile]:
    """Return the files all of whose rows are older."""
    return [
        file
        for file in inventory.files
        if file.last_timestamp_us is not None and file.last_timestamp_us < timestamp_us
    ]


def remove_files(
    lake_table: IcebergLakeTable,
    inventory: Inventory,
    files: Collection[LiveFile],
    *,
    table_id: int,
    epoch: int,
    check_lease: Callable[[], None] = lambda: None,
    checkpoint: Callable[[str], None] = lambda _: None,
) -> Removed:
    """Commit a snapshot without `files`, and without the delete files that name no other.

    Raises:
        FencedError: another worker has the table now; nothing was removed.
        StreamhouseError: nothing was removed; a later maintenance looks again.
    """
    doomed = {file.path for file in files}
    staying = {file.path for file in inventory.files} - doomed
    deletes = [found.path for found in inventory.deletes if not found.data_paths & staying]
    snapshot_id = commit_replacement(
        lake_table.iceberg,
        LakeReplacement(
            added=(),
            removed=[inventory.data_files[path] for path in (*sorted(doomed), *deletes)],
            base_sequence=inventory.sequence_number,
            table_id=table_id,
            epoch=epoch,
            role=lake_table.role,
            operation=Operation.DELETE,
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
