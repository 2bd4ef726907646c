"""The files of a scan, a page at a time: data files for the condition, each with its delete files.

Manifests are read in groups, and a page ends after a number of files or of judged conditions. So
the memory of a page is bounded by what the manifest list says, before a manifest is read.

Invariant: the pages of a scan have every file with a row for the condition once. A snapshot's
manifests never change, so the same place of a page always begins the same page.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from pyiceberg.io import FileIO
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
)
from pyiceberg.table import ManifestGroupPlanner
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Snapshot, ancestors_between_ids

from streamhouse.core.errors import UnsupportedError
from streamhouse.lake._scan_request import ScanRequest
from streamhouse.lake.files._bounded_io import check_paths
from streamhouse.lake.snapshots._manifests import live_entries, manifests_of
from streamhouse.lake.snapshots.live_files import is_vector, path_bounds

__all__ = ["FIRST", "PlannedFile", "ScanPage", "ScanPlace", "page_at"]

FILES_MAX: Final = 10_000
DELETE_FILES_MAX: Final = 50_000
REFERENCES_MAX: Final = 1_000_000
_RESIDUAL_BYTES_MAX: Final = 16 << 20
JUDGED_MAX: Final = 500_000
GROUP_MANIFESTS: Final = 64


class ScanPlace(NamedTuple):
    """Where a page begins: a data manifest, and how many of its files are in earlier pages."""

    manifest: int
    files: int


FIRST: Final = ScanPlace(0, 0)


class PlannedFile(NamedTuple):
    """A data file, and the delete files with deletes of its rows, if any."""

    file: DataFile
    deletes: Sequence[DataFile]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanPage:
    """Files of a scan, and the place of the next page; None after the last."""

    files: Sequence[PlannedFile]
    next_place: ScanPlace | None


def page_at(
    name: str, metadata: TableMetadata, io: FileIO, request: ScanRequest, place: ScanPlace
) -> ScanPage:
    """Return the page of a scan that begins at `place`.

    Raises `UnsupportedError` if a page needs more than 50,000 delete files.
    """
    if request.snapshot is None:
        return ScanPage(files=(), next_place=None)
    planner = ManifestGroupPlanner(metadata, io, request.condition)
    if request.start_snapshot_id is None:
        manifests, appended = manifests_of(io, request.snapshot), None
    else:
        manifests, appended = _appended(metadata, io, request.snapshot, request.start_snapshot_id)
    data = [m for m in manifests if m.content == ManifestContent.DATA]
    files_max = min(FILES_MAX, _RESIDUAL_BYTES_MAX // request.residual_bytes)
    entries: list[_Entry] = []
    judged = 0
    for start, group in _groups(data, place.manifest):
        skipped = place.files if start == place.manifest else 0
        matching = _matching(planner, io, group, appended)
        entries += (
            _Entry(start, number, entry)
            for number, entry in enumerate(matching)
            if number >= skipped
        )
        judged += sum(map(_file_count, group)) * (1 + request.parts)
        end = start + len(group)
        if len(entries) >= files_max or judged >= JUDGED_MAX:
            break
    else:
        end = len(data)
    page = entries[:files_max]
    deletes = _Deletes(metadata, page)
    if appended is None:
        deletes.read(name, io, (m for m in manifests if m.content == ManifestContent.DELETES))
    files: list[PlannedFile] = []
    references = 0
    for planned in page:
        of_file = deletes.of(planned.entry)
        references += len(of_file)
        if files and references > REFERENCES_MAX:
            break
        files.append(PlannedFile(planned.entry.data_file, of_file))
    if len(files) < len(entries):
        after = entries[len(files)]
        return ScanPage(files=files, next_place=ScanPlace(after.group, after.number))
    return ScanPage(files=files, next_place=ScanPlace(end, 0) if end < len(data) else None)


class _Entry(NamedTuple):
    group: int
    number: int
    entry: ManifestEntry


def _groups(
    manifests: Sequence[ManifestFile], start: int
) -> Iterator[tuple[int, Sequence[ManifestFile]]]:
    """Yield groups of manifests from `start` on, which end after a number of manifests or files."""
    end, files = start, 0
    for end, manifest in enumerate(manifests[start:], start + 1):
        files += _file_count(manifest)
        if files >= FILES_MAX or end - start >= GROUP_MANIFESTS:
            yield start, manifests[start:end]
            start, files = end, 0
    if start < end:
        yield start, manifests[start:end]


def _file_count(manifest: ManifestFile) -> int:
    """Return how many live files a manifest has; engines may leave the counts out in version 1."""
    counts = (manifest.added_files_count, manifest.existing_files_count)
    return sum(FILES_MAX if count is None else count for count in counts)


def _matching(
    planner: ManifestGroupPlanner,
    io: FileIO,
    manifests: Sequence[ManifestFile],
    appended: set[int] | None,
) -> list[ManifestEntry]:
    entries = [
        entry
        for of_manifest in planner.plan_manifest_entries(manifests)
        for entry in of_manifest
        if appended is None
        or (entry.status == ManifestEntryStatus.ADDED and entry.snapshot_id in appended)
    ]
    check_paths(io, (entry.data_file.file_path for entry in entries))
    return entries


def _appended(
    metadata: TableMetadata, io: FileIO, end: Snapshot, start_id: int
) -> tuple[list[ManifestFile], set[int]]:
    """Return the manifests with the files appended after a snapshot, and the appending snapshots.

    Other snapshots, such as compactions and overwrites, append nothing (as in every Iceberg
    library).
    """
    snapshots = [
        snapshot
        for snapshot in ancestors_between_ids(start_id, end.snapshot_id, metadata)
        if snapshot.summary is not None and snapshot.summary.operation == Operation.APPEND
    ]
    ids = {snapshot.snapshot_id for snapshot in snapshots}
    manifests = {
        manifest.manifest_path: manifest
        for snapshot in snapshots
        for manifest in manifests_of(io, snapshot)
        if manifest.content == ManifestContent.DATA and manifest.added_snapshot_id in ids
    }
    return list(manifests.values()), ids


@dataclass(slots=True)
class _Deletes:
    """The delete files for the data files of a page; no others are kept."""

    metadata: TableMetadata
    page: Iterable[_Entry]
    _paths: set[str] = field(init=False)
    _partitions: set[Any] = field(init=False)
    _kept: dict[Any, list[ManifestEntry]] = field(init=False)
    """By the data file or partition with the deleted rows; equality deletes by `_equality` keys."""

    def __post_init__(self) -> None:
        self._paths = {planned.entry.data_file.file_path for planned in self.page}
        self._partitions = {_partition(planned.entry.data_file) for planned in self.page}
        self._kept = defaultdict(list)

    def read(self, name: str, io: FileIO, manifests: Iterable[ManifestFile]) -> None:
        """Read delete manifests; raises `UnsupportedError` for too many delete files."""
        count = 0
        for manifest in manifests if self._paths else ():
            for entry in live_entries(io, manifest):
                key = self._key(entry.data_file)
                if key is not None:
                    self._kept[key].append(entry)
                    count += 1
            if count > DELETE_FILES_MAX:
                raise UnsupportedError(
                    f"a scan of lake table '{name}' needs more than {DELETE_FILES_MAX} delete files"
                    f" for {len(self._paths)} data files: compact the table, or plan locally"
                )

    def of(self, entry: ManifestEntry) -> list[DataFile]:
        """Return the delete files that may delete rows of a data file, in a fixed order."""
        path, partition = entry.data_file.file_path, _partition(entry.data_file)
        sequence = entry.sequence_number or 0
        positions = [
            deletes.data_file
            for key in (path, partition)
            for deletes in self._kept.get(key, ())
            if (deletes.sequence_number or 0) >= sequence and _may_name(deletes.data_file, path)
        ]
        # A deletion vector has the deletes of every older file of position deletes, too.
        vectors = [file for file in positions if is_vector(file)]
        equality = [
            deletes.data_file
            for key in (_equality(partition), _equality(None))
            for deletes in self._kept.get(key, ())
            if (deletes.sequence_number or 0) > sequence
        ]
        return sorted((vectors or positions) + equality, key=lambda file: file.file_path)

    def _key(self, file: DataFile) -> Any:
        """Return the key of a delete file; None for a delete file of no data file of the page."""
        partition = _partition(file)
        if file.content == DataFileContent.EQUALITY_DELETES:
            if self.metadata.specs()[file.spec_id].is_unpartitioned():
                return _equality(None)
            return _equality(partition) if partition in self._partitions else None
        lower, upper = path_bounds(file)
        if lower is not None and lower == upper:
            return lower if lower in self._paths else None
        return partition if partition in self._partitions else None


def _partition(file: DataFile) -> tuple[int, Any]:
    return file.spec_id, file.partition


def _equality(partition: tuple[int, Any] | None) -> tuple[str, Any]:
    return "equality", partition


def _may_name(file: DataFile, path: str) -> bool:
    """Whether a file of position deletes may have deletes for a data file."""
    lower, upper = path_bounds(file)
    return (lower is None or lower <= path) and (upper is None or path <= upper)
