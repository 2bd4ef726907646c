"""One append snapshot, staged: its manifests and manifest list written, nothing committed yet.

What pyiceberg's own append does, with three differences that rounds need: the base snapshot is
asserted and never silently replaced by a newer one, files go under the partition spec they were
written with, and manifests merge by size class, so that their number and the work per commit stay
logarithmic in the number of rounds.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, cast

from pyiceberg.avro.codecs import AvroCompressionCodec
from pyiceberg.avro.file import AvroOutputFile
from pyiceberg.io import OutputFile
from pyiceberg.manifest import (
    DEFAULT_READ_VERSION,
    DataFile,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriterV2,
    write_manifest_list,
)
from pyiceberg.table import Table, TableProperties
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import (
    Operation,
    Snapshot,
    SnapshotSummaryCollector,
    Summary,
    update_snapshot_summaries,
)
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertRefSnapshotId,
    AssertTableUUID,
    SetPropertiesUpdate,
    SetSnapshotRefUpdate,
    TableRequirement,
    TableUpdate,
)

__all__ = ["StagedSnapshot", "stage_append"]

MERGE_MANIFESTS_MIN: Final = 16
_CLASS_BYTES_FIRST: Final = 32 << 10
_CLASS_FACTOR: Final = 8
_CLASS_MAX: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSnapshot:
    """A snapshot ready to commit. `metadata_paths` are the files that only it refers to."""

    snapshot_id: int
    updates: tuple[TableUpdate, ...]
    requirements: tuple[TableRequirement, ...]
    metadata_paths: tuple[str, ...]


def stage_append(
    table: Table,
    files: Sequence[DataFile],
    *,
    summary: Mapping[str, str],
    table_properties: Callable[[int], Mapping[str, str]],
) -> StagedSnapshot:
    """Write the metadata of a snapshot that adds `files` to the table's current one.

    The commit asserts the table's identity and that this current snapshot is still the current
    one. It also sets `table_properties`, a function of the snapshot's sequence number.
    """
    return _AppendStaging(table, summary=summary).stage(files, table_properties=table_properties)


class _AppendStaging:
    def __init__(self, table: Table, *, summary: Mapping[str, str]) -> None:
        self._table = table
        self._metadata = table.metadata
        self._summary_properties = summary
        self._snapshot_id = table.metadata.new_snapshot_id()
        self._commit_uuid = uuid.uuid4()
        self._locations = table.location_provider()
        self._paths: list[str] = []
        self._compression = cast(
            AvroCompressionCodec,
            table.metadata.properties.get(
                TableProperties.WRITE_AVRO_COMPRESSION,
                TableProperties.WRITE_AVRO_COMPRESSION_DEFAULT,
            ),
        )

    def stage(
        self,
        files: Sequence[DataFile],
        *,
        table_properties: Callable[[int], Mapping[str, str]],
    ) -> StagedSnapshot:
        parent = self._metadata.snapshot_by_name(MAIN_BRANCH)
        added = self._added_manifests(files)
        kept = [] if parent is None else self._kept_manifests(parent)
        sequence_number = self._metadata.next_sequence_number()
        parent_id = None if parent is None else parent.snapshot_id
        name = f"snap-{self._snapshot_id}-0-{self._commit_uuid}.avro"
        output = self._new_metadata_file(name)
        with write_manifest_list(
            format_version=2,
            output_file=output,
            snapshot_id=self._snapshot_id,
            parent_snapshot_id=parent_id,
            sequence_number=sequence_number,
            avro_compression=self._compression,
        ) as writer:
            writer.add_manifests([*added, *self._merged(kept)])
        snapshot = Snapshot.model_validate(
            {
                "snapshot-id": self._snapshot_id,
                "parent-snapshot-id": parent_id,
                "manifest-list": output.location,
                "sequence-number": sequence_number,
                "summary": self._summary(files, parent),
                "schema-id": self._metadata.current_schema_id,
            }
        )
        branch = {"snapshot-id": self._snapshot_id, "ref-name": MAIN_BRANCH, "type": "branch"}
        base = {"ref": MAIN_BRANCH, "snapshot-id": parent_id}
        return StagedSnapshot(
            snapshot_id=self._snapshot_id,
            updates=(
                AddSnapshotUpdate(snapshot=snapshot),
                SetSnapshotRefUpdate.model_validate(branch),
                SetPropertiesUpdate(updates=dict(table_properties(sequence_number))),
            ),
            requirements=(
                AssertTableUUID(uuid=self._metadata.table_uuid),
                AssertRefSnapshotId.model_validate(base),
            ),
            metadata_paths=tuple(self._paths),
        )

    def _added_manifests(self, files: Sequence[DataFile]) -> list[ManifestFile]:
        by_spec: dict[int, list[ManifestEntry]] = defaultdict(list)
        for file in files:
            by_spec[file.spec_id].append(
                ManifestEntry.from_args(
                    status=ManifestEntryStatus.ADDED,
                    snapshot_id=self._snapshot_id,
                    sequence_number=None,
                    file_sequence_number=None,
                    data_file=file,
                )
            )
        return [self._write_manifest(spec_id, entries) for spec_id, entries in by_spec.items()]

    def _kept_manifests(self, parent: Snapshot) -> list[ManifestFile]:
        return [
            manifest
            for manifest in parent.manifests(self._table.io)
            if manifest.has_added_files() or manifest.has_existing_files()
        ]

    def _merged(self, manifests: Sequence[ManifestFile]) -> list[ManifestFile]:
        """Return `manifests` with every full size class of data manifests written as one."""
        classes: dict[tuple[int, int], list[ManifestFile]] = defaultdict(list)
        result = []
        for manifest in manifests:
            size_class = _size_class(manifest.manifest_length)
            if manifest.content is not ManifestContent.DATA or size_class > _CLASS_MAX:
                result.append(manifest)
            else:
                classes[(manifest.partition_spec_id, size_class)].append(manifest)
        for (spec_id, _), members in classes.items():
            if len(members) < MERGE_MANIFESTS_MIN:
                result += members
                continue
            entries = [
                ManifestEntry.from_args(
                    status=ManifestEntryStatus.EXISTING,
                    snapshot_id=entry.snapshot_id,
                    sequence_number=entry.sequence_number,
                    file_sequence_number=entry.file_sequence_number,
                    data_file=entry.data_file,
                )
                for manifest in members
                for entry in manifest.fetch_manifest_entry(self._table.io, discard_deleted=True)
            ]
            result.append(self._write_manifest(spec_id, entries))
        return result

    def _write_manifest(self, spec_id: int, entries: Sequence[ManifestEntry]) -> ManifestFile:
        output = self._new_metadata_file(f"{self._commit_uuid}-m{len(self._paths)}.avro")
        with _OneBlockManifestWriter(
            self._metadata.specs()[spec_id],
            self._metadata.schema(),
            output,
            self._snapshot_id,
            self._compression,
        ) as writer:
            for entry in entries:
                writer.add_entry(entry)
        return writer.to_manifest_file()

    def _new_metadata_file(self, name: str) -> OutputFile:
        path = self._locations.new_metadata_location(name)
        self._paths.append(path)
        return self._table.io.new_output(path)

    def _summary(self, files: Sequence[DataFile], parent: Snapshot | None) -> Summary:
        collector = SnapshotSummaryCollector()
        specs, schema = self._metadata.specs(), self._metadata.schema()
        for file in files:
            collector.add_file(file, schema=schema, partition_spec=specs[file.spec_id])
        return update_snapshot_summaries(
            Summary(Operation.APPEND, **collector.build(), **self._summary_properties),
            None if parent is None or parent.summary is None else parent.summary,
        )


def _size_class(manifest_bytes: int) -> int:
    """Return 0 for the smallest manifests; each class holds `_CLASS_FACTOR` times the last."""
    size_class, limit = 0, _CLASS_BYTES_FIRST
    while manifest_bytes > limit and size_class <= _CLASS_MAX:
        size_class, limit = size_class + 1, limit * _CLASS_FACTOR
    return size_class


class _OneBlockFile(AvroOutputFile[ManifestEntry]):
    """Writes all its records as one block: a block per record costs a compression each."""

    def __enter__(self) -> _OneBlockFile:
        self._records: list[ManifestEntry] = []
        super().__enter__()
        return self

    def write_block(self, objects: list[ManifestEntry]) -> None:
        self._records.extend(objects)

    def __exit__(
        self,
        exctype: type[BaseException] | None,
        excinst: BaseException | None,
        exctb: TracebackType | None,
    ) -> None:
        if exctype is None:
            super().write_block(self._records)
        super().__exit__(exctype, excinst, exctb)


class _OneBlockManifestWriter(ManifestWriterV2):
    def new_writer(self) -> AvroOutputFile[ManifestEntry]:
        return _OneBlockFile(
            output_file=self._output_file,
            file_schema=self._with_partition(self.version),
            record_schema=self._with_partition(DEFAULT_READ_VERSION),
            schema_name="manifest_entry",
            metadata=self._meta,
        )
