"""The live files of a lake table's snapshots, from their manifests.

Manifests never change after writing, and each is decoded once. This module keeps two views:
- `data_files` and similar functions have all columns for pruning a read. The process keeps this
  view, bounded by files and not by manifests, whose sizes differ a thousandfold.
- `LiveFilesCache` has only the places of a bucket's rows, for a single lake table with writes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestFile,
)
from pyiceberg.table import Table
from pyiceberg.table.refs import MAIN_BRANCH

from streamhouse.core.errors import CorruptDataError, UnsupportedError
from streamhouse.core.model.schema import TIMESTAMP_COLUMN
from streamhouse.lake.files._field_ids import (
    BUCKET_FIELD_ID,
    OFFSET_FIELD_ID,
    TIMESTAMP_FIELD_ID,
)
from streamhouse.lake.files.bounds import integer_bound
from streamhouse.lake.files.deletes._deletion_vectors import DeletionVector
from streamhouse.lake.files.deletes.deleted_positions import DeleteFile, Deletes
from streamhouse.lake.files.position_deletes import PATH_FIELD_ID, LakeFile
from streamhouse.lake.snapshots._manifests import (
    ManifestRow,
    first_row_id_of,
    live_entries,
    live_rows,
    manifests_of,
    with_row_ids,
)

__all__ = [
    "DeleteEntry",
    "DeleteIndex",
    "EntryKey",
    "IntegerBounds",
    "LiveFiles",
    "LiveFilesCache",
    "ManifestFiles",
    "SystemBounds",
    "added_files",
    "data_files",
    "delete_files",
    "deletes_of",
    "entry_key",
    "is_vector",
    "live_data_files",
    "live_position_deletes",
    "may_name",
    "newest_row_us",
    "path_bounds",
    "unreadable_because",
    "unreadable_format",
]

FILES_KEPT_MAX: Final = 200_000
_ADDED: Final = "#added"
# Where format version 3 puts the place of a deletion vector in a file's record.
_REFERENCED, _OFFSET, _SIZE = 17, 18, 19

EntryKey = tuple[str, str | None]
_LOWEST: Final = -(2**63)
_HIGHEST: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class IntegerBounds:
    """Smallest and largest value of one integer column in every file of a manifest.

    Files without bounds get the bounds of all 64-bit integers, and `is_known` False.
    """

    lower: npt.NDArray[np.int64]
    upper: npt.NDArray[np.int64]
    is_known: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFiles:
    """The live data files of a manifest, column by column; immutable and cacheable.

    `partitions` holds each distinct partition once and `partition_codes` points into it. Bounds
    are Iceberg's single-value serialisation by field id.
    """

    paths: Sequence[str]
    file_bytes: Sequence[int]
    row_counts: Sequence[int]
    row_group_starts: Sequence[Sequence[int] | None]
    sequences: Sequence[int]
    formats: Sequence[str]
    spec_id: int
    partitions: Sequence[tuple[Any, ...]]
    partition_codes: npt.NDArray[np.int64]
    lower_bounds: Sequence[Mapping[int, bytes]]
    upper_bounds: Sequence[Mapping[int, bytes]]
    null_counts: Sequence[Mapping[int, int]]
    _decoded: dict[int, IntegerBounds] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: ManifestFile, rows: Sequence[ManifestRow]) -> ManifestFiles:
        """Return these files of a manifest."""
        inherited = manifest.sequence_number or 0
        codes: dict[tuple[Any, ...], int] = {}
        return cls(
            paths=[row.path for row in rows],
            file_bytes=[row.file_bytes for row in rows],
            row_counts=[row.row_count for row in rows],
            row_group_starts=[row.row_group_starts for row in rows],
            # A sequence number that is absent is the manifest's own (spec: inheritance).
            sequences=[inherited if row.sequence is None else row.sequence for row in rows],
            formats=[row.format for row in rows],
            spec_id=manifest.partition_spec_id,
            partition_codes=np.array(
                [codes.setdefault(row.partition, len(codes)) for row in rows], dtype=np.int64
            ),
            partitions=list(codes),
            lower_bounds=[row.lower_bounds for row in rows],
            upper_bounds=[row.upper_bounds for row in rows],
            null_counts=[row.null_counts for row in rows],
        )

    def __len__(self) -> int:
        return len(self.paths)

    def integer_bounds(self, field_id: int) -> IntegerBounds:
        """Return the bounds of an integer, date or timestamp column, decoded once."""
        if field_id not in self._decoded:
            self._decoded[field_id] = IntegerBounds(
                self._integers(self.lower_bounds, field_id, unknown=_LOWEST),
                self._integers(self.upper_bounds, field_id, unknown=_HIGHEST),
                np.fromiter(
                    (
                        field_id in low and field_id in high
                        for low, high in zip(self.lower_bounds, self.upper_bounds, strict=True)
                    ),
                    dtype=np.bool_,
                    count=len(self),
                ),
            )
        return self._decoded[field_id]

    def _integers(
        self, bounds: Sequence[Mapping[int, bytes]], field_id: int, *, unknown: int
    ) -> npt.NDArray[np.int64]:
        # As `integer_bound` does, for thousands of files.
        integers = (
            unknown if raw is None else int.from_bytes(raw, "little", signed=True)
            for raw in (of_file.get(field_id) for of_file in bounds)
        )
        return np.fromiter(integers, dtype=np.int64, count=len(bounds))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteEntry:
    """A file of position deletes, or a deletion vector. It applies to data files of the same or a
    lower sequence whose path lies between the bounds; None is unbounded.
    """

    deletes: Deletes
    sequence: int
    path_lower: str | None
    path_upper: str | None

    def may_apply(self, path: str, sequence: int) -> bool:
        """Return False if no row of the data file can be deleted by this file."""
        return (
            sequence <= self.sequence
            and (self.path_lower is None or self.path_lower <= path)
            and (self.path_upper is None or path <= self.path_upper)
        )


class DeleteIndex:
    """Deletes by the data files in their reach.

    Raises `CorruptDataError` for two deletion vectors of one data file.
    """

    def __init__(self, entries: Iterable[DeleteEntry]) -> None:
        self._of_one_file: dict[str, list[DeleteEntry]] = {}
        self._of_several: list[DeleteEntry] = []
        self._vectors: dict[str, DeleteEntry] = {}
        for entry in entries:
            vector = entry.deletes
            if isinstance(vector, DeletionVector):
                other = self._vectors.setdefault(vector.data_path, entry)
                if other is not entry:
                    raise CorruptDataError(
                        f"lake file '{vector.data_path}' has two deletion vectors, in"
                        f" '{other.deletes.path}' and '{vector.path}'; only one may be in a"
                        " snapshot: roll the table back to a snapshot before"
                    )
            elif entry.path_lower is not None and entry.path_lower == entry.path_upper:
                self._of_one_file.setdefault(entry.path_lower, []).append(entry)
            else:
                self._of_several.append(entry)

    def applying_to(self, path: str, sequence: int) -> list[DeleteEntry]:
        """Return the deletes that may hide rows of a data file.

        A deletion vector has the deletes of every file of position deletes, too.
        """
        vector = self._vectors.get(path)
        if vector is not None and vector.may_apply(path, sequence):
            return [vector]
        candidates = [*self._of_one_file.get(path, ()), *self._of_several]
        return [entry for entry in candidates if entry.may_apply(path, sequence)]


class _Cache:
    """Decoded manifests by path, least recently used first; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: OrderedDict[str, Any] = OrderedDict()
        self._file_count = 0

    def get(self, path: str) -> Any:
        with self._lock:
            if path in self._items:
                self._items.move_to_end(path)
            return self._items.get(path)

    def put(self, path: str, value: Any) -> None:
        with self._lock:
            if path not in self._items:
                self._items[path] = value
                self._file_count += len(value)
            while self._file_count > FILES_KEPT_MAX and len(self._items) > 1:
                self._file_count -= len(self._items.popitem(last=False)[1])


_cache: Final = _Cache()


def data_files(io: FileIO, manifest: ManifestFile) -> ManifestFiles:
    """Return the live data files of a data manifest."""
    files: ManifestFiles | None = _cache.get(manifest.manifest_path)
    if files is None:
        files = ManifestFiles.of(manifest, live_rows(io, manifest))
        _cache.put(manifest.manifest_path, files)
    return files


def added_files(io: FileIO, manifest: ManifestFile) -> ManifestFiles:
    """Return the data files of a manifest added by the snapshot of its writing."""
    key = f"{manifest.manifest_path}{_ADDED}"
    files: ManifestFiles | None = _cache.get(key)
    if files is None:
        files = ManifestFiles.of(manifest, live_rows(io, manifest, only_added=True))
        _cache.put(key, files)
    return files


def delete_files(io: FileIO, manifest: ManifestFile, *, table: str) -> Sequence[DeleteEntry]:
    """Return the live delete files of a delete manifest.

    Raises `UnsupportedError` for equality deletes: leaving them out would return deleted rows.
    """
    entries: Sequence[DeleteEntry] | None = _cache.get(manifest.manifest_path)
    if entries is None:
        entries = [_delete_entry(entry, table=table) for entry in live_entries(io, manifest)]
        _cache.put(manifest.manifest_path, entries)
    return entries


def unreadable_because(file: DataFile) -> str:
    """Return why a lake table with this file is unreadable; empty for a readable file.

    Commits are checked by the same rule
    (`_outside_changes.py`).
    """
    if file.content is DataFileContent.EQUALITY_DELETES:
        return (
            f"file '{file.file_path}' has equality deletes, which not every engine reads, and"
            " Streamhouse does not; use position deletes or copy-on-write"
        )
    if is_vector(file):
        is_placed = None not in (file[_REFERENCED], file[_OFFSET], file[_SIZE])
        return "" if is_placed else f"deletion vector '{file.file_path}' does not say of which rows"
    return unreadable_format(file.file_path, file.file_format)


def unreadable_format(path: str, file_format: str) -> str:
    """Return why a file of this format cannot be read; empty if it can.

    Iceberg's names of formats have no case: DuckDB writes them small.
    """
    if file_format.upper() == FileFormat.PARQUET:
        return ""
    return f"file '{path}' is {file_format}, and Streamhouse reads lake files in Parquet only"


def _delete_entry(entry: ManifestEntry, *, table: str) -> DeleteEntry:
    file = entry.data_file
    if problem := unreadable_because(file):
        raise UnsupportedError(f"lake table '{table}': {problem}")
    lower, upper = path_bounds(file)
    return DeleteEntry(
        deletes=deletes_of(file),
        sequence=entry.sequence_number or 0,
        path_lower=lower,
        path_upper=upper,
    )


def is_vector(file: DataFile) -> bool:
    """Whether a manifest's entry is a deletion vector."""
    return (
        file.content is DataFileContent.POSITION_DELETES and file.file_format is FileFormat.PUFFIN
    )


def entry_key(file: DataFile) -> EntryKey:
    """Return what no two live entries of a snapshot share.

    It is a file's path; a Puffin file has vectors, each with the data file that it is for.
    """
    return file.file_path, file[_REFERENCED] if is_vector(file) else None


def deletes_of(file: DataFile) -> Deletes:
    """Return the deletes of a manifest's entry."""
    if not is_vector(file):
        return DeleteFile(path=file.file_path, file_bytes=file.file_size_in_bytes)
    return DeletionVector(
        path=file.file_path,
        file_bytes=file.file_size_in_bytes,
        data_path=file[_REFERENCED],
        offset=file[_OFFSET],
        size_bytes=file[_SIZE],
        position_count=file.record_count,
    )


def path_bounds(file: DataFile) -> tuple[str | None, str | None]:
    """Return the least and greatest data path a delete file names, None where not known."""
    if is_vector(file):
        return file[_REFERENCED], file[_REFERENCED]
    lower = (file.lower_bounds or {}).get(PATH_FIELD_ID)
    upper = (file.upper_bounds or {}).get(PATH_FIELD_ID)
    return (
        None if lower is None else lower.decode("utf-8", "replace"),
        None if upper is None else upper.decode("utf-8", "replace"),
    )


def may_name(file: DataFile, path: str) -> bool:
    """Return False if a delete file names no row of the data file."""
    lower, upper = path_bounds(file)
    return (lower is None or lower <= path) and (upper is None or path <= upper)


class SystemBounds(NamedTuple):
    """The bounds of a data file's system columns; None is unknown.

    `bucket` is the bucket of all rows, None for possible rows of several.
    """

    bucket: int | None
    first_offset: int | None
    last_offset: int | None
    first_timestamp_us: int | None
    last_timestamp_us: int | None

    @classmethod
    def of(
        cls, lower: Mapping[int, bytes] | None, upper: Mapping[int, bytes] | None
    ) -> SystemBounds:
        """Read the bounds of a manifest's entry."""
        lower, upper = lower or {}, upper or {}
        bucket = lower.get(BUCKET_FIELD_ID)
        return cls(
            None if bucket != upper.get(BUCKET_FIELD_ID) else integer_bound(bucket),
            integer_bound(lower.get(OFFSET_FIELD_ID)),
            integer_bound(upper.get(OFFSET_FIELD_ID)),
            integer_bound(lower.get(TIMESTAMP_FIELD_ID)),
            integer_bound(upper.get(TIMESTAMP_FIELD_ID)),
        )


class _BucketFiles:
    """The data files of one manifest, by bucket; those that have several are `shared`."""

    def __init__(self, io: FileIO, manifest: ManifestFile) -> None:
        self.by_bucket: dict[int, list[LakeFile]] = defaultdict(list)
        self.shared: list[LakeFile] = []
        for row in with_row_ids(manifest, live_rows(io, manifest)):
            bounds = SystemBounds.of(row.lower_bounds, row.upper_bounds)
            bucket, first, last = bounds.bucket, bounds.first_offset, bounds.last_offset
            file = LakeFile(
                path=row.path,
                file_format=row.format,
                spec_id=manifest.partition_spec_id,
                partition=row.partition,
                first_offset=0 if first is None else first,
                last_offset=_HIGHEST - 1 if last is None else last,
                is_shared=bucket is None,
                first_row_id=row.first_row_id,
            )
            (self.shared if bucket is None else self.by_bucket[bucket]).append(file)

    @property
    def files(self) -> Iterable[LakeFile]:
        for members in self.by_bucket.values():
            yield from members
        yield from self.shared


class LiveFiles:
    """The live data files of a snapshot, for finding rows."""

    def __init__(self, manifests: Iterable[_BucketFiles]) -> None:
        self._manifests = tuple(manifests)

    def of_bucket(self, bucket: int, *, before: int) -> tuple[LakeFile, ...]:
        """Return the files that may have rows of `bucket` with offsets below `before`."""
        return tuple(
            file
            for manifest in self._manifests
            for members in (manifest.by_bucket.get(bucket, ()), manifest.shared)
            for file in members
            if file.first_offset < before
        )

    def missing(self, paths: Iterable[str]) -> set[str]:
        """Return the members of `paths` without a live data file."""
        return set(paths) - {file.path for m in self._manifests for file in m.files}


class LiveFilesCache:
    """Caches the manifests of a lake table's last snapshot. Not thread-safe.

    A round reads only manifests newer than the last round: its work does not grow with the table.
    """

    def __init__(self) -> None:
        self._manifests: dict[tuple[str, int | None], _BucketFiles] = {}

    def of(self, table: Table) -> LiveFiles:
        """Return the live files of the table's current snapshot."""
        manifests = {}
        for manifest in _live_manifests(table):
            if manifest.content is ManifestContent.DATA:
                # An upgrade to format version 3 gives a manifest its row ids later.
                key = manifest.manifest_path, first_row_id_of(manifest)
                manifests[key] = self._manifests.get(key) or _BucketFiles(table.io, manifest)
        self._manifests = manifests
        return LiveFiles(manifests.values())


def live_data_files(table: Table) -> list[DataFile]:
    """Return all files of the current snapshot, data files and delete files."""
    return [
        entry.data_file
        for manifest in _live_manifests(table)
        for entry in live_entries(table.io, manifest)
    ]


def live_position_deletes(table: Table) -> list[DataFile]:
    """Return the deletion vectors and position delete files of the current snapshot."""
    return [
        entry.data_file
        for manifest in _live_manifests(table)
        if manifest.content is ManifestContent.DELETES
        for entry in live_entries(table.io, manifest)
        if entry.data_file.content is DataFileContent.POSITION_DELETES
    ]


def newest_row_us(table: Table) -> int:
    """Return the time of the newest row in the current snapshot's files; 0 without rows."""
    newest_us = 0
    for file in live_data_files(table):
        if file.content is DataFileContent.DATA and file.record_count:
            bounds = SystemBounds.of(file.lower_bounds, file.upper_bounds)
            last_us = bounds.last_timestamp_us
            # Another engine's file may be without bounds.
            newest_us = max(newest_us, _newest_of(table, file) if last_us is None else last_us)
    return newest_us


def _newest_of(table: Table, file: DataFile) -> int:
    with table.io.new_input(file.file_path).open() as stream:
        times = pq.read_table(stream, columns=[TIMESTAMP_COLUMN]).column(TIMESTAMP_COLUMN)
    return int(pc.max(times.cast(pa.int64())).as_py())


def _live_manifests(table: Table) -> list[ManifestFile]:
    snapshot = table.metadata.snapshot_by_name(MAIN_BRANCH)
    return [
        manifest
        for manifest in ([] if snapshot is None else manifests_of(table.io, snapshot))
        if manifest.has_added_files() or manifest.has_existing_files()
    ]
