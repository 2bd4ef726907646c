"""Planning a read of a Streamhouse table's lake, on the driver only.

A plan is made on one snapshot. When maintenance has expired the pinned snapshot, the table's
current snapshot is read and cut at the pinned offsets: it holds the same rows of a log table.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, Final

from streamhouse.core.errors import CorruptDataError, SnapshotNotFoundError
from streamhouse.core.model.lake.coverage import CoveredOffsets, offsets_of_properties
from streamhouse.core.model.lake.facts import (
    TIERED_OFFSETS_PROPERTY,
    LakeCatalog,
    LakeRole,
    LakeState,
)
from streamhouse.core.model.offsets import OffsetRange
from streamhouse.core.model.schema import (
    BUCKET_COLUMN,
    CHANGE_TYPE_COLUMN,
    OFFSET_COLUMN,
    TIMESTAMP_COLUMN,
    Schema,
)
from streamhouse.core.model.table import TableInfo
from streamhouse.lake.iceberg_errors import metadata_errors
from streamhouse.lake.opened_table import OpenedTable, open_table
from streamhouse.reading.files._file_planner import FilePlanner
from streamhouse.reading.files._file_pruning import LakeQuery
from streamhouse.reading.scan.scan import LakeFile

__all__ = ["LakeFiles", "LakeTable", "older_lake", "open_lake_table"]

_SIZE_PROPERTIES: Final = ("total-files-size", "total-records")


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeFiles:
    """The files of one read, and the field ids of the table's columns in the files.

    `read_bytes` estimates the bytes that the read decodes.
    """

    snapshot_id: int
    files: tuple[LakeFile, ...]
    field_ids: Mapping[str, int | None]
    read_bytes: int


def open_lake_table(
    catalog: LakeCatalog, table: str, *, table_uuid: str | None = None
) -> LakeTable:
    """Open the lake table of `table` (`database.table`) as it is now.

    Raises `SnapshotNotFoundError` when the catalog has no such table, or a table with another uuid
    than `table_uuid`.
    """
    opened = open_table(catalog, table)
    if opened is None:
        raise SnapshotNotFoundError(
            f"table '{table}' has no lake table in catalog '{catalog.name}'; was it dropped there?"
        )
    if table_uuid is not None and opened.uuid != table_uuid:
        raise SnapshotNotFoundError(
            f"table '{table}': the lake table in catalog '{catalog.name}' is another one"
            f" ({opened.uuid}) than was tiered to ({table_uuid})"
        )
    return LakeTable(opened)


def older_lake(name: str, bucket: int, *, end: int, tiered_end: int) -> CorruptDataError:
    """Return the error for a lake table that ends before the rows tiered to the table."""
    return CorruptDataError(
        f"lake table '{name}' has bucket {bucket} up to offset {end}, but rows up to {tiered_end}"
        " were tiered to it: its catalog or metadata is older than the service's data directory;"
        " restore the newer one"
    )


class LakeTable:
    """A lake table at one state of the table's metadata."""

    def __init__(self, table: OpenedTable) -> None:
        self._name = table.name
        self._table = table

    def snapshot_ids(self) -> list[int]:
        """Return the ids of the existing snapshots, oldest first."""
        return [snapshot.snapshot_id for snapshot in self._table.snapshots()]

    def tiered_offsets(self, snapshot_id: int) -> dict[int, int]:
        """Return the end offsets that a snapshot covers."""
        offsets = self._tiered_offsets(snapshot_id)
        if offsets is None:
            raise SnapshotNotFoundError(
                f"lake table '{self._name}': neither snapshot {snapshot_id} nor an ancestor of it"
                " was written by Streamhouse"
            )
        return offsets

    def _tiered_offsets(self, snapshot_id: int) -> dict[int, int] | None:
        covered = self._covered_by(snapshot_id)
        return None if covered is None else dict(covered.tiered_offsets)

    def fingerprints(self, snapshot_id: int) -> dict[int, str]:
        """Return a snapshot's fingerprints of the log, at the offsets covered by the snapshot."""
        covered = self._covered_by(snapshot_id)
        return {} if covered is None else dict(covered.fingerprints)

    def histories(self, table_id: int, role: LakeRole) -> list[CoveredOffsets]:
        """Return the covered offsets of the current snapshot and its ancestors, newest first.

        Snapshots of another owner, from before an adoption, are left out.
        """
        covered = (
            offsets_of_properties(snapshot.properties)
            for snapshot in self._table.lineage(self._table.snapshot_id)
            if snapshot.properties.get(role.owner_property) == str(table_id)
        )
        return [offsets for offsets in covered if offsets is not None]

    def covered(self, table_id: int, role: LakeRole) -> CoveredOffsets | None:
        """Return the offsets covered by the current table; None without a round of the table."""
        return self._table.covered(table_id, role=role)

    def unregistered_offsets(self, table_id: int, registered: LakeState) -> CoveredOffsets | None:
        """Return the offsets covered now, None if the service has registered the same offsets."""
        covered = self.covered(table_id, registered.role)
        if covered is None:
            return None
        is_registered = covered.tiered_offsets == registered.tiered_offsets and all(
            registered.fingerprints.get(bucket, fingerprint) == fingerprint
            for bucket, fingerprint in covered.fingerprints.items()
        )
        return None if is_registered else covered

    def _covered_by(self, snapshot_id: int) -> CoveredOffsets | None:
        """Return the offsets covered by a snapshot, or by its newest ancestor written by
        Streamhouse.
        """
        self._check_exists(snapshot_id)
        return self._table.covered(snapshot_id=snapshot_id)

    def _has_all(self, snapshot_id: int, ranges: Mapping[int, OffsetRange]) -> bool:
        """Whether an overwrite has taken nothing of `ranges` out of a snapshot.

        Raises `CorruptDataError` if the snapshot does not reach their ends: it is older.
        """
        covered = self._table.covered(snapshot_id=snapshot_id)
        for bucket, offsets in ranges.items():
            end = 0 if covered is None else covered.tiered_offsets.get(bucket, 0)
            if end < offsets.end:
                raise older_lake(self._name, bucket, end=end, tiered_end=offsets.end)
        truncated = {} if covered is None else covered.truncated_offsets
        return all(truncated.get(b, 0) <= offsets.start for b, offsets in ranges.items())

    def snapshots(self) -> list[dict[str, Any]]:
        """Return a row for each snapshot of `table$snapshots`, oldest first."""
        return [
            {
                "snapshot_id": snapshot.snapshot_id,
                "parent_snapshot_id": snapshot.parent_id,
                "committed_at_ms": snapshot.committed_at_ms,
                "operation": snapshot.operation,
                "is_current": snapshot.snapshot_id == self._table.snapshot_id,
                "tiered_offsets": snapshot.properties.get(TIERED_OFFSETS_PROPERTY),
                "properties": {str(k): str(v) for k, v in snapshot.properties.items()},
            }
            for snapshot in self._table.snapshots()
        ]

    def size(self) -> tuple[int, int]:
        """Return bytes and rows of the current snapshot, with deleted rows and files of deletes.

        Other engines may leave the sums out of the snapshot: DuckDB does. Then manifests are read.
        """
        snapshot_id = self._table.snapshot_id
        snapshot = None if snapshot_id is None else self._table.snapshot(snapshot_id)
        if snapshot is None:
            return 0, 0
        size_bytes, rows = (snapshot.properties.get(name) for name in _SIZE_PROPERTIES)
        if size_bytes is None or rows is None:
            return self._table.files(snapshot.snapshot_id).size()
        return int(size_bytes), int(rows)

    def plan(
        self,
        schema: Schema,
        query: LakeQuery,
        *,
        snapshot_id: int,
        successor_of: TableInfo | None = None,
        successor_covers: Mapping[int, int] | None = None,
        own_ids: Container[int] = (),
    ) -> LakeFiles:
        """Return the files of a snapshot with possible rows of `query`.

        Args:
            schema: the table's own schema, whose columns are looked up in the lake's schema.
            successor_of: when the snapshot is expired, plan on the current snapshot of this table.
                A current snapshot without all rows of the ranges is not used: the table was
                overwritten, or another engine changed protected rows. None: no other snapshot.
            successor_covers: the offsets that a current snapshot must cover exactly.
            own_ids: ids of all columns the table ever had.
        """
        if self._table.snapshot(snapshot_id) is None and successor_of is not None:
            self.check_outside(successor_of)
            snapshot_id = self._successor(query.ranges or {}, successor_covers) or snapshot_id
        self._check_exists(snapshot_id)
        field_ids = self._field_ids(schema, own_ids)
        planner = FilePlanner(self._table, schema, query, field_ids)
        with metadata_errors(self._name):
            files = tuple(planner.files(self._table.files(snapshot_id)))
        return LakeFiles(
            snapshot_id=snapshot_id,
            files=files,
            field_ids=field_ids,
            read_bytes=planner.read_bytes,
        )

    def _successor(
        self, ranges: Mapping[int, OffsetRange], covers: Mapping[int, int] | None
    ) -> int | None:
        """Return the current snapshot if it has all rows of the ranges, and covers exactly
        `covers`.
        """
        current = self._table.snapshot_id
        if current is None or self._table.snapshot(current) is None:
            return None
        if not self._has_all(current, ranges):
            return None
        if covers is not None and self._tiered_offsets(current) != dict(covers):
            return None
        return current

    def check_outside(self, table: TableInfo) -> None:
        """Raise `CorruptDataError` if another engine changed protected rows of the table."""
        with metadata_errors(self._name):
            self._table.check_outside(table)

    def was_changed_outside(self, table: TableInfo) -> bool:
        """Whether another engine ever changed or deleted rows of the table."""
        with metadata_errors(self._name):
            return self._table.was_changed_outside(table)

    def newest_with(self, ranges: Mapping[int, OffsetRange]) -> int | None:
        """Return the current snapshot of a log table, if it has all rows of the ranges."""
        return self._successor(ranges, None)

    def may_have_other_rows(self, table: TableInfo, registered: int) -> bool:
        """Whether another engine that is allowed to committed rows after a snapshot."""
        return self._table.may_have_other_rows(table, registered)

    def _check_exists(self, snapshot_id: int) -> None:
        if self._table.snapshot(snapshot_id) is None:
            raise SnapshotNotFoundError(
                f"lake table '{self._name}' has no snapshot {snapshot_id}: it never existed or was"
                f" expired; see '{self._name}$snapshots'"
            )

    def _field_ids(self, schema: Schema, own_ids: Container[int]) -> dict[str, int | None]:
        """Return each column's field id: by the column's permanent id, else by name, else None."""
        names = self._table.field_ids()
        ids = {field_id: name for name, field_id in names.items()}
        field_ids: dict[str, int | None] = {}
        for column in schema.columns:
            is_ours = column.id in ids and not ids[column.id].startswith("__")
            by_name = names.get(column.name)
            field_ids[column.name] = column.id if is_ours else by_name
            if not is_ours and by_name in own_ids:
                # That is another column of ours, which had the name before the lake heard of it.
                field_ids[column.name] = None
        for name in (BUCKET_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN):
            if name not in names:
                raise CorruptDataError(
                    f"lake table '{self._name}' has no column '{name}'; it is not a Streamhouse"
                    " table any more"
                )
            field_ids[name] = names[name]
        # Only a full history has change types.
        field_ids[CHANGE_TYPE_COLUMN] = names.get(CHANGE_TYPE_COLUMN)
        return field_ids
