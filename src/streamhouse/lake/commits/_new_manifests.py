"""Manifests of one snapshot: written for new files, rewritten for removed files, merged by size.

Files stay under their partition spec. Manifests of data and of deletes merge by size class: the
number of manifests and the work per commit stay logarithmic in the number of rounds.
"""

from __future__ import annotations

import os
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from types import TracebackType
from typing import Any, Final, NamedTuple, cast

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
    MANIFEST_LIST_FILE_SCHEMAS,
    DataFile,
    DataFileContent,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestListWriterV2,
    ManifestWriterV2,
)
from pyiceberg.table import Table, TableProperties
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.typedef import TableVersion

from streamhouse.core.errors import FencedError
from streamhouse.core.model.lake.facts import VERSION_3
from streamhouse.lake.snapshots._manifests import (
    AVRO_SCHEMA_KEY,
    ENTRY_NAME,
    EntryForm,
    entry_form,
    first_row_id_of,
    live_entries,
    manifests_of,
    with_first_row_id,
)
from streamhouse.lake.snapshots.live_files import EntryKey, entry_key

__all__ = ["SnapshotManifests"]

MERGE_MANIFESTS_MIN: Final = 16
_CLASS_BYTES_FIRST: Final = 32 << 10
_CLASS_FACTOR: Final = 8
_CLASS_MAX: Final = 3
# Rounds replace vectors in most small manifests of deletes: their remains would stay small.
_JOINED_CLASS_MAX: Final = 1


class WrittenList(NamedTuple):
    """A manifest list, and in format version 3 the ids that it gives to rows."""

    location: str
    first_row_id: int | None
    row_count: int | None


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
        self._compression = cast(
            AvroCompressionCodec,
            table.metadata.properties.get(
                TableProperties.WRITE_AVRO_COMPRESSION,
                TableProperties.WRITE_AVRO_COMPRESSION_DEFAULT,
            ),
        )

    def write_list(
        self, manifests: Sequence[ManifestFile], *, parent_id: int | None, sequence_number: int
    ) -> WrittenList:
        """Write the snapshot's manifest list; in version 3 new data files get their row ids."""
        output = self._new_file(f"snap-{self._snapshot_id}-0-{self._commit_uuid}.avro")
        writer = _ListWriter(
            output, self._snapshot_id, parent_id, sequence_number, self._compression
        )
        first = None
        if self._metadata.format_version == VERSION_3:
            first = self._metadata.next_row_id or 0
            writer.give_row_ids(first)
        with writer:
            writer.add_manifests(list(manifests))
        row_count = None if first is None else cast(int, writer.next_row_id) - first
        return WrittenList(output.location, first, row_count)

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
        joined: dict[tuple[ManifestContent, int], list[ManifestEntry]] = defaultdict(list)
        gone = {entry_key(file) for file in removed}
        touched = {(_manifest_content(file), file.spec_id) for file in removed}
        hit_count = 0
        for manifest in [] if parent is None else manifests_of(self._table.io, parent):
            if not (manifest.has_added_files() or manifest.has_existing_files()):
                continue
            if (manifest.content, manifest.partition_spec_id) not in touched:
                unchanged.append(manifest)
                continue
            entries = self._live_entries(manifest)
            hits = sum(entry_key(entry.data_file) in gone for entry in entries)
            key = manifest.content, manifest.partition_spec_id
            if not hits:
                unchanged.append(manifest)
            elif _size_class(manifest.manifest_length) <= _JOINED_CLASS_MAX:
                joined[key] += self._without(entries, gone)
            else:
                rewritten.append(self._write(*key, self._without(entries, gone)))
            hit_count += hits
        if hit_count != len(gone):
            raise FencedError(
                f"lake table '{'.'.join(self._table.name())}': {len(gone) - hit_count} of"
                f" {len(gone)} files to replace are no longer part of it; another engine has"
                " rewritten them"
            )
        rewritten += [self._write(*key, entries) for key, entries in joined.items()]
        return [*rewritten, *self._merged(unchanged)]

    def _without(
        self, entries: Sequence[ManifestEntry], gone: Set[EntryKey]
    ) -> list[ManifestEntry]:
        return [
            self._carried(
                entry,
                ManifestEntryStatus.DELETED
                if entry_key(entry.data_file) in gone
                else ManifestEntryStatus.EXISTING,
            )
            for entry in entries
        ]

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
        with _ManifestWriter(
            content,
            self._metadata.format_version,
            self._metadata.specs()[spec_id],
            self._metadata.schema(),
            self._new_file(f"{self._commit_uuid}-m{len(self.paths)}.avro"),
            self._snapshot_id,
            self._compression,
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


class _ManifestWriter(ManifestWriterV2):
    """Also writes manifests of deletes, and of version 3: pyiceberg writes neither."""

    def __init__(self, content: ManifestContent, version: TableVersion, *args: Any) -> None:
        super().__init__(*args)
        self._content = content
        self._version = version

    def content(self) -> ManifestContent:
        return self._content

    @property
    def version(self) -> TableVersion:
        return self._version

    @property
    def _meta(self) -> dict[str, str]:
        is_data = self._content is ManifestContent.DATA
        return {**super()._meta, "content": "data" if is_data else "deletes"}

    def new_writer(self) -> AvroOutputFile[ManifestEntry]:
        form = entry_form(self._spec.partition_type(self._schema), self._version)
        return _OneBlockFile(self._output_file, form, metadata=self._meta)


class _ListWriter(ManifestListWriterV2):
    """Also writes lists of version 3, which pyiceberg does not."""

    next_row_id: int | None = None
    """The id after the last id given to a row; None in version 2, whose rows have no ids."""

    def give_row_ids(self, first: int) -> None:
        """Write version 3: from `first` on, give ids to the rows of files without ids."""
        self.next_row_id = first
        self._format_version = VERSION_3
        self._meta = {**self._meta, "format-version": "3", "first-row-id": str(first)}

    def __enter__(self) -> _ListWriter:
        form = MANIFEST_LIST_FILE_SCHEMAS[self._format_version]
        self._writer = AvroOutputFile(
            output_file=self._output_file,
            record_schema=form,
            file_schema=form,
            schema_name="manifest_file",
            metadata=self._meta,
        )
        self._writer.__enter__()
        return self

    def prepare_manifest(self, manifest_file: ManifestFile) -> ManifestFile:
        prepared = super().prepare_manifest(manifest_file)
        if self.next_row_id is None:
            return prepared
        row_id = first_row_id_of(prepared)
        if row_id is None and prepared.content is ManifestContent.DATA:
            row_id = self.next_row_id
            # Files that have ids of their own count too, as with Iceberg's Java library.
            self.next_row_id += (prepared.added_rows_count or 0) + (
                prepared.existing_rows_count or 0
            )
        return with_first_row_id(prepared, row_id)
