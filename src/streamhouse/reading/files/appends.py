"""Any table of the Iceberg catalog as a sequence of files: the files of one snapshot, followed by
the files appended by later snapshots. On the driver only.

Invariants:
- the files of a snapshot have one fixed order, the oldest first
- between two positions lie exactly the files after the first position up to the second, each once;
  a snapshot with only rewritten rows adds none
- deleted rows and expired snapshots cannot be followed: they are an error, never a gap
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from streamhouse.core.errors import (
    InvalidSchemaError,
    SnapshotNotFoundError,
    TableNotFoundError,
    UnsupportedError,
)
from streamhouse.core.model.lake.facts import LakeCatalog
from streamhouse.core.model.schema import RESERVED_COLUMNS, Schema
from streamhouse.lake.files.lake_filesystem import lake_file_properties
from streamhouse.lake.iceberg_errors import metadata_errors
from streamhouse.lake.opened_table import (
    OpenedTable,
    SnapshotFiles,
    SnapshotInfo,
    open_table,
)
from streamhouse.lake.snapshots.live_files import DeleteIndex, ManifestFiles
from streamhouse.reading.files._file_planner import FilePlanner
from streamhouse.reading.files._file_pruning import LakeQuery
from streamhouse.reading.files.append_position import AppendPosition
from streamhouse.reading.options.options import SKIP_OPTIONS
from streamhouse.reading.scan.scan import LakeFile
from streamhouse.reading.where.predicate import Predicate

__all__ = ["SourceTable", "open_source_table"]

# Iceberg's words for what a snapshot does.
_REPLACE, _OVERWRITE, _DELETE = "replace", "overwrite", "delete"
_SKIPPED_BY: Final = dict(zip((_OVERWRITE, _DELETE), SKIP_OPTIONS, strict=True))

_TRANSFORMS: Final = ("identity", "year", "month", "day", "hour", "bucket", "truncate")


@dataclass(frozen=True, slots=True)
class _Files:
    """Files of one snapshot in order; each file is a manifest and an index in the manifest."""

    snapshot: SnapshotFiles
    manifests: Sequence[ManifestFiles]
    order: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, snapshot: SnapshotFiles, *, is_initial: bool) -> _Files:
        """Return all live files of a snapshot, or the files added by the snapshot."""
        # The oldest manifest first; that order is kept for files without a sequence.
        manifests = list(snapshot.data() if is_initial else snapshot.added())[::-1]
        places = [(m, i) for m, files in enumerate(manifests) for i in range(len(files))]
        places.sort(key=lambda place: manifests[place[0]].sequences[place[1]])
        return cls(snapshot, manifests, places)

    def row_counts(self) -> list[int]:
        return [self.manifests[m].row_counts[i] for m, i in self.order]


def open_source_table(catalog: LakeCatalog, name: str) -> SourceTable:
    """Open an Iceberg table as it is now; raises `TableNotFoundError` if there is none."""
    table = open_table(catalog, name)
    if table is None:
        raise TableNotFoundError(
            f"catalog '{catalog.name}' has no Iceberg table '{name}'; one is made by the first"
            " tiering round of a Streamhouse table, or by any other engine"
        )
    return SourceTable(table, lake_file_properties(catalog.properties))


class SourceTable:
    """An Iceberg table at one state of the table's metadata."""

    def __init__(self, table: OpenedTable, file_properties: Mapping[str, str]) -> None:
        self.file_properties = file_properties
        """How a task opens the files."""
        self._name = table.name
        self._table = table
        self.uuid = table.uuid
        self.snapshot_id = table.snapshot_id
        self.format_version = table.format_version

    # -- what it is ----------------------------------------------------------------------------

    def schema(self, *, columns: Collection[str] | None) -> Schema:
        """Return the columns that can be read; raises `UnsupportedError` for one of `columns`
        (None: all) that cannot. Columns with names of ours are not shown.
        """
        readable, refused = self._table.readable_columns()
        names = None if columns is None else {name.lower() for name in columns}
        for name, why in refused.items():
            is_shown = name.lower() not in RESERVED_COLUMNS
            if is_shown and (names is None or name.lower() in names):
                raise UnsupportedError(
                    f"Iceberg table '{self._name}': column '{name}' cannot be read: {why}; leave it"
                    " out with option 'columns'"
                )
        if not readable:
            raise InvalidSchemaError(f"Iceberg table '{self._name}' has no columns to read")
        return Schema(tuple(readable))

    def whole_schema(self) -> Schema:
        """Return all columns; raises `UnsupportedError` for a column of an unreadable type."""
        for name, why in self._table.readable_columns()[1].items():
            raise UnsupportedError(
                f"Iceberg table '{self._name}': column '{name}' cannot be read: {why}; an import"
                " takes every column: rename or drop it in the Iceberg table"
            )
        return self.schema(columns=None)

    def partitioning(self) -> tuple[list[str], list[str]]:
        """Return the partition fields in the users' notation, and the fields without a notation."""
        fields, refused = [], []
        for field in self._table.partition_fields():
            column, transform = field.column, field.transform
            kind, _, parameter = transform.partition("[")
            if transform == "void":
                continue
            if column is None or kind not in _TRANSFORMS:
                refused.append(f"{transform} ({field.name})")
            elif kind == "identity":
                fields.append(f"`{column}`" if "(" in column else column)
            elif parameter:
                fields.append(f"{kind}({parameter.rstrip(']')}, {column})")
            else:
                fields.append(f"{kind}({column})")
        return fields, refused

    # -- positions -----------------------------------------------------------------------------

    def start(self, snapshot_id: int | None) -> AppendPosition:
        """Return the position before the first row of a snapshot; None: of an empty table."""
        count = 0 if snapshot_id is None else len(self._files(snapshot_id, is_initial=True).order)
        return AppendPosition(
            table_uuid=self.uuid,
            snapshot_id=snapshot_id,
            sequence=self._table.last_sequence_number
            if snapshot_id is None
            else self.sequence(snapshot_id),
            is_initial=True,
            file_count=count,
        )

    def appended(self, snapshot_id: int, *, skipped: Collection[str] = ()) -> AppendPosition:
        """Return the position before the files appended by a snapshot, behind all earlier files."""
        snapshot = self._snapshot(snapshot_id)
        return AppendPosition(
            table_uuid=self.uuid,
            snapshot_id=snapshot_id,
            sequence=snapshot.sequence_number,
            is_initial=False,
            file_count=len(self._appended_rows(snapshot, skipped)),
        )

    def unread(
        self, position: AppendPosition, *, until: int | None, skipped: Collection[str] = ()
    ) -> Iterator[tuple[AppendPosition, list[int]]]:
        """Yield the unread rest of each snapshot after `position`, up to and with the snapshot
        `until`: a start, and the row count of each following file.

        `skipped` names the options that pass over snapshots with overwritten or deleted rows;
        without the options, such a snapshot raises `UnsupportedError`. Raises
        `SnapshotNotFoundError` when a snapshot is gone.
        """
        if not position.is_done:
            yield position, self._rest(position)
        for snapshot in self._after(position, until=until):
            counts = self._appended_rows(snapshot, skipped)
            next_position = AppendPosition(
                table_uuid=self.uuid,
                snapshot_id=snapshot.snapshot_id,
                sequence=snapshot.sequence_number,
                is_initial=False,
                file_count=len(counts),
            )
            yield next_position, counts

    def files(
        self,
        first: AppendPosition,
        last: AppendPosition,
        schema: Schema,
        *,
        predicate: Predicate | None,
        skipped: Collection[str] = (),
    ) -> list[LakeFile]:
        """Return the files between two positions with possible rows of `predicate`, in order."""
        lake_files: list[LakeFile] = []
        for start, counts in self.unread(first, until=last.snapshot_id, skipped=skipped):
            end = start.files_read + len(counts)
            if start.snapshot_id == last.snapshot_id and start.is_initial == last.is_initial:
                end = last.files_read
            if start.files_read < end:
                with metadata_errors(self._name):
                    lake_files += self._planned(start, end, schema, predicate)
        return lake_files

    def sequence(self, snapshot_id: int) -> int:
        """Return a snapshot's sequence number."""
        return self._snapshot(snapshot_id).sequence_number

    def parent(self, snapshot_id: int) -> int | None:
        """Return the parent of a snapshot, if known; the parent may be expired."""
        return self._snapshot(snapshot_id).parent_id

    def ancestors(self) -> list[int]:
        """Return the current snapshot and its ancestors, as far as they still exist."""
        return [snapshot.snapshot_id for snapshot in self._table.lineage(self.snapshot_id)]

    # -- snapshots -----------------------------------------------------------------------------

    def _after(self, position: AppendPosition, *, until: int | None) -> list[SnapshotInfo]:
        """Return the snapshots after a position's, up to `until`, oldest first."""
        if position.snapshot_id == until:
            return []
        snapshots: list[SnapshotInfo] = []
        for snapshot in self._table.lineage(until):
            snapshots.append(snapshot)
            if self._is_next(snapshot, position):
                return snapshots[::-1]
        last_id = position.snapshot_id
        if last_id is not None and self._table.snapshot(last_id) is not None:
            raise UnsupportedError(
                f"Iceberg table '{self._name}': its current snapshot {until} does not come from"
                f" snapshot {last_id}, up to which rows were read: it was rolled back, or snapshots"
                " in between were expired; start anew"
            )
        raise SnapshotNotFoundError(
            f"Iceberg table '{self._name}': snapshots after {last_id or 'its creation'} were"
            " expired before their rows were read; start anew, with the rows of the current"
            " snapshot"
        )

    def _is_next(self, snapshot: SnapshotInfo, position: AppendPosition) -> bool:
        """Whether a snapshot comes right after a position's, which may be gone."""
        if snapshot.parent_id is not None:
            return snapshot.parent_id == position.snapshot_id
        # The first snapshot, or one whose parent some library has forgotten with the parent.
        if self.format_version > 1:
            return snapshot.sequence_number == position.sequence + 1
        counts = snapshot.properties
        is_first = counts.get("total-records", "") == counts.get("added-records")
        return position.snapshot_id is None and is_first

    def _snapshot(self, snapshot_id: int | None) -> SnapshotInfo:
        snapshot = None if snapshot_id is None else self._table.snapshot(snapshot_id)
        if snapshot is None:
            raise SnapshotNotFoundError(
                f"Iceberg table '{self._name}' has no snapshot {snapshot_id}: it never existed, or"
                " was expired before all its rows were read; start anew"
            )
        return snapshot

    def _appended_rows(self, snapshot: SnapshotInfo, skipped: Collection[str]) -> list[int]:
        operation = snapshot.operation
        if operation == _REPLACE:
            # The same rows in other files.
            return []
        option = None if operation is None else _SKIPPED_BY.get(operation)
        if option is not None and option not in skipped:
            raise UnsupportedError(
                f"Iceberg table '{self._name}': snapshot {snapshot.snapshot_id} is not an append:"
                f" it {'deletes' if operation == _DELETE else 'overwrites'} rows, which a"
                f" stream of appends cannot say; set option '{option}' to 'true' to pass over such"
                " snapshots (also over rows they add)"
            )
        if option is not None:
            return []
        return self._files(snapshot.snapshot_id, is_initial=False).row_counts()

    # -- files ---------------------------------------------------------------------------------

    def _rest(self, position: AppendPosition) -> list[int]:
        files = self._files(position.snapshot_id, is_initial=position.is_initial)
        if len(files.order) != position.file_count:
            raise SnapshotNotFoundError(
                f"Iceberg table '{self._name}': snapshot {position.snapshot_id} has"
                f" {len(files.order)} files, not the {position.file_count} that were seen before"
            )
        return files.row_counts()[position.files_read :]

    def _files(self, snapshot_id: int | None, *, is_initial: bool) -> _Files:
        snapshot = self._snapshot(snapshot_id)
        with metadata_errors(self._name):
            return _Files.of(self._table.files(snapshot.snapshot_id), is_initial=is_initial)

    def _planned(
        self, start: AppendPosition, end: int, schema: Schema, predicate: Predicate | None
    ) -> list[LakeFile]:
        """Return the files from a position up to file `end` of the same snapshot."""
        files = self._files(start.snapshot_id, is_initial=start.is_initial)
        field_ids = {column.name: column.id for column in schema.columns}
        planner = FilePlanner(self._table, schema, LakeQuery(predicate=predicate), field_ids)
        # What an append adds, nothing has deleted yet.
        deletes = files.snapshot.deletes() if start.is_initial else DeleteIndex(())
        window = files.order[start.files_read : end]
        by_path: dict[str, LakeFile] = {}
        for number, manifest in enumerate(files.manifests):
            indexes = {index for m, index in window if m == number}
            if indexes:
                chosen = [index for index in planner.select(manifest) if index in indexes]
                by_path |= {f.path: f for f in planner.lake_files(manifest, chosen, deletes)}
        paths = (files.manifests[m].paths[i] for m, i in window)
        return [by_path[path] for path in paths if path in by_path]
