"""Delete files as foreign engines write and commit them; stock pyiceberg can do neither."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import _dataframe_to_data_files
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriterV2,
)
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.update.snapshot import _OverwriteFiles, _SnapshotProducer
from pyiceberg.typedef import Record

__all__ = [
    "commit_compaction",
    "commit_delete_files",
    "commit_repeated_removals",
    "deletion_vector",
    "equality_delete_file",
    "position_delete_file",
]

_EXISTING = ManifestEntryStatus.EXISTING
_FIELD_ID = "PARQUET:field_id"
_PATH_ID, _POSITION_ID = 2147483546, 2147483545
# Iceberg Java finds these columns by their field ids only.
_DELETES = pa.schema(
    [
        pa.field("file_path", pa.string(), nullable=False, metadata={_FIELD_ID: str(_PATH_ID)}),
        pa.field("pos", pa.int64(), nullable=False, metadata={_FIELD_ID: str(_POSITION_ID)}),
    ]
)


def position_delete_file(
    table: Table,
    deleted: Sequence[tuple[str, int]],
    *,
    partition: Record,
    file_format: FileFormat = FileFormat.PARQUET,
) -> DataFile:
    """Write one file of position deletes: (data file's path, position) pairs.

    Of another `file_format` than Parquet it only says that it is.
    """
    rows = sorted(deleted)
    paths = [path for path, _ in rows]
    content = pa.table({"file_path": paths, "pos": [n for _, n in rows]}, schema=_DELETES)
    bounds = {
        "lower_bounds": {_PATH_ID: paths[0].encode(), _POSITION_ID: struct.pack("<q", 0)},
        "upper_bounds": {_PATH_ID: paths[-1].encode(), _POSITION_ID: struct.pack("<q", 2**40)},
    }
    kind = DataFileContent.POSITION_DELETES
    return _write(table, content, kind, partition, file_format=file_format, **bounds)


def equality_delete_file(table: Table, rows: pa.Table, *, partition: Record) -> DataFile:
    """Write one file of equality deletes on field 1."""
    return _write(table, rows, DataFileContent.EQUALITY_DELETES, partition, equality_ids=[1])


def deletion_vector(table: Table, data_path: str, *, offset: int, partition: Record) -> DataFile:
    """Return the record of a deletion vector (format version 3), of which there is no content."""
    file = DataFile.from_args(
        _table_format_version=3,
        content=DataFileContent.POSITION_DELETES,
        file_path=f"{table.location()}/data/vectors.puffin",
        file_format=FileFormat.PUFFIN,
        partition=partition,
        record_count=1,
        file_size_in_bytes=100,
        referenced_data_file=data_path,
        content_offset=offset,
        content_size_in_bytes=40,
    )
    file.spec_id = table.spec().spec_id
    return file


def _write(
    table: Table, content: pa.Table, kind: DataFileContent, partition: Record, **more: Any
) -> DataFile:
    uri = f"{table.location()}/data/{uuid.uuid4()}-deletes.parquet"
    path = Path(uri.removeprefix("file://"))
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(content, path)
    values: dict[str, Any] = dict.fromkeys(
        (
            "column_sizes",
            "value_counts",
            "null_value_counts",
            "nan_value_counts",
            "lower_bounds",
            "upper_bounds",
            "key_metadata",
            "split_offsets",
            "equality_ids",
            "sort_order_id",
        )
    )
    file = DataFile.from_args(
        content=kind,
        file_path=uri,
        partition=partition,
        record_count=content.num_rows,
        file_size_in_bytes=path.stat().st_size,
        **({"file_format": FileFormat.PARQUET} | values | more),
    )
    file.spec_id = table.spec().spec_id
    return file


class _DeleteManifestWriter(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


class _VectorManifestWriter(_DeleteManifestWriter):
    def _with_partition(self, format_version: Any) -> Schema:
        return super()._with_partition(3)


class _AddDeleteFiles(_SnapshotProducer["_AddDeleteFiles"]):
    """A snapshot that adds delete files and keeps everything else."""

    def __init__(self, transaction: Any, files: Sequence[DataFile]) -> None:
        super().__init__(
            operation=Operation.OVERWRITE, transaction=transaction, io=transaction._table.io
        )
        self._files = files

    def _manifests(self) -> list[ManifestFile]:
        metadata = self._transaction.table_metadata
        parent = metadata.current_snapshot()
        assert parent is not None
        are_vectors = any(file.file_format is FileFormat.PUFFIN for file in self._files)
        writer = (_VectorManifestWriter if are_vectors else _DeleteManifestWriter)(
            metadata.spec(),
            metadata.schema(),
            self.new_manifest_output(),
            self._snapshot_id,
            self._compression,
        )
        with writer:
            for file in self._files:
                writer.add_entry(
                    ManifestEntry.from_args(
                        status=ManifestEntryStatus.ADDED,
                        snapshot_id=self._snapshot_id,
                        sequence_number=None,
                        file_sequence_number=None,
                        data_file=file,
                    )
                )
        return [*parent.manifests(self._io), writer.to_manifest_file()]

    def _deleted_entries(self) -> list[ManifestEntry]:
        return []

    def _existing_manifests(self) -> list[ManifestFile]:
        return []


class _Rewrite(_OverwriteFiles):
    """The same rows in other files; the library itself commits no such snapshots."""

    def _summary(self, snapshot_properties: Any = None) -> Summary:
        return Summary(Operation.REPLACE)


class _CarryOn(_SnapshotProducer["_CarryOn"]):
    """A snapshot that says of files that they were there before, or were added by another one."""

    def __init__(
        self,
        transaction: Any,
        files: Sequence[DataFile],
        status: ManifestEntryStatus,
        added_by: int,
    ) -> None:
        super().__init__(
            operation=Operation.OVERWRITE, transaction=transaction, io=transaction._table.io
        )
        self._files = files
        self._status = status
        self._added_by = added_by or self._snapshot_id

    def _manifests(self) -> list[ManifestFile]:
        metadata = self._transaction.table_metadata
        parent = metadata.current_snapshot()
        assert parent is not None
        writer = ManifestWriterV2(
            metadata.spec(),
            metadata.schema(),
            self.new_manifest_output(),
            self._added_by,
            self._compression,
        )
        with writer:
            for file in self._files:
                writer.add_entry(
                    ManifestEntry.from_args(
                        status=self._status,
                        snapshot_id=self._added_by,
                        sequence_number=1,
                        file_sequence_number=1,
                        data_file=file,
                    )
                )
        manifest = writer.to_manifest_file()
        manifest.sequence_number = manifest.min_sequence_number = 1
        return [*parent.manifests(self._io), manifest]

    def _deleted_entries(self) -> list[ManifestEntry]:
        return []

    def _existing_manifests(self) -> list[ManifestFile]:
        return []


class _RepeatRemovals(_SnapshotProducer["_RepeatRemovals"]):
    """A snapshot that writes manifests with entries of removed files again, in its own name."""

    def __init__(self, transaction: Any, added: Sequence[DataFile]) -> None:
        super().__init__(
            operation=Operation.OVERWRITE, transaction=transaction, io=transaction._table.io
        )
        for file in added:
            self.append_data_file(file)

    def _existing_manifests(self) -> list[ManifestFile]:
        parent = self._transaction.table_metadata.current_snapshot()
        assert parent is not None
        return [
            self._again(manifest) if manifest.deleted_files_count else manifest
            for manifest in parent.manifests(self._io)
        ]

    def _again(self, manifest: ManifestFile) -> ManifestFile:
        metadata = self._transaction.table_metadata
        with ManifestWriterV2(
            metadata.specs()[manifest.partition_spec_id],
            metadata.schema(),
            self.new_manifest_output(),
            self._snapshot_id,
            self._compression,
        ) as writer:
            for entry in manifest.fetch_manifest_entry(self._io, discard_deleted=False):
                is_removed = entry.status is ManifestEntryStatus.DELETED
                entry.status = ManifestEntryStatus.DELETED if is_removed else _EXISTING
                entry.snapshot_id = self._snapshot_id
                writer.add_entry(entry)
        return writer.to_manifest_file()

    def _deleted_entries(self) -> list[ManifestEntry]:
        return []


class _LeaveOut(_SnapshotProducer["_LeaveOut"]):
    """A snapshot of no manifests, which says of no file that it goes."""

    def _manifests(self) -> list[ManifestFile]:
        return []

    def _summary(self, snapshot_properties: Any = None) -> Summary:
        return Summary(self._operation)

    def _deleted_entries(self) -> list[ManifestEntry]:
        return []

    def _existing_manifests(self) -> list[ManifestFile]:
        return []


def commit_without_manifests(table: Table, operation: Operation) -> None:
    """Commit one snapshot that leaves all files out, and says so of none."""
    change = table.transaction()
    with _LeaveOut(operation=operation, transaction=change, io=table.io):
        pass
    table.catalog.commit_table(table, change._requirements, change._updates)


def commit_compaction(table: Table, new: Sequence[DataFile] | None = None) -> None:
    """Commit all rows anew, as an engine that compacts; `new` are the files, by default of them.

    It is sent once: on another snapshot it could bring back what was deleted meanwhile.
    """
    rows = table.scan().to_arrow().combine_chunks()
    old = [task.file for task in table.scan().plan_files()]
    if new is None:
        new = list(_dataframe_to_data_files(table.metadata, rows, table.io))
    change = table.transaction()
    with _Rewrite(Operation.REPLACE, change, table.io) as snapshot:
        for file in old:
            snapshot.delete_data_file(file)
        for file in new:
            snapshot.append_data_file(file)
    table.catalog.commit_table(table, change._requirements, change._updates)


def commit_repeated_removals(table: Table, added: Sequence[DataFile] = ()) -> None:
    """Commit one snapshot that names removed files as removed again, as DuckDB 1.5 does."""
    with table.transaction() as change, _RepeatRemovals(change, added):
        pass


def commit_carried_files(
    table: Table, files: Sequence[DataFile], status: ManifestEntryStatus, *, added_by: int = 0
) -> None:
    """Commit one snapshot that lies about where files come from; 0 is the snapshot itself."""
    with table.transaction() as change, _CarryOn(change, files, status, added_by):
        pass


def commit_delete_files(table: Table, files: Sequence[DataFile]) -> int:
    """Commit one snapshot that adds delete files; return its id."""
    with table.transaction() as change, _AddDeleteFiles(change, files):
        pass
    snapshot = table.refresh().current_snapshot()
    assert snapshot is not None
    return snapshot.snapshot_id
