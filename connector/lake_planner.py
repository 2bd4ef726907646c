"""Planning a read of the lake, on the driver only; beside lake_manifests.py and
predicate_iceberg.py the connector's only door to the Iceberg library.

A plan is made on one snapshot. When the pinned snapshot was expired by somebody's maintenance, the
table's current one is read and cut at the pinned offsets: it holds the same rows of a log table.
Catalogs are kept per process; what manifests say is pruned in lake_pruning.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
from pyiceberg.expressions.visitors import (
    expression_evaluator,
    inclusive_projection,
    manifest_evaluator,
)
from pyiceberg.io import PY_IO_IMPL
from pyiceberg.manifest import ManifestContent, ManifestFile
from pyiceberg.schema import Schema as IcebergSchema
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import Record

from streamhouse.connector.lake_io import READ_ONLY_IO, SCHEMES
from streamhouse.connector.lake_manifests import DeleteIndex, data_files, delete_files
from streamhouse.connector.lake_pruning import (
    LakeQuery,
    ManifestFiles,
    SystemFields,
    estimated_bytes,
    select_files,
)
from streamhouse.connector.predicate_iceberg import to_iceberg_expression
from streamhouse.connector.scan import DeleteFile, LakeFile
from streamhouse.storage_service.errors import (
    CorruptDataError,
    SnapshotNotFoundError,
    UnsupportedError,
)
from streamhouse.storage_service.model.lake import (
    LAKE_CHANGE_TYPE_FIELD,
    LAKE_SYSTEM_FIELDS,
    TIERED_OFFSETS_PROPERTY,
    LakeCatalog,
    tiered_offsets_from_property,
)
from streamhouse.storage_service.model.schema import (
    BUCKET_COLUMN,
    CHANGE_TYPE_COLUMN,
    OFFSET_COLUMN,
    TIMESTAMP_COLUMN,
    Schema,
)

__all__ = ["FilePlanner", "LakeTable", "load_table", "open_lake_table"]

_lock: Final = threading.Lock()
_catalogs: Final[dict[tuple[str, tuple[tuple[str, str], ...]], Catalog]] = {}

PartitionTest = Callable[[tuple[Any, ...]], bool]


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
    return load_catalog(catalog.name, **properties)


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
        snapshot: Snapshot | None = self._snapshot(snapshot_id)
        while snapshot is not None:
            properties = {} if snapshot.summary is None else snapshot.summary.additional_properties
            if (value := properties.get(TIERED_OFFSETS_PROPERTY)) is not None:
                return tiered_offsets_from_property(value)
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else self._table.snapshot_by_id(parent)
        raise SnapshotNotFoundError(
            f"lake table '{self._name}': neither snapshot {snapshot_id} nor an ancestor of it was"
            " written by Streamhouse"
        )

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
            allow_successor: when the snapshot is gone, plan on the current one.
            successor_covers: but only if it covers exactly these offsets.
            own_ids: ids of all columns the table ever had.
        """
        snapshot = self._table.snapshot_by_id(snapshot_id)
        if snapshot is None and allow_successor:
            snapshot = self._table.current_snapshot()
            if snapshot is not None and successor_covers is not None:
                snapshot = snapshot if self._covers(snapshot, successor_covers) else None
        if snapshot is None:
            snapshot = self._snapshot(snapshot_id)
        lake_schema = self._table.schema()
        field_ids = self._field_ids(schema, lake_schema, own_ids)
        planner = FilePlanner(self._name, self._table, lake_schema, schema, query, field_ids)
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


class FilePlanner:
    """One plan over the manifests of one snapshot.

    `field_ids` finds the columns of `schema` in the lake's; that of a table which is not
    Streamhouse's has no system columns.
    """

    def __init__(
        self,
        name: str,
        table: Table,
        lake_schema: IcebergSchema,
        schema: Schema,
        query: LakeQuery,
        field_ids: Mapping[str, int | None],
    ) -> None:
        self.read_bytes = 0
        self._name = name
        self._table = table
        self._lake_schema = lake_schema
        self._query = query
        self._system = SystemFields(
            bucket=field_ids.get(BUCKET_COLUMN) or 0,
            offset=field_ids.get(OFFSET_COLUMN) or 0,
            timestamp=field_ids.get(TIMESTAMP_COLUMN) or 0,
        )
        wanted = () if query.predicate is None else query.predicate.columns
        known = (*schema.to_arrow(), LAKE_CHANGE_TYPE_FIELD, *LAKE_SYSTEM_FIELDS)
        types = {field.name: field.type for field in known}
        self._columns = [
            (name, field_id, types[name])
            for name in wanted
            if (field_id := field_ids[name]) is not None
        ]
        # Partitions are tested by name: of a column that the lake knows under another one, nothing
        # is known.
        by_name = {field.name: field.field_id for field in lake_schema.fields}
        self._names_agree = all(by_name.get(name) == field_ids[name] for name in wanted)
        self._tests: dict[int, tuple[Callable[[ManifestFile], bool], PartitionTest] | None] = {}

    def files(self, snapshot: Snapshot) -> Iterator[LakeFile]:
        """Yield the snapshot's files that may hold wanted rows, with the deletes of each."""
        manifests = snapshot.manifests(self._table.io)
        deletes = self.deletes_of(manifests)
        for manifest in manifests:
            if manifest.content != ManifestContent.DATA:
                continue
            test = self._partition_test(manifest.partition_spec_id)
            if test is not None and not test[0](manifest):
                continue
            files = data_files(self._table.io, manifest)
            indexes = self.select(files)
            self.read_bytes += estimated_bytes(files, indexes, self._query, columns=self._columns)
            yield from self.lake_files(files, indexes, deletes)

    def deletes_of(self, manifests: Iterable[ManifestFile]) -> DeleteIndex:
        """Return the position deletes of a snapshot's manifests."""
        return DeleteIndex(
            entry
            for manifest in manifests
            if manifest.content == ManifestContent.DELETES
            for entry in delete_files(self._table.io, manifest, table=self._name)
        )

    def select(self, files: ManifestFiles) -> list[int]:
        """Return the indexes of the files that may hold wanted rows."""
        test = self._partition_test(files.spec_id)
        chosen: list[int] = select_files(
            files,
            self._query,
            system=self._system,
            columns=self._columns,
            partition_may_match=None if test is None else test[1],
        ).tolist()
        return chosen

    def _partition_test(
        self, spec_id: int
    ) -> tuple[Callable[[ManifestFile], bool], PartitionTest] | None:
        """Return tests of a manifest's summary and of a partition, or None when nothing prunes."""
        if self._query.predicate is None:
            return None
        if spec_id not in self._tests:
            self._tests[spec_id] = self._make_partition_test(spec_id)
        return self._tests[spec_id]

    def _make_partition_test(
        self, spec_id: int
    ) -> tuple[Callable[[ManifestFile], bool], PartitionTest] | None:
        assert self._query.predicate is not None
        if not self._names_agree:
            return None
        spec = self._table.specs()[spec_id]
        try:
            projected = inclusive_projection(self._lake_schema, spec)(
                to_iceberg_expression(self._query.predicate)
            )
        except ValueError:
            # A column that the lake does not have yet cannot be bound; its rows are filtered later.
            return None
        partition_schema = IcebergSchema(*spec.partition_type(self._lake_schema).fields)
        matches = expression_evaluator(partition_schema, projected, case_sensitive=True)
        return (
            manifest_evaluator(spec, self._lake_schema, projected),
            lambda partition: matches(Record(*partition)),
        )

    def lake_files(
        self, files: ManifestFiles, chosen: Sequence[int], deletes: DeleteIndex
    ) -> Iterator[LakeFile]:
        """Yield the chosen files in that order, with the deletes of each."""
        spec = self._table.specs()[files.spec_id]
        buckets = files.integer_bounds(self._system.bucket)
        offsets = files.integer_bounds(self._system.offset)
        times = files.integer_bounds(self._system.timestamp)
        labels = [spec.partition_to_path(Record(*p), self._lake_schema) for p in files.partitions]
        constants = [
            {
                field.source_id: value
                for field, value in zip(spec.fields, partition, strict=True)
                if isinstance(field.transform, IdentityTransform)
            }
            for partition in files.partitions
        ]
        for i in chosen:
            if files.formats[i] != "PARQUET":
                raise UnsupportedError(
                    f"lake table '{self._name}': file '{files.paths[i]}' is {files.formats[i]};"
                    " Streamhouse reads Parquet only"
                )
            code = int(files.partition_codes[i])
            one_bucket = buckets.is_known[i] and buckets.lower[i] == buckets.upper[i]
            path = files.paths[i]
            ours = deletes.applying_to(path, files.sequences[i])
            yield LakeFile(
                path=path,
                file_bytes=files.file_bytes[i],
                row_count=files.row_counts[i],
                bucket=int(buckets.lower[i]) if one_bucket else None,
                offset_start=int(offsets.lower[i]) if offsets.is_known[i] else None,
                offset_end=int(offsets.upper[i]) + 1 if offsets.is_known[i] else None,
                timestamp_min_us=int(times.lower[i]) if times.is_known[i] else None,
                timestamp_max_us=int(times.upper[i]) if times.is_known[i] else None,
                row_group_starts=tuple(files.row_group_starts[i] or ()),
                deletes=tuple(DeleteFile(path=e.path, file_bytes=e.file_bytes) for e in ours),
                constants=constants[code],
                partition=labels[code],
            )
