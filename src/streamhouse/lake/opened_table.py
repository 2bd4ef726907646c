"""Any table of a lake catalog, opened for reading: the readers' entry, with plain values.

A table is opened at a fixed state of its metadata. Objects of the Iceberg library stay inside
`lake/`. Readers write nothing, so catalogs are kept for the life of a process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
from pyiceberg.manifest import ManifestContent
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.transforms import IdentityTransform

from streamhouse.core.errors import CorruptDataError
from streamhouse.core.model.lake.facts import LakeCatalog, LakeRole
from streamhouse.core.model.schema import Column
from streamhouse.core.model.table import TableInfo
from streamhouse.core.secret_sources import withheld_explained
from streamhouse.lake.catalogs._lake_io import ReadOnlyLakeIO, with_file_io
from streamhouse.lake.catalogs.guarded_catalog import guarded
from streamhouse.lake.catalogs.rest_catalog import with_rest_catalog
from streamhouse.lake.files.name_mapping import NameMapping
from streamhouse.lake.iceberg_errors import catalog_errors
from streamhouse.lake.snapshots._coverage import (
    CoveredOffsets,
    ancestors_of,
    covered_offsets,
    facts_of,
    role_of,
)
from streamhouse.lake.snapshots._manifests import manifests_of
from streamhouse.lake.snapshots._outside_changes import (
    outside_problem,
    rows_stay_because,
    was_changed_outside,
)
from streamhouse.lake.snapshots._partition_filter import PartitionFilter
from streamhouse.lake.snapshots.expressions import Expression
from streamhouse.lake.snapshots.live_files import (
    DeleteEntry,
    DeleteIndex,
    ManifestFiles,
    added_files,
    data_files,
    delete_files,
)
from streamhouse.lake.tables._column_types import name_mapping_of, readable_columns
from streamhouse.lake.tables._partition_labels import partition_labels

__all__ = ["OpenedTable", "SnapshotFiles", "SnapshotInfo", "load_table", "open_table"]

_lock: Final = threading.Lock()
_catalogs: Final[dict[tuple[str, tuple[tuple[str, str], ...]], Catalog]] = {}


def open_table(catalog: LakeCatalog, name: str) -> OpenedTable | None:
    """Open the current state of a table (`database.table`); None if the catalog lacks the table."""
    table = load_table(catalog, name)
    return None if table is None else OpenedTable(name, table)


def load_table(catalog: LakeCatalog, name: str) -> Table | None:
    """Return the library's own object of a table, for modules that import the library."""
    key = (catalog.name, tuple(sorted(catalog.properties.items())))
    with withheld_explained(catalog.properties), catalog_errors(f"open lake table '{name}'"):
        with _lock:
            if key not in _catalogs:
                _catalogs[key] = _load_catalog(catalog)
            opened = _catalogs[key]
        try:
            return opened.load_table(name)
        except (NoSuchNamespaceError, NoSuchTableError):
            return None


def _load_catalog(catalog: LakeCatalog) -> Catalog:
    properties = with_file_io(dict(catalog.properties), ReadOnlyLakeIO)
    opened = load_catalog(catalog.name, **with_rest_catalog(properties))
    return guarded(opened, catalog.properties)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotInfo:
    """A snapshot as its table's metadata has it; `operation` is Iceberg's word."""

    snapshot_id: int
    parent_id: int | None
    sequence_number: int
    committed_at_ms: int
    operation: str | None
    properties: Mapping[str, str]

    @classmethod
    def of(cls, snapshot: Snapshot) -> SnapshotInfo:
        """Return the plain form of a snapshot."""
        summary = snapshot.summary
        return cls(
            snapshot_id=snapshot.snapshot_id,
            parent_id=snapshot.parent_snapshot_id,
            sequence_number=snapshot.sequence_number or 0,
            committed_at_ms=snapshot.timestamp_ms,
            operation=None if summary is None else str(summary.operation.value),
            properties={} if summary is None else summary.additional_properties,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionFieldInfo:
    """A field of the partition spec; `column` is None where it is none of the table's any more."""

    name: str
    column: str | None
    transform: str


class OpenedTable:
    """A lake table at a fixed state of its metadata."""

    def __init__(self, name: str, table: Table) -> None:
        metadata = table.metadata
        self.name = name
        self.uuid = str(metadata.table_uuid)
        self.format_version = int(metadata.format_version)
        self.snapshot_id: int | None = metadata.current_snapshot_id
        self.last_sequence_number = int(getattr(metadata, "last_sequence_number", 0))
        self._table = table
        self._metadata = metadata
        # pyiceberg looks for an id from the first snapshot on, each time.
        self._by_id = {snapshot.snapshot_id: snapshot for snapshot in metadata.snapshots}

    # -- snapshots -----------------------------------------------------------------------------

    def snapshots(self) -> list[SnapshotInfo]:
        """Return the snapshots that still exist, oldest first."""
        return [SnapshotInfo.of(snapshot) for snapshot in self._metadata.snapshots]

    def snapshot(self, snapshot_id: int) -> SnapshotInfo | None:
        """Return a snapshot, None if it does not exist, or no more."""
        snapshot = self._by_id.get(snapshot_id)
        return None if snapshot is None else SnapshotInfo.of(snapshot)

    def lineage(self, snapshot_id: int | None) -> Iterator[SnapshotInfo]:
        """Yield a snapshot and its ancestors, newest first, as far as they exist."""
        while snapshot_id is not None and (snapshot := self.snapshot(snapshot_id)) is not None:
            yield snapshot
            snapshot_id = snapshot.parent_id

    def covered(
        self,
        table_id: int | None = None,
        *,
        role: LakeRole = LakeRole.ROWS,
        snapshot_id: int | None = None,
    ) -> CoveredOffsets | None:
        """Return the offsets of a Streamhouse table in a snapshot, by default the current snapshot.

        None if no round of the table (None: of any table) is in the snapshot.
        """
        snapshot = None if snapshot_id is None else self._by_id[snapshot_id]
        return covered_offsets(self._metadata, table_id=table_id, role=role, snapshot=snapshot)

    def may_have_other_rows(self, table: TableInfo, registered: int) -> bool:
        """Whether another engine, which may, committed to the rows after a snapshot."""
        role = role_of(self._metadata.properties)
        if self.snapshot_id == registered or rows_stay_because(table, role):
            return False
        for snapshot in ancestors_of(self._metadata):
            if snapshot.snapshot_id == registered:
                break
            if role.owner_property not in facts_of(snapshot).properties:
                return True
        return False

    def was_changed_outside(self, table: TableInfo) -> bool:
        """Whether another engine ever changed or deleted rows of the table."""
        role = role_of(self._metadata.properties)
        return was_changed_outside(self._metadata, table, role, self._table.io)

    def check_outside(self, table: TableInfo) -> None:
        """Raise `CorruptDataError` if another engine changed rows against the rules."""
        role = role_of(self._metadata.properties)
        problem = outside_problem(self.name, self._metadata, table, role, self._table.io)
        if problem:
            raise CorruptDataError(problem)

    # -- columns -------------------------------------------------------------------------------

    def field_ids(self) -> dict[str, int]:
        """Return the ids of the columns by name."""
        return {field.name: field.field_id for field in self._table.schema().fields}

    def name_mapping(self) -> NameMapping | None:
        """Return which field a column is that a file has without a field id.

        None: the one of its name.
        """
        return name_mapping_of(self._table)

    def misnamed_ids(self) -> set[int]:
        """Return the ids of columns with a former name missing in the name mapping.

        Files added under the former name now read otherwise than their bounds in manifests say.
        """
        mapping = self.name_mapping()
        named = {name: mapped.field_id for name, mapped in (mapping or {}).items()}
        return {
            field.field_id
            for schema in self._metadata.schemas
            for field in schema.fields
            if named and named.get(field.name) != field.field_id
        }

    def readable_columns(self) -> tuple[list[Column], dict[str, str]]:
        """Return the readable columns, and by name the reason for each unreadable column."""
        return readable_columns(self._table.schema(), self._metadata.schemas)

    def partition_fields(self) -> list[PartitionFieldInfo]:
        """Return the partition fields of new files."""
        names = {field.field_id: field.name for field in self._table.schema().fields}
        return [
            PartitionFieldInfo(
                name=field.name, column=names.get(field.source_id), transform=str(field.transform)
            )
            for field in self._table.spec().fields
        ]

    # -- files ---------------------------------------------------------------------------------

    def files(self, snapshot_id: int) -> SnapshotFiles:
        """Return the files of a snapshot, which exists."""
        return SnapshotFiles(self.name, self._table, self._by_id[snapshot_id])

    def partition_filter(self, expression: Expression) -> PartitionFilter:
        """Return a test for partitions with possible rows for the expression."""
        return PartitionFilter(self._table.specs(), self._table.schema(), expression)

    def partition_labels(self, files: ManifestFiles) -> list[str]:
        """Return the label of each of the partitions of a manifest: `day=2024-12-31`."""
        spec = self._table.specs()[files.spec_id]
        return partition_labels(spec, self._table.schema(), files.partitions)

    def partition_constants(self, files: ManifestFiles) -> list[dict[int, Any]]:
        """Return by column id the values that all rows of a partition have, of each partition."""
        spec = self._table.specs()[files.spec_id]
        return [
            {
                field.source_id: value
                for field, value in zip(spec.fields, partition, strict=True)
                if isinstance(field.transform, IdentityTransform)
            }
            for partition in files.partitions
        ]


class SnapshotFiles:
    """The files of a snapshot: its manifest list is read at once, its manifests when needed."""

    def __init__(self, name: str, table: Table, snapshot: Snapshot) -> None:
        self._name = name
        self._io = table.io
        self._snapshot_id = snapshot.snapshot_id
        # Lists begin with the newest manifest.
        self._manifests = manifests_of(table.io, snapshot)

    def data(self, partitions: PartitionFilter | None = None) -> Iterator[ManifestFiles]:
        """Yield the live data files, the newest manifest first.

        Manifests without a file in the `partitions` are left out.
        """
        for manifest in self._manifests:
            if manifest.content == ManifestContent.DATA and (
                partitions is None or partitions.may_match_manifest(manifest)
            ):
                yield data_files(self._io, manifest)

    def added(self) -> Iterator[ManifestFiles]:
        """Yield the data files that the snapshot itself has added, the newest manifest first."""
        for manifest in self._manifests:
            if (
                manifest.content == ManifestContent.DATA
                and manifest.added_snapshot_id == self._snapshot_id
            ):
                yield added_files(self._io, manifest)

    def deletes(self) -> DeleteIndex:
        """Return the position deletes; raises `UnsupportedError` for deletes of another kind."""
        return DeleteIndex(self._delete_entries())

    def size(self) -> tuple[int, int]:
        """Return the bytes of all files, files of deletes included, and the rows of data files."""
        data = list(self.data())
        delete_sizes = {e.deletes.path: e.deletes.file_bytes for e in self._delete_entries()}
        return (
            sum(delete_sizes.values()) + sum(sum(files.file_bytes) for files in data),
            sum(sum(files.row_counts) for files in data),
        )

    def _delete_entries(self) -> Iterator[DeleteEntry]:
        for manifest in self._manifests:
            if manifest.content == ManifestContent.DELETES:
                yield from delete_files(self._io, manifest, table=self._name)
