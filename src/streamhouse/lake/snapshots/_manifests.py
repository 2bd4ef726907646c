"""The reader of manifests and manifest lists, for all callers: quick, with every check.

Iceberg's metadata has no checksums. A reference to a file has its counts of files and rows by
status, and the snapshot of its writing: an exchanged or restored file differs, and is refused with
`CorruptDataError`. Names of files outside the table are refused with `ForbiddenError`
(`_bounded_io.py`).

Files of both format versions are read with the fields of version 3; in files of version 2 these are
None. pyiceberg's own readers drop them.

pyiceberg builds a tree of readers from the schema of each opened file: more work than the few
records of a small round. The trees have no state, and this module keeps one tree a schema.

Readers of thousands of files call `live_rows`: it decodes only the fields for planning, with the
library's readers, into a plain tuple an entry, in half the time of `live_entries`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

from pyiceberg.avro.decoder import BinaryDecoder, new_decoder
from pyiceberg.avro.file import META_SCHEMA, AvroFile, AvroFileHeader
from pyiceberg.avro.reader import (
    IntegerReader,
    MapReader,
    OptionReader,
    Reader,
    StructReader,
)
from pyiceberg.avro.resolver import construct_reader, construct_writer, resolve_reader
from pyiceberg.avro.writer import Writer
from pyiceberg.io import FileIO, InputFile
from pyiceberg.manifest import (
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
from pyiceberg.typedef import Record, TableVersion
from pyiceberg.types import StructType
from pyiceberg.utils.schema_conversion import AvroSchemaConversion

from streamhouse.core.errors import CorruptDataError
from streamhouse.lake.files._bounded_io import check_paths

__all__ = [
    "AVRO_SCHEMA_KEY",
    "ENTRY_NAME",
    "EntryFacts",
    "EntryForm",
    "ManifestRow",
    "check_manifest",
    "entries_of",
    "entry_form",
    "first_row_id_of",
    "live_entries",
    "live_rows",
    "manifests_of",
    "row_id_of",
    "with_first_row_id",
    "with_row_ids",
]

AVRO_SCHEMA_KEY: Final = "avro.schema"
ENTRY_NAME: Final = "manifest_entry"
_READ_VERSION: Final = 3
_MANIFEST_FIRST_ROW_ID: Final = 15
_FILE_FIRST_ROW_ID: Final = 16
_SNAPSHOT_ID_KEY: Final = "snapshot-id"
_SCHEMAS_MAX: Final = 256
_SYNC_BYTES: Final = 16

# Field ids of the manifest entry and the data file in it (Iceberg's spec, manifests).
_STATUS: Final = 0
_ENTRY_SNAPSHOT_ID: Final = 1
_SEQUENCE: Final = 3
_DATA_FILE: Final = 2
_ROW_ID: Final = 142
_WANTED: Final = (100, 101, 102, 103, 104, 110, 125, 128, 132, _ROW_ID)

_Decode = Callable[[BinaryDecoder], Any]
_D = TypeVar("_D", bound=Record)


@dataclass(frozen=True, slots=True)
class EntryForm:
    """How entries of one partition type are written: their schema, as Avro too, and a writer."""

    schema: Schema
    avro_schema: str
    writer: Writer


@lru_cache(_SCHEMAS_MAX)
def entry_form(partition_type: StructType, version: TableVersion) -> EntryForm:
    """Return how manifest entries with this partition type are written in a format version.

    Files of version 2 have the first fields of version 3.
    """
    data_file = data_file_with_partition(format_version=version, partition_type=partition_type)
    schema = manifest_entry_schema_with_data_file(format_version=version, data_file=data_file)
    avro = AvroSchemaConversion().iceberg_to_avro(schema, schema_name=ENTRY_NAME)
    return EntryForm(schema, json.dumps(avro), construct_writer(schema))


class EntryFacts(NamedTuple):
    """The facts of a manifest entry that the manifest list has too."""

    status: int
    snapshot_id: int | None
    row_count: int


def manifests_of(io: FileIO, snapshot: Snapshot) -> list[ManifestFile]:
    """Return the manifests of a snapshot."""
    with _ManifestListFile(io.new_input(snapshot.manifest_list)) as manifests:
        stored_id = manifests.header.meta.get(_SNAPSHOT_ID_KEY)
        if stored_id is not None and stored_id != str(snapshot.snapshot_id):
            raise CorruptDataError(
                f"manifest list '{snapshot.manifest_list}' is that of snapshot {stored_id}, not of"
                f" {snapshot.snapshot_id}; restore it from a copy"
            )
        manifest_files = list(manifests)
    check_paths(io, (manifest.manifest_path for manifest in manifest_files))
    return manifest_files


def entries_of(io: FileIO, manifest: ManifestFile) -> list[ManifestEntry]:
    """Return the entries of a manifest, also entries of removed files."""
    with _EntryFile(io.new_input(manifest.manifest_path)) as file:
        entries = list(file)
    check_manifest(
        manifest,
        (EntryFacts(e.status, e.snapshot_id, e.data_file.record_count) for e in entries),
    )
    check_paths(io, (entry.data_file.file_path for entry in entries))
    _inherit_row_ids(entries, first_row_id_of(manifest))
    return [_inherit_from_manifest(entry, manifest) for entry in entries]


def first_row_id_of(manifest: ManifestFile) -> int | None:
    """Return the first id for rows of data files without an id of their own; None: not given yet.

    Manifests of version 2 have none, and manifests that no list names yet.
    """
    has_one = len(manifest) > _MANIFEST_FIRST_ROW_ID
    return manifest[_MANIFEST_FIRST_ROW_ID] if has_one else None


def row_id_of(file: DataFile) -> int | None:
    """Return the id of the first row of a data file; None before the table has row ids."""
    has_one = len(file) > _FILE_FIRST_ROW_ID
    return file[_FILE_FIRST_ROW_ID] if has_one else None


def with_first_row_id(manifest: ManifestFile, row_id: int | None) -> ManifestFile:
    """Return the manifest as a list of version 3 names it."""
    return ManifestFile(*[manifest[n] for n in range(_MANIFEST_FIRST_ROW_ID)], row_id)


def _inherit_row_ids(entries: Iterable[ManifestEntry], row_id: int | None) -> None:
    """Give the data files of live entries without a first row id theirs."""
    if row_id is None:
        return
    live = [e.data_file for e in entries if e.status != ManifestEntryStatus.DELETED]
    own_ids = [(file[_FILE_FIRST_ROW_ID], file.record_count) for file in live]
    for file, first_row_id in zip(live, _first_row_ids(own_ids, row_id), strict=True):
        file[_FILE_FIRST_ROW_ID] = first_row_id


def _first_row_ids(own_ids: Iterable[tuple[int | None, int]], row_id: int) -> Iterator[int]:
    """Yield the first row id of each live file of a manifest, of its own id and number of rows.

    Files without an id of their own have ids one after the other, from the manifest's `row_id` on
    (Iceberg spec, "First Row ID Inheritance").
    """
    for own_id, row_count in own_ids:
        if own_id is None:
            yield row_id
            row_id += row_count
        else:
            yield own_id


def live_entries(io: FileIO, manifest: ManifestFile) -> list[ManifestEntry]:
    """Return the entries of a manifest whose files are live."""
    return [e for e in entries_of(io, manifest) if e.status != ManifestEntryStatus.DELETED]


class ManifestRow(NamedTuple):
    """The fields of a data manifest's entry for planning."""

    status: int
    snapshot_id: int | None
    sequence: int | None
    path: str
    format: str
    partition: tuple[Any, ...]
    row_count: int
    file_bytes: int
    null_counts: Mapping[int, int]
    lower_bounds: Mapping[int, bytes]
    upper_bounds: Mapping[int, bytes]
    row_group_starts: Sequence[int] | None
    first_row_id: int | None


def live_rows(io: FileIO, manifest: ManifestFile, *, only_added: bool = False) -> list[ManifestRow]:
    """Return the live files of a data manifest; `only_added`: by the snapshot that wrote it."""
    decoder, header = _opened(io.new_input(manifest.manifest_path))
    with _collector.paused():
        rows = list(_rows(manifest, decoder, header))
        check_manifest(manifest, (EntryFacts(r.status, r.snapshot_id, r.row_count) for r in rows))
        added, deleted = ManifestEntryStatus.ADDED.value, ManifestEntryStatus.DELETED.value
        if only_added:
            live = [row for row in rows if row.status == added]
        else:
            live = [row for row in rows if row.status != deleted]
    check_paths(io, (row.path for row in live))
    return live


def with_row_ids(manifest: ManifestFile, rows: Sequence[ManifestRow]) -> list[ManifestRow]:
    """Return all live rows of a manifest, those without a first row id with theirs."""
    row_id = first_row_id_of(manifest)
    if row_id is None:
        return list(rows)
    row_ids = _first_row_ids([(row.first_row_id, row.row_count) for row in rows], row_id)
    return [
        ManifestRow(*row[:-1], first_row_id)
        for row, first_row_id in zip(rows, row_ids, strict=True)
    ]


class _Collector:
    """The garbage collector of the process, which several threads may pause at a time.

    The collector would walk the same live objects again and again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pauses = 0
        self._was_enabled = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the collector until the end of the last concurrent block."""
        with self._lock:
            if not self._pauses:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._pauses += 1
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
                if self._was_enabled and not self._pauses:
                    gc.enable()


_collector: Final = _Collector()


def check_manifest(manifest: ManifestFile, entries: Iterable[EntryFacts]) -> None:
    """Raise `CorruptDataError` unless `entries` are all the entries of `manifest`."""
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


def _rows(
    manifest: ManifestFile, decoder: BinaryDecoder, header: AvroFileHeader
) -> Iterator[ManifestRow]:
    """Yield the entries of an opened data manifest, those of removed files included."""
    path = manifest.manifest_path
    decode = _row_decoder(header.meta[AVRO_SCHEMA_KEY])
    codec = header.compression_codec()
    while decoder.tell() < manifest.manifest_length:
        count = decoder.read_int()
        data = decoder.read_bytes()
        block = new_decoder(data if codec is None else codec.decompress(data))
        for _ in range(count):
            yield decode(block)
        if decoder.read(_SYNC_BYTES) != header.sync:
            raise CorruptDataError(f"manifest '{path}': a block ends without its sync marker")


@lru_cache(_SCHEMAS_MAX)
def _row_decoder(avro_schema: str) -> Callable[[BinaryDecoder], ManifestRow]:
    """Return a decoder of a single entry, for a file's own order of fields."""
    schema = AvroSchemaConversion().avro_to_iceberg(json.loads(avro_schema))
    reader = resolve_reader(schema, schema)
    assert isinstance(reader, StructReader)
    steps: list[tuple[int, _Decode]] = []
    for field, (_, field_reader) in zip(schema.fields, reader.field_readers, strict=True):
        if field.field_id == _DATA_FILE:
            assert isinstance(field_reader, StructReader)
            assert isinstance(field.field_type, StructType)
            for inner, (_, inner_reader) in zip(
                field.field_type.fields, field_reader.field_readers, strict=True
            ):
                is_wanted = inner.field_id in _WANTED
                steps.append((inner.field_id, _decoder_of(inner_reader, is_wanted=is_wanted)))
        else:
            is_wanted = field.field_id in (_STATUS, _ENTRY_SNAPSHOT_ID, _SEQUENCE)
            key = field.field_id if is_wanted else -1
            # Ids of entry and data file do not overlap; 2 is only the data file itself.
            steps.append((key, _decoder_of(field_reader, is_wanted=is_wanted)))

    def decode(decoder: BinaryDecoder) -> ManifestRow:
        values = {key: step(decoder) for key, step in steps}
        return ManifestRow(
            values[_STATUS],
            values.get(_ENTRY_SNAPSHOT_ID),
            values.get(_SEQUENCE),
            values[100],
            values[101],
            tuple(values[102]._data),
            values[103],
            values[104],
            _or_empty(values.get(110)),
            _or_empty(values.get(125)),
            _or_empty(values.get(128)),
            values.get(132),
            values.get(_ROW_ID),
        )

    return decode


def _decoder_of(reader: Reader, *, is_wanted: bool) -> _Decode:
    """Return the reader's own function, or a function to skip the value quickly."""
    if isinstance(reader, OptionReader):
        inner = _decoder_of(reader.option, is_wanted=is_wanted)
        return lambda decoder: inner(decoder) if decoder.read_int() else None
    if is_wanted or not isinstance(reader, MapReader):
        return reader.read
    if isinstance(reader.key, IntegerReader) and isinstance(reader.value, IntegerReader):
        return _pass_integers
    return reader.read


def _pass_integers(decoder: BinaryDecoder) -> None:
    """Pass over a map of integers: reading the whole map beats skipping entry by entry."""
    while (count := decoder.read_int()) != 0:
        if count < 0:
            count = -count
            decoder.skip_int()
        decoder.read_ints(count * 2)


def _or_empty(bounds: Mapping[int, Any] | None) -> Mapping[int, Any]:
    # `or` would ask for its length, for which the library's lazy maps are unpacked.
    return {} if bounds is None else bounds


def _opened(file: InputFile) -> tuple[BinaryDecoder, AvroFileHeader]:
    """Return a decoder behind the header of an Avro file, and the header."""
    with file.open() as stream:
        decoder = new_decoder(stream.read())
    return decoder, _header_reader().read(decoder)


class _KeptReaders(AvroFile[_D]):
    def __enter__(self) -> _KeptReaders[_D]:
        self.decoder, self.header = _opened(self.input_file)
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
        MANIFEST_ENTRY_SCHEMAS[_READ_VERSION],
        {-1: ManifestEntry, 2: DataFile},
        {0: ManifestEntryStatus, 101: FileFormat, 134: DataFileContent},
    )


@lru_cache(_SCHEMAS_MAX)
def _manifest_reader(avro_schema: str) -> Reader:
    return resolve_reader(
        AvroSchemaConversion().avro_to_iceberg(json.loads(avro_schema)),
        MANIFEST_LIST_FILE_SCHEMAS[_READ_VERSION],
        {-1: ManifestFile, 508: PartitionFieldSummary},
        {517: ManifestContent},
    )
