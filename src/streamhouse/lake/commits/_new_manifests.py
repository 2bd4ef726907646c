"""Manifests of one snapshot: written for new files, rewritten for removed files, merged by size.

Files stay under their partition spec. Manifests of data and of deletes merge by size class: the
number of manifests and the work per commit stay logarithmic in the number of rounds.
"""

from __future__ import annotations

import os
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Final, cast

from pyiceberg.avro.codecs import (
    AVRO_CODEC_KEY,
    CODEC_MAPPING_ICEBERG_TO_AVRO,
    AvroCompressionCodec,
)
from pyiceberg.avro.file import (
    MAGIC,
    META_SCHEMA,
    SYNC_SIZE,
    AvroFileHeader,
    AvroOutputFile,
)
from pyiceberg.avro.resolver import construct_writer
from pyiceberg.io import OutputFile
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriterV2,
)
from pyiceberg.table import Table, TableProperties
from pyiceberg.table.snapshots import Snapshot

from streamhouse.core.errors import FencedError
from streamhouse.lake.snapshots._manifests import (
    AVRO_SCHEMA_KEY,
    ENTRY_NAME,
    EntryForm,
    entry_form,
    live_entries,
    manifests_of,
)

__all__ = ["SnapshotManifests"]

MERGE_MANIFESTS_MIN: Final = 16
_CLASS_BYTES_FIRST: Final = 32 << 10
_CLASS_FACTOR: Final = 8
_CLASS_MAX: Final = 3


class SnapshotManifests:
    """Writes the manifests of the snapshot `snapshot_id`, which follows the table's current one.

    `paths` has every file written, for the clean-up of a failed attempt.
    """

    def __init__(self, table: Table, *, snapshot_id: int) -> None:
        self._table = table
        self._metadata = table.metadata
        self._snapshot_id = snapshot_id
        self._commit_uuid = uuid.uuid4()
        self._locations = table.location_provider()
        self.paths: list[str] = []
        self.compression = cast(
            AvroCompressionCodec,
            table.metadata.properties.get(
                TableProperties.WRITE_AVRO_COMPRESSION,
                TableProperties.WRITE_AVRO_COMPRESSION_DEFAULT,
            ),
        )

    def new_list_file(self) -> OutputFile:
        """Return the file for the snapshot's manifest list."""
        return self._new_file(f"snap-{self._snapshot_id}-0-{self._commit_uuid}.avro")

    def of_added(
        self, files: Iterable[DataFile], *, data_sequence_number: int | None
    ) -> list[ManifestFile]:
        """Write the manifests of new files; data files get `data_sequence_number` if it is set."""
        groups: dict[tuple[ManifestContent, int], list[ManifestEntry]] = defaultdict(list)
        for file in files:
            content = _manifest_content(file)
            number = data_sequence_number if content is ManifestContent.DATA else None
            groups[(content, file.spec_id)].append(
                ManifestEntry.from_args(
                    status=ManifestEntryStatus.ADDED,
                    snapshot_id=self._snapshot_id,
                    sequence_number=number,
                    file_sequence_number=None,
                    data_file=file,
                )
            )
        return [self._write(*group, entries) for group, entries in groups.items()]

    def of_parent(
        self, parent: Snapshot | None, *, removed: Sequence[DataFile]
    ) -> list[ManifestFile]:
        """Return the manifests of `parent`'s live files without `removed`, merged by size.

        Raises `FencedError` when a file to remove is not live in `parent`.
        """
        unchanged: list[ManifestFile] = []
        rewritten: list[ManifestFile] = []
        gone = {file.file_path: _manifest_content(file) for file in removed}
        touched = {(_manifest_content(file), file.spec_id) for file in removed}
        hit_count = 0
        for manifest in [] if parent is None else manifests_of(self._table.io, parent):
            if not (manifest.has_added_files() or manifest.has_existing_files()):
                continue
            if (manifest.content, manifest.partition_spec_id) not in touched:
                unchanged.append(manifest)
                continue
            entries = self._live_entries(manifest)
            hits = sum(entry.data_file.file_path in gone for entry in entries)
            if hits:
                rewritten.append(self._without(manifest, entries, gone))
            else:
                unchanged.append(manifest)
            hit_count += hits
        if hit_count != len(gone):
            raise FencedError(
                f"lake table '{'.'.join(self._table.name())}': {len(gone) - hit_count} of"
                f" {len(gone)} files to replace are no longer part of it; another engine has"
                " rewritten them"
            )
        return [*rewritten, *self._merged(unchanged)]

    def _without(
        self, manifest: ManifestFile, entries: Sequence[ManifestEntry], gone: Iterable[str]
    ) -> ManifestFile:
        paths = set(gone)
        return self._write(
            manifest.content,
            manifest.partition_spec_id,
            [
                self._carried(
                    entry,
                    ManifestEntryStatus.DELETED
                    if entry.data_file.file_path in paths
                    else ManifestEntryStatus.EXISTING,
                )
                for entry in entries
            ],
        )

    def _merged(self, manifests: Sequence[ManifestFile]) -> list[ManifestFile]:
        """Return `manifests` with every full size class merged into a single manifest."""
        classes: dict[tuple[ManifestContent, int, int], list[ManifestFile]] = defaultdict(list)
        result = []
        for manifest in manifests:
            size_class = _size_class(manifest.manifest_length)
            if size_class > _CLASS_MAX:
                result.append(manifest)
            else:
                key = (manifest.content, manifest.partition_spec_id, size_class)
                classes[key].append(manifest)
        for (content, spec_id, _), members in classes.items():
            if len(members) < MERGE_MANIFESTS_MIN:
                result += members
                continue
            entries = [
                self._carried(entry, ManifestEntryStatus.EXISTING)
                for manifest in members
                for entry in self._live_entries(manifest)
            ]
            result.append(self._write(content, spec_id, entries))
        return result

    def _live_entries(self, manifest: ManifestFile) -> list[ManifestEntry]:
        return live_entries(self._table.io, manifest)

    def _carried(self, entry: ManifestEntry, status: ManifestEntryStatus) -> ManifestEntry:
        """Return an entry of an older manifest as this snapshot's manifests have it."""
        is_removed = status is ManifestEntryStatus.DELETED
        return ManifestEntry.from_args(
            status=status,
            snapshot_id=self._snapshot_id if is_removed else entry.snapshot_id,
            sequence_number=entry.sequence_number,
            file_sequence_number=entry.file_sequence_number,
            data_file=entry.data_file,
        )

    def _write(
        self, content: ManifestContent, spec_id: int, entries: Sequence[ManifestEntry]
    ) -> ManifestFile:
        kind = _DataManifestWriter if content is ManifestContent.DATA else _DeleteManifestWriter
        with kind(
            self._metadata.specs()[spec_id],
            self._metadata.schema(),
            self._new_file(f"{self._commit_uuid}-m{len(self.paths)}.avro"),
            self._snapshot_id,
            self.compression,
        ) as writer:
            for entry in entries:
                writer.add_entry(entry)
        return writer.to_manifest_file()

    def _new_file(self, name: str) -> OutputFile:
        path = self._locations.new_metadata_location(name)
        self.paths.append(path)
        return self._table.io.new_output(path)


def _manifest_content(file: DataFile) -> ManifestContent:
    is_data = file.content is DataFileContent.DATA
    return ManifestContent.DATA if is_data else ManifestContent.DELETES


def _size_class(manifest_bytes: int) -> int:
    """Return 0 for the smallest manifests; each class holds `_CLASS_FACTOR` times the last."""
    size_class, limit = 0, _CLASS_BYTES_FIRST
    while manifest_bytes > limit and size_class <= _CLASS_MAX:
        size_class, limit = size_class + 1, limit * _CLASS_FACTOR
    return size_class


class _OneBlockFile(AvroOutputFile[ManifestEntry]):
    """Writes all its records as one block: a block per record costs a compression each."""

    def __init__(
        self, output_file: OutputFile, form: EntryForm, *, metadata: dict[str, str]
    ) -> None:
        # Without the base's own, which would make the writer again.
        self.output_file = output_file
        self.file_schema = form.schema
        self.schema_name = ENTRY_NAME
        self.sync_bytes = os.urandom(SYNC_SIZE)
        self.writer = form.writer
        self.metadata = metadata
        self._avro_schema = form.avro_schema

    def _write_header(self) -> None:
        codec = self.metadata[AVRO_CODEC_KEY]
        header = AvroFileHeader(
            MAGIC,
            {
                **self.metadata,
                AVRO_SCHEMA_KEY: self._avro_schema,
                AVRO_CODEC_KEY: CODEC_MAPPING_ICEBERG_TO_AVRO.get(codec) or codec,
            },
            self.sync_bytes,
        )
        construct_writer(META_SCHEMA).write(self.encoder, header)

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


class _DataManifestWriter(ManifestWriterV2):
    def new_writer(self) -> AvroOutputFile[ManifestEntry]:
        form = entry_form(self._spec.partition_type(self._schema))
        return _OneBlockFile(self._output_file, form, metadata=self._meta)


class _DeleteManifestWriter(_DataManifestWriter):
    """pyiceberg reads manifests of deletes and writes none: its manifests say `data`."""

    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}
