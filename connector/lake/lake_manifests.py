"""Manifests decoded once per process: they never change after they are written.

A manifest becomes columns (`ManifestFiles`) for its data files, or `DeleteEntry`s. The cache is
bounded by files, not by manifests, because their sizes differ a thousandfold.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFileContent, FileFormat, ManifestEntry, ManifestFile

from streamhouse.connector.lake.lake_pruning import ManifestFiles
from streamhouse.storage_service.errors import UnsupportedError
from streamhouse.storage_service.lake.files.bounded_io import check_paths
from streamhouse.storage_service.lake.snapshots.fast_avro import (
    ADDED_STATUS,
    DELETED_STATUS,
    read_manifest,
)
from streamhouse.storage_service.lake.snapshots.manifests import (
    EntryFacts,
    check_manifest,
    live_entries,
)

__all__ = ["DeleteEntry", "DeleteIndex", "added_files", "data_files", "delete_files"]

FILES_KEPT_MAX: Final = 200_000
_PATH_FIELD_ID: Final = 2147483546
_ADDED: Final = "#added"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteEntry:
    """One file of position deletes. It applies to data files of the same or a lower sequence
    whose path lies between the bounds; None is unbounded.
    """

    path: str
    file_bytes: int
    sequence: int
    row_count: int
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
    """Delete files by the data files they may apply to."""

    def __init__(self, entries: Iterable[DeleteEntry]) -> None:
        self._of_one_file: dict[str, list[DeleteEntry]] = {}
        self._of_several: list[DeleteEntry] = []
        for entry in entries:
            if entry.path_lower is not None and entry.path_lower == entry.path_upper:
                self._of_one_file.setdefault(entry.path_lower, []).append(entry)
            else:
                self._of_several.append(entry)

    def applying_to(self, path: str, sequence: int) -> list[DeleteEntry]:
        """Return the delete files that may hide rows of a data file."""
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
    found = _cache.get(manifest.manifest_path)
    if found is None:
        found = _data_columns(io, manifest)
        _cache.put(manifest.manifest_path, found)
    files: ManifestFiles = found
    return files


def added_files(io: FileIO, manifest: ManifestFile) -> ManifestFiles:
    """Return the data files of a manifest that the snapshot which wrote it added."""
    key = f"{manifest.manifest_path}{_ADDED}"
    found = _cache.get(key)
    if found is None:
        found = _data_columns(io, manifest, only_added=True)
        _cache.put(key, found)
    files: ManifestFiles = found
    return files


def delete_files(io: FileIO, manifest: ManifestFile, *, table: str) -> Sequence[DeleteEntry]:
    """Return the live delete files of a delete manifest.

    Raises `UnsupportedError` for equality deletes and deletion vectors: leaving them out would
    return deleted rows.
    """
    found = _cache.get(manifest.manifest_path)
    if found is None:
        found = [_delete_entry(entry, table=table) for entry in live_entries(io, manifest)]
        _cache.put(manifest.manifest_path, found)
    entries: Sequence[DeleteEntry] = found
    return entries


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Stop the garbage collector from walking, again and again, what is all still in use."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _data_columns(io: FileIO, manifest: ManifestFile, *, only_added: bool = False) -> ManifestFiles:
    codes: dict[tuple[Any, ...], int] = {}
    with _collector_paused():
        rows = list(read_manifest(io, manifest))
        check_manifest(manifest, (EntryFacts(r.status, r.snapshot_id, r.row_count) for r in rows))
        entries = [
            row
            for row in rows
            if (row.status == ADDED_STATUS if only_added else row.status != DELETED_STATUS)
        ]
    check_paths(io, (entry.path for entry in entries))
    inherited = manifest.sequence_number or 0
    return ManifestFiles(
        paths=[entry.path for entry in entries],
        file_bytes=[entry.file_bytes for entry in entries],
        row_counts=[entry.row_count for entry in entries],
        row_group_starts=[entry.row_group_starts for entry in entries],
        # A sequence number that is absent is the manifest's own (spec: inheritance).
        sequences=[inherited if e.sequence is None else e.sequence for e in entries],
        formats=[entry.format for entry in entries],
        spec_id=manifest.partition_spec_id,
        partition_codes=np.array(
            [codes.setdefault(entry.partition, len(codes)) for entry in entries], dtype=np.int64
        ),
        partitions=list(codes),
        lower_bounds=[entry.lower_bounds for entry in entries],
        upper_bounds=[entry.upper_bounds for entry in entries],
        null_counts=[entry.null_counts for entry in entries],
    )


def _delete_entry(entry: ManifestEntry, *, table: str) -> DeleteEntry:
    file = entry.data_file
    if file.content == DataFileContent.EQUALITY_DELETES:
        raise UnsupportedError(
            f"lake table '{table}' has equality deletes (file '{file.file_path}'), which"
            " Streamhouse does not read: rewrite them with the engine that wrote them"
        )
    if file.file_format != FileFormat.PARQUET:
        raise UnsupportedError(
            f"lake table '{table}' has deletes in {file.file_format} (file '{file.file_path}');"
            " Streamhouse reads position deletes in Parquet only"
        )
    lower = (file.lower_bounds or {}).get(_PATH_FIELD_ID)
    upper = (file.upper_bounds or {}).get(_PATH_FIELD_ID)
    return DeleteEntry(
        path=file.file_path,
        file_bytes=file.file_size_in_bytes,
        sequence=entry.sequence_number or 0,
        row_count=file.record_count,
        path_lower=None if lower is None else lower.decode("utf-8", "replace"),
        path_upper=None if upper is None else upper.decode("utf-8", "replace"),
    )
