"""Iceberg tables of format version 3, which stock pyiceberg reads and cannot write."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyiceberg.manifest as manifests
from pyiceberg.avro.file import AvroOutputFile
from pyiceberg.catalog import Catalog
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestEntry
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.update import AddSnapshotUpdate, SetSnapshotRefUpdate
from pyiceberg.typedef import Record

from streamhouse.lake.files.deletes._deletion_vectors import DeletionVector, write_deletion_vectors
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.snapshots._manifests import entries_of, manifests_of

__all__ = ["commit_vectors", "send_vectors", "upgraded", "written_vectors"]


def written_vectors(table: Table, positions: Mapping[str, Sequence[int]]) -> list[DeletionVector]:
    """Write the vectors of data files into one Puffin file."""
    path = f"{table.location()}/data/{uuid.uuid4()}.puffin"
    arrays = {name: np.array(some, np.int64) for name, some in positions.items()}
    return write_deletion_vectors(LakeFilesystem({}), path, arrays)


def commit_vectors(
    table: Table,
    vectors: Sequence[DeletionVector],
    *,
    partitions: Mapping[str, Record] = MappingProxyType({}),
    **document: Any,
) -> Table:
    """Commit one snapshot that adds vectors to a table, which becomes one of format version 3.

    `partitions` are those of data files, where they have some. `document` replaces fields of the
    table's metadata.
    """
    metadata, parent = table.metadata, table.current_snapshot()
    assert parent is not None
    snapshot_id, number = parent.snapshot_id + 1, metadata.last_sequence_number + 1
    folder = f"{table.location()}/metadata"
    entries = [_added(snapshot_id, vector, partitions) for vector in vectors]
    manifest = _written(table, snapshot_id, entries)
    list_path = f"{folder}/snap-{snapshot_id}-{uuid.uuid4()}.avro"
    with _List(
        table.io.new_output(list_path), snapshot_id, parent.snapshot_id, number, "null"
    ) as listed:
        listed.add_manifests([manifest, *parent.manifests(table.io)])
    now = max(int(time.time() * 1000), metadata.last_updated_ms)
    before = json.loads(table.metadata.model_dump_json()) if metadata.format_version < 3 else None
    if before is None:
        text = Path(table.metadata_location.removeprefix("file://")).read_text()
        before = json.loads(text)
    snapshot = {
        "snapshot-id": snapshot_id,
        "parent-snapshot-id": parent.snapshot_id,
        "sequence-number": number,
        "timestamp-ms": now,
        "manifest-list": list_path,
        "summary": {"operation": "delete", **_totals(parent, vectors)},
        "schema-id": metadata.current_schema_id,
        "first-row-id": 0,
        "added-rows": listed.rows,
    }
    return _register(
        table,
        before
        | {
            "format-version": 3,
            "next-row-id": listed.rows,
            "last-sequence-number": number,
            "last-updated-ms": now,
            "current-snapshot-id": snapshot_id,
            "refs": {"main": {"snapshot-id": snapshot_id, "type": "branch"}},
            "snapshots": [*before["snapshots"], snapshot],
            "snapshot-log": [
                *before["snapshot-log"],
                {"snapshot-id": snapshot_id, "timestamp-ms": now},
            ],
        }
        | document,
    )


def send_vectors(
    table: Table,
    vectors: Sequence[DeletionVector],
    *,
    replaced: Sequence[str] = (),
    operation: str = "delete",
) -> None:
    """Commit vectors through the table's own catalog; the Puffin files `replaced` go with it."""
    metadata, parent = table.metadata, table.current_snapshot()
    assert parent is not None
    partitions = {task.file.file_path: task.file.partition for task in table.scan().plan_files()}
    snapshot_id, number = parent.snapshot_id + 1, metadata.last_sequence_number + 1
    new, kept = [], []
    for manifest in manifests_of(table.io, parent):
        entries = entries_of(table.io, manifest)
        if not {entry.data_file.file_path for entry in entries} & {*replaced}:
            kept.append(manifest)
            continue
        for entry in entries:
            entry.status = manifests.ManifestEntryStatus.DELETED
            entry.snapshot_id = snapshot_id
        new.append(_written(table, snapshot_id, entries))
    if vectors:
        added = [_added(snapshot_id, vector, partitions) for vector in vectors]
        new.append(_written(table, snapshot_id, added))
    path = f"{table.location()}/metadata/snap-{snapshot_id}-{uuid.uuid4()}.avro"
    output = table.io.new_output(path)
    with _List(output, snapshot_id, parent.snapshot_id, number, "null") as listed:
        listed.add_manifests([*new, *kept])
    snapshot = {
        "snapshot-id": snapshot_id,
        "parent-snapshot-id": parent.snapshot_id,
        "sequence-number": number,
        "timestamp-ms": max(int(time.time() * 1000), metadata.last_updated_ms),
        "manifest-list": path,
        "summary": {"operation": operation},
        "schema-id": metadata.current_schema_id,
        "first-row-id": metadata.next_row_id,
        "added-rows": 0,
    }
    current = {"ref-name": "main", "type": "branch", "snapshot-id": snapshot_id}
    table.catalog.commit_table(
        table,
        (),
        (
            AddSnapshotUpdate(snapshot=Snapshot.model_validate(snapshot)),
            SetSnapshotRefUpdate.model_validate(current),
        ),
    )


def upgraded(table: Table, **document: Any) -> Table:
    """Make the table one of format version 3; `document` replaces fields of its metadata."""
    before = json.loads(table.metadata.model_dump_json())
    return _register(table, before | {"format-version": 3, "next-row-id": 0} | document)


def _register(table: Table, document: Mapping[str, Any]) -> Table:
    path = f"{table.location()}/metadata/99999-{uuid.uuid4()}.metadata.json"
    Path(path.removeprefix("file://")).write_text(json.dumps(document))
    catalog: Catalog = table.catalog
    catalog.drop_table(table.name())
    return catalog.register_table(table.name(), path)


def _added(
    snapshot_id: int, vector: DeletionVector, partitions: Mapping[str, Record]
) -> ManifestEntry:
    return ManifestEntry.from_args(
        _table_format_version=3,
        status=manifests.ManifestEntryStatus.ADDED,
        snapshot_id=snapshot_id,
        sequence_number=None,
        file_sequence_number=None,
        data_file=_entry(vector, partitions.get(vector.data_path, Record())),
    )


def _written(
    table: Table, snapshot_id: int, entries: Sequence[ManifestEntry]
) -> manifests.ManifestFile:
    """Write a manifest of deletes."""
    output = table.io.new_output(f"{table.location()}/metadata/{uuid.uuid4()}-vectors.avro")
    metadata = table.metadata
    with _Manifest(metadata.spec(), metadata.schema(), output, snapshot_id, "null") as manifest:
        for entry in entries:
            manifest.add_entry(entry)
    return manifest.to_manifest_file()


def _totals(parent: Snapshot, vectors: Sequence[DeletionVector]) -> dict[str, str]:
    before = {} if parent.summary is None else parent.summary.additional_properties
    totals = {key: value for key, value in before.items() if key.startswith("total-")}
    for key, added in (
        ("total-delete-files", len(vectors)),
        ("total-position-deletes", sum(vector.position_count for vector in vectors)),
    ):
        totals[key] = str(int(totals.get(key, "0")) + added)
    return totals


def _entry(vector: DeletionVector, partition: Record) -> DataFile:
    file = DataFile.from_args(
        _table_format_version=3,
        content=DataFileContent.POSITION_DELETES,
        file_path=vector.path,
        file_format=FileFormat.PUFFIN,
        partition=partition,
        record_count=vector.position_count,
        file_size_in_bytes=vector.file_bytes,
        referenced_data_file=vector.data_path,
        content_offset=vector.offset,
        content_size_in_bytes=vector.size_bytes,
    )
    file.spec_id = 0
    return file


class _Manifest(manifests.ManifestWriterV2):
    @property
    def version(self) -> Any:
        return 3

    def content(self) -> manifests.ManifestContent:
        return manifests.ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}

    def new_writer(self) -> Any:
        form = self._with_partition(3)
        return AvroOutputFile(
            output_file=self._output_file,
            file_schema=form,
            record_schema=form,
            schema_name="manifest_entry",
            metadata=self._meta,
        )


class _List(manifests.ManifestListWriterV2):
    """A list gives each data manifest the id of its first row."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._format_version = 3
        self._meta = {**self._meta, "format-version": "3"}
        self.rows = 0

    def __enter__(self) -> Any:
        form = manifests.MANIFEST_LIST_FILE_SCHEMAS[3]
        self._writer = AvroOutputFile(
            output_file=self._output_file,
            record_schema=form,
            file_schema=form,
            schema_name="manifest_file",
            metadata=self._meta,
        )
        self._writer.__enter__()
        return self

    def prepare_manifest(self, manifest_file: manifests.ManifestFile) -> manifests.ManifestFile:
        prepared = super().prepare_manifest(manifest_file)
        fields = manifests.MANIFEST_LIST_FILE_SCHEMAS[3].fields
        values = [getattr(prepared, field.name, None) for field in fields[:-1]]
        first_row_id = None
        if manifest_file.content == manifests.ManifestContent.DATA:
            first_row_id = self.rows
            counts = (manifest_file.added_rows_count, manifest_file.existing_rows_count)
            self.rows += sum(count or 0 for count in counts)
        return manifests.ManifestFile(*values, first_row_id)
