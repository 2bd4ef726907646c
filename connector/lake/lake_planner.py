"""Planning a read of the lake, on the driver only; beside lake_file_planner.py,
lake_manifests.py and iceberg_expression.py the connector's only door to the Iceberg library.

A plan is made on one snapshot. When the pinned snapshot was expired by somebody's maintenance, the
table's current one is read and cut at the pinned offsets: it holds the same rows of a log table.
Catalogs are kept per process.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
from pyiceberg.io import PY_IO_IMPL
from pyiceberg.schema import Schema as IcebergSchema
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

from streamhouse.connector.lake.lake_file_planner import FilePlanner
from streamhouse.connector.lake.lake_pruning import (
    LakeQuery,
)
from streamhouse.connector.scan.scan import LakeFile
from streamhouse.storage_service.errors import (
    CorruptDataError,
    SnapshotNotFoundError,
)
from streamhouse.storage_service.lake.catalogs.guarded_catalog import guarded
from streamhouse.storage_service.lake.catalogs.rest_catalog import with_rest_catalog
from streamhouse.storage_service.lake.errors import catalog_errors, metadata_errors
from streamhouse.storage_service.lake.files.pyarrow_io import READ_ONLY_IO, SCHEMES
from streamhouse.storage_service.lake.snapshots.ancestors import ancestors_of, facts_of
from streamhouse.storage_service.model.lake import (
    TIERED_OFFSETS_PROPERTY,
    LakeCatalog,
    LakeRole,
    tiered_offsets_from_property,
)
from streamhouse.storage_service.model.lake_coverage import (
    CoveredOffsets,
    covered_offsets,
    offsets_said_by,
)
from streamhouse.storage_service.model.offsets import OffsetRange
from streamhouse.storage_service.model.schema import (
    BUCKET_COLUMN,
    CHANGE_TYPE_COLUMN,
    OFFSET_COLUMN,
    TIMESTAMP_COLUMN,
    Schema,
)
from streamhouse.storage_service.model.secret_sources import withheld_explained

__all__ = ["LakeTable", "load_table", "older_lake", "open_lake_table"]

_lock: Final = threading.Lock()
_catalogs: Final[dict[tuple[str, tuple[tuple[str, str], ...]], Catalog]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeFiles:
    """The files one read needs, and the field ids of the table's columns in them.

    `read_bytes` is about what the read decodes of the files.
    """

    snapshot_id: int
    files: tuple[LakeFile, ...]
    field_ids: Mapping[str, int | None]
    read_bytes: int


def open_lake_table(
    catalog: LakeCatalog, table: str, *, table_uuid: str | None = None
) -> LakeTable:
    """Open the lake table of `table` (`database.table`) as it is now.

    Raises `SnapshotNotFoundError` when the catalog has no such table, or another one than
    `table_uuid`.
    """
    found = load_table(catalog, table)
    if found is None:
        raise SnapshotNotFoundError(
            f"table '{table}' has no lake table in catalog '{catalog.name}'; was it dropped there?"
        )
    if table_uuid is not None and str(found.metadata.table_uuid) != table_uuid:
        raise SnapshotNotFoundError(
            f"table '{table}': the lake table in catalog '{catalog.name}' is another one"
            f" ({found.metadata.table_uuid}) than was tiered to ({table_uuid})"
        )
    return LakeTable(table, found)


def load_table(catalog: LakeCatalog, table: str) -> Table | None:
    """Return an Iceberg table as it is now, None if the catalog has none of that name."""
    key = (catalog.name, tuple(sorted(catalog.properties.items())))
    with withheld_explained(catalog.properties), catalog_errors(f"open lake table '{table}'"):
        with _lock:
            if key not in _catalogs:
                _catalogs[key] = _load_catalog(catalog)
            opened = _catalogs[key]
        try:
            return opened.load_table(table)
        except (NoSuchNamespaceError, NoSuchTableError):
            return None


def _load_catalog(catalog: LakeCatalog) -> Catalog:
    properties = dict(catalog.properties)
    scheme = urlsplit(properties.get("warehouse", "")).scheme
    if scheme in SCHEMES and PY_IO_IMPL not in properties:
        properties[PY_IO_IMPL] = READ_ONLY_IO
    opened = load_catalog(catalog.name, **with_rest_catalog(properties))
    return guarded(opened, catalog.properties)


def older_lake(name: str, bucket: int, *, end: int, tiered_end: int) -> CorruptDataError:
    """Return the error for a lake table that ends before what was tiered to it."""
    return CorruptDataError(
        f"lake table '{name}' has bucket {bucket} up to offset {end}, but rows up to {tiered_end}"
        " were tiered to it: its catalog or metadata is older than the service's data directory;"
        " restore the newer one"
    )


class LakeTable:
    """One lake table at one state of its metadata."""

    def __init__(self, name: str, table: Table) -> None:
        self._name = name
        self._table = table

    def snapshot_ids(self) -> list[int]:
        """Return the ids of the snapshots that still exist, oldest first."""
        return [snapshot.snapshot_id for snapshot in self._table.metadata.snapshots]

    def tiered_offsets(self, snapshot_id: int) -> dict[int, int]:
        """Return the end offsets a snapshot covers: those of its newest ancestor that has them."""
        properties = self._properties(self._snapshot(snapshot_id))
        if properties is None:
            raise SnapshotNotFoundError(
                f"lake table '{self._name}': neither snapshot {snapshot_id} nor an ancestor of it"
                " was written by Streamhouse"
            )
        return tiered_offsets_from_property(properties[TIERED_OFFSETS_PROPERTY])

    def fingerprints(self, snapshot_id: int) -> dict[int, str]:
        """Return what a snapshot says of the log that the rows up to its offsets came from."""
        properties = self._properties(self._snapshot(snapshot_id)) or {}
        said = offsets_said_by(properties)
        return {} if said is None else dict(said.fingerprints)

    def histories(self, table_id: int, role: LakeRole) -> list[CoveredOffsets]:
        """Return what the current snapshot and those that it comes from say, newest first.

        Those of another owner, from before it was adopted, are left out.
        """
        said_by = (facts_of(snapshot).properties for snapshot in ancestors_of(self._table.metadata))
        found = (
            offsets_said_by(properties)
            for properties in said_by
            if properties.get(role.owner_property) == str(table_id)
        )
        return [said for said in found if said is not None]

    def covered(self, table_id: int, role: LakeRole) -> CoveredOffsets | None:
        """Return what the table as it is now covers; None if no round of that table is in it."""
        metadata = self._table.metadata
        return covered_offsets(
            (facts_of(snapshot) for snapshot in ancestors_of(metadata)),
            metadata.properties,
            is_owner=lambda properties: properties.get(role.owner_property) == str(table_id),
        )

    def _properties(self, snapshot: Snapshot | None) -> Mapping[str, str] | None:
        """Return what Streamhouse said of a snapshot, or of its newest ancestor that it wrote."""
        while snapshot is not None:
            properties = {} if snapshot.summary is None else snapshot.summary.additional_properties
            if TIERED_OFFSETS_PROPERTY in properties:
                return properties
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else self._table.snapshot_by_id(parent)
        return None

    def _has_all(self, snapshot: Snapshot, ranges: Mapping[int, OffsetRange]) -> bool:
        """Whether an overwrite has taken nothing of `ranges` out of a snapshot.

        Raises `CorruptDataError` if the snapshot does not reach their ends: it is older.
        """
        covered = covered_offsets(
            (facts_of(found) for found in ancestors_of(self._table.metadata, snapshot)),
            self._table.properties,
            # The table is known by its uuid.
            is_owner=lambda _: True,
        )
        for bucket, wanted in ranges.items():
            end = 0 if covered is None else covered.tiered_offsets.get(bucket, 0)
            if end < wanted.end:
                raise older_lake(self._name, bucket, end=end, tiered_end=wanted.end)
        truncated = {} if covered is None else covered.truncated_offsets
        return all(truncated.get(b, 0) <= wanted.start for b, wanted in ranges.items())

    def snapshots(self) -> list[dict[str, Any]]:
        """Return one row per snapshot for `table$snapshots`, oldest first."""
        current = self._table.metadata.current_snapshot_id
        rows = []
        for snapshot in self._table.metadata.snapshots:
            summary = snapshot.summary
            properties = {} if summary is None else summary.additional_properties
            rows.append(
                {
                    "snapshot_id": snapshot.snapshot_id,
                    "parent_snapshot_id": snapshot.parent_snapshot_id,
                    "committed_at_ms": snapshot.timestamp_ms,
                    "operation": None if summary is None else str(summary.operation.value),
                    "is_current": snapshot.snapshot_id == current,
                    "tiered_offsets": properties.get(TIERED_OFFSETS_PROPERTY),
                    "properties": {str(k): str(v) for k, v in properties.items()},
                }
            )
        return rows

    def plan(
        self,
        schema: Schema,
        query: LakeQuery,
        *,
        snapshot_id: int,
        allow_successor: bool,
        successor_covers: Mapping[int, int] | None = None,
        own_ids: Container[int] = (),
    ) -> LakeFiles:
        """Return the files of a snapshot that may hold rows of `query`.

        Args:
            schema: the table's own schema; its columns are looked up in the lake's.
            allow_successor: when the snapshot is gone, plan on the current one, unless that does
                not have all rows of the ranges any more, because the table was overwritten.
            successor_covers: but only if it covers exactly these offsets.
            own_ids: ids of all columns the table ever had.
        """
        snapshot = self._table.snapshot_by_id(snapshot_id)
        if snapshot is None and allow_successor:
            snapshot = self._table.current_snapshot()
            if snapshot is not None and not self._has_all(snapshot, query.ranges or {}):
                snapshot = None
            if snapshot is not None and successor_covers is not None:
                snapshot = snapshot if self._covers(snapshot, successor_covers) else None
        if snapshot is None:
            snapshot = self._snapshot(snapshot_id)
        lake_schema = self._table.schema()
        field_ids = self._field_ids(schema, lake_schema, own_ids)
        planner = FilePlanner(self._name, self._table, lake_schema, schema, query, field_ids)
        with metadata_errors(self._name):
            files = tuple(planner.files(snapshot))
        return LakeFiles(
            snapshot_id=snapshot.snapshot_id,
            files=files,
            field_ids=field_ids,
            read_bytes=planner.read_bytes,
        )

    def _covers(self, snapshot: Snapshot, offsets: Mapping[int, int]) -> bool:
        try:
            return self.tiered_offsets(snapshot.snapshot_id) == dict(offsets)
        except SnapshotNotFoundError:
            return False

    def _snapshot(self, snapshot_id: int) -> Snapshot:
        snapshot = self._table.snapshot_by_id(snapshot_id)
        if snapshot is None:
            raise SnapshotNotFoundError(
                f"lake table '{self._name}' has no snapshot {snapshot_id}: it never existed or was"
                f" expired; see '{self._name}$snapshots'"
            )
        return snapshot

    def _field_ids(
        self, schema: Schema, lake: IcebergSchema, own_ids: Container[int]
    ) -> dict[str, int | None]:
        """Return each column's field id: by its id for life, else by name, else None."""
        ids = {f.field_id: f.name for f in lake.fields}
        names = {f.name: f.field_id for f in lake.fields}
        found: dict[str, int | None] = {}
        for column in schema.columns:
            is_ours = column.column_id in ids and not ids[column.column_id].startswith("__")
            by_name = names.get(column.name)
            found[column.name] = column.column_id if is_ours else by_name
            if not is_ours and by_name in own_ids:
                # That is another column of ours, which had the name before the lake heard of it.
                found[column.name] = None
        for name in (BUCKET_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN):
            if name not in names:
                raise CorruptDataError(
                    f"lake table '{self._name}' has no column '{name}'; it is not a Streamhouse"
                    " table any more"
                )
            found[name] = names[name]
        # Rows in the lake are what they are; only a full history says how they came to be.
        found[CHANGE_TYPE_COLUMN] = names.get(CHANGE_TYPE_COLUMN)
        return found
