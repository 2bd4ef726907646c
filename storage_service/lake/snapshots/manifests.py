"""Manifests and manifest lists as they are read everywhere: quickly, and never believed unchecked.

Iceberg's metadata has no checksums. What refers to a file says how many files and rows of which
status it has, and which snapshot wrote it: a file that was exchanged, or put back as it was, says
otherwise, and is refused with `CorruptDataError`. So is, with `ForbiddenError`, what names a file
that is not the table's (`bounded_io.py`).

pyiceberg builds a tree of readers from the schema of each file that it opens: more work than the
few records of a small round are. The trees have no state, so one of each schema is kept.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple, TypeVar

from pyiceberg.avro.decoder import new_decoder
from pyiceberg.avro.file import META_SCHEMA, AvroFile, AvroFileHeader
from pyiceberg.avro.reader import Reader
from pyiceberg.avro.resolver import construct_reader, construct_writer, resolve_reader
from pyiceberg.avro.writer import Writer
from pyiceberg.io import FileIO
from pyiceberg.manifest import (
    DEFAULT_READ_VERSION,
    MANIFEST_ENTRY_SCHEMAS,
    MANIFEST_LIST_FILE_SCHEMAS,
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    PartitionFieldSummary,
    _inherit_from_manifest,
    data_file_with_partition,
    manifest_entry_schema_with_data_file,
)
from pyiceberg.schema import Schema
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.typedef import Record
from pyiceberg.types import StructType
from pyiceberg.utils.schema_conversion import AvroSchemaConversion

from streamhouse.storage_service.errors import CorruptDataError
from streamhouse.storage_service.lake.files.bounded_io import check_paths

__all__ = [
    "AVRO_SCHEMA_KEY",
    "ENTRY_NAME",
    "EntryFacts",
    "EntryForm",
    "check_manifest",
    "entries_of",
    "entry_form",
    "live_entries",
    "manifests_of",
]

AVRO_SCHEMA_KEY: Final = "avro.schema"
ENTRY_NAME: Final = "manifest_entry"
_SNAPSHOT_ID_KEY: Final = "snapshot-id"
_SCHEMAS_MAX: Final = 256
_D = TypeVar("_D", bound=Record)


@dataclass(frozen=True, slots=True)
class EntryForm:
    """How entries of one partition type are written: their schema, as Avro too, and a writer."""

    schema: Schema
    avro_schema: str
    writer: Writer


@lru_cache(_SCHEMAS_MAX)
def entry_form(partition_type: StructType) -> EntryForm:
    """Return how manifest entries with this partition type are written."""
    data_file = data_file_with_partition(
        format_version=DEFAULT_READ_VERSION, partition_type=partition_type
    )
    schema = manifest_entry_schema_with_data_file(
        format_version=DEFAULT_READ_VERSION, data_file=data_file
    )
    avro = AvroSchemaConversion().iceberg_to_avro(schema, schema_name=ENTRY_NAME)
    return EntryForm(schema, json.dumps(avro), construct_writer(schema))


class EntryFacts(NamedTuple):
    """Of a manifest entry, what its manifest list knows too."""

    status: int
    snapshot_id: int | None
    row_count: int


def manifests_of(io: FileIO, snapshot: Snapshot) -> list[ManifestFile]:
    """Return the manifests of a snapshot."""
    with _ManifestListFile(io.new_input(snapshot.manifest_list)) as manifests:
        said = manifests.header.meta.get(_SNAPSHOT_ID_KEY)
        if said is not None and said != str(snapshot.snapshot_id):
            raise CorruptDataError(
                f"manifest list '{snapshot.manifest_list}' is that of snapshot {said}, not of"
                f" {snapshot.snapshot_id}; restore it from a copy"
            )
        found = list(manifests)
    check_paths(io, (manifest.manifest_path for manifest in found))
    return found


def entries_of(io: FileIO, manifest: ManifestFile) -> list[ManifestEntry]:
    """Return the entries of a manifest, those of removed files included."""
    with _EntryFile(io.new_input(manifest.manifest_path)) as file:
        entries = list(file)
    check_manifest(
        manifest,
        (EntryFacts(e.status, e.snapshot_id, e.data_file.record_count) for e in entries),
    )
    check_paths(io, (entry.data_file.file_path for entry in entries))
    return [_inherit_from_manifest(entry, manifest) for entry in entries]


def live_entries(io: FileIO, manifest: ManifestFile) -> list[ManifestEntry]:
    """Return the entries of a manifest whose files are live."""
    return [e for e in entries_of(io, manifest) if e.status != ManifestEntryStatus.DELETED]


def check_manifest(manifest: ManifestFile, entries: Iterable[EntryFacts]) -> None:
    """Raise `CorruptDataError` unless `entries`, all of them, are those of `manifest`."""
    files: Counter[int] = Counter()
    rows: Counter[int] = Counter()
    for status, snapshot_id, row_count in entries:
        files[status] += 1
        rows[status] += row_count
        is_added = status == ManifestEntryStatus.ADDED
        if is_added and snapshot_id not in (None, manifest.added_snapshot_id):
            raise _not_this(manifest, f"snapshot {snapshot_id}", str(manifest.added_snapshot_id))
    for status, count, row_count_said in (
        (ManifestEntryStatus.ADDED, manifest.added_files_count, manifest.added_rows_count),
        (ManifestEntryStatus.EXISTING, manifest.existing_files_count, manifest.existing_rows_count),
        (ManifestEntryStatus.DELETED, manifest.deleted_files_count, manifest.deleted_rows_count),
    ):
        # Engines may leave the counts out in format version 1.
        kind = status.name.lower()
        if count is not None and count != files[status]:
            raise _not_this(manifest, f"{files[status]} {kind} files", str(count))
        if row_count_said is not None and row_count_said != rows[status]:
            raise _not_this(manifest, f"{rows[status]} {kind} rows", str(row_count_said))


def _not_this(manifest: ManifestFile, found: str, expected: str) -> CorruptDataError:
    return CorruptDataError(
        f"manifest '{manifest.manifest_path}' has {found}, its manifest list says {expected};"
        " restore it from a copy"
    )


class _KeptReaders(AvroFile[_D]):
    def __enter__(self) -> _KeptReaders[_D]:
        with self.input_file.open() as stream:
            self.decoder = new_decoder(stream.read())
        self.header = _header_reader().read(self.decoder)
        self.reader = self._reader_of(self.header.meta[AVRO_SCHEMA_KEY])
        return self

    def _reader_of(self, avro_schema: str) -> Reader:
        raise NotImplementedError


class _EntryFile(_KeptReaders[ManifestEntry]):
    def _reader_of(self, avro_schema: str) -> Reader:
        return _entry_reader(avro_schema)


class _ManifestListFile(_KeptReaders[ManifestFile]):
    def _reader_of(self, avro_schema: str) -> Reader:
        return _manifest_reader(avro_schema)


@lru_cache(1)
def _header_reader() -> Reader:
    return construct_reader(META_SCHEMA, {-1: AvroFileHeader})


@lru_cache(_SCHEMAS_MAX)
def _entry_reader(avro_schema: str) -> Reader:
    return resolve_reader(
        AvroSchemaConversion().avro_to_iceberg(json.loads(avro_schema)),
        MANIFEST_ENTRY_SCHEMAS[DEFAULT_READ_VERSION],
        {-1: ManifestEntry, 2: DataFile},
        {0: ManifestEntryStatus, 101: FileFormat, 134: DataFileContent},
    )


@lru_cache(_SCHEMAS_MAX)
def _manifest_reader(avro_schema: str) -> Reader:
    return resolve_reader(
        AvroSchemaConversion().avro_to_iceberg(json.loads(avro_schema)),
        MANIFEST_LIST_FILE_SCHEMAS[DEFAULT_READ_VERSION],
        {-1: ManifestFile, 508: PartitionFieldSummary},
        {517: ManifestContent},
    )
