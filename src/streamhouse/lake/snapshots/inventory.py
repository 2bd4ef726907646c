"""The contents of a snapshot, for planning maintenance: data files and deletes.

Manifests never change, so each is read once in a worker's life; the data files named by a delete
file are remembered too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

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
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.typedef import Record

from streamhouse.core.model.lake.facts import ORPHANS_REMOVED_PROPERTY, VERSION_3
from streamhouse.lake.files.deletes._deletion_vectors import DeletionVector
from streamhouse.lake.files.deletes.deleted_positions import Deletes, data_paths_of
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.files.partition_layout import PartitionValues
from streamhouse.lake.files.row_lineage import FileLineage
from streamhouse.lake.iceberg_errors import lake_errors
from streamhouse.lake.snapshots._manifests import (
    first_row_id_of,
    live_entries,
    manifests_of,
    row_id_of,
)
from streamhouse.lake.snapshots.live_files import (
    SystemBounds,
    deletes_of,
    is_vector,
    path_bounds,
    unreadable_because,
)

__all__ = [
    "Head",
    "Inventory",
    "InventoryReader",
    "LiveDeletes",
    "LiveFile",
    "head_of",
]

# Files cached of a table between two inventories; beyond, manifests are read again.
FILES_REMEMBERED_MAX: Final = 50_000

_ManifestKey = tuple[str, int | None]
_Partition = tuple[int, PartitionValues]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A lake table in its metadata alone; zero and None without a snapshot.

    `file_count` includes delete files, `row_count` includes deleted rows. `committed_ms` is the
    time of the current snapshot, `orphans_removed_ms` the time of the last search for orphans.
    """

    sequence_number: int
    file_count: int
    row_count: int
    live_row_count: int
    snapshot_count: int
    committed_ms: int | None
    orphans_removed_ms: int | None


def head_of(table: Table) -> Head:
    """Return the facts in the table's metadata, without reading any file."""
    metadata = table.metadata
    snapshot = metadata.snapshot_by_name(MAIN_BRANCH)
    totals: Mapping[str, str] = {}
    if snapshot is not None and snapshot.summary is not None:
        totals = snapshot.summary.additional_properties
    row_count = int(totals.get("total-records", "0"))
    looked_ms = metadata.properties.get(ORPHANS_REMOVED_PROPERTY)
    return Head(
        sequence_number=0 if snapshot is None else snapshot.sequence_number or 0,
        file_count=sum(int(totals.get(f"total-{k}-files", "0")) for k in ("data", "delete")),
        row_count=row_count,
        live_row_count=max(0, row_count - int(totals.get("total-position-deletes", "0"))),
        snapshot_count=len(metadata.snapshots),
        committed_ms=None if snapshot is None else snapshot.timestamp_ms,
        orphans_removed_ms=None if looked_ms is None else int(looked_ms),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFile:
    """One data file of a snapshot, with the `deletes` of its rows.

    `bucket` is None for a file with possible rows of several buckets; `end_offset` and the times
    are None for a file without an end offset and the times of its oldest and newest rows. A file
    that `is_fixed` is left alone: other deletes, such as equality deletes, apply to the file.
    `lineage` is what its rows inherit in format version 3.
    """

    path: str
    spec_id: int
    partition: PartitionValues
    bucket: int | None
    start_offset: int
    size_bytes: int
    row_count: int
    end_offset: int | None = None
    first_timestamp_us: int | None = None
    last_timestamp_us: int | None = None
    deleted_rows: int = 0
    deletes: tuple[Deletes, ...] = ()
    is_fixed: bool = False
    lineage: FileLineage | None = None

    @property
    def live_bytes(self) -> int:
        """The approximate size of the file without its deleted rows."""
        live_rows = max(self.row_count - self.deleted_rows, 0)
        return self.size_bytes * live_rows // max(self.row_count, 1)

    @property
    def deleted_share(self) -> float:
        """The share of its rows that are deleted."""
        return self.deleted_rows / max(self.row_count, 1)

    def slice_of(self, slice_us: int | None) -> int | None:
        """Return the slice of time of the newest row; None without slices."""
        if slice_us is None or self.last_timestamp_us is None:
            return None
        return self.last_timestamp_us // slice_us


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveDeletes:
    """Position deletes of a snapshot, and the data files, live or not, that need them.

    Delete files are not `is_mergeable` in format version 3, which takes no new ones.
    """

    deletes: Deletes
    spec_id: int
    partition: PartitionValues
    size_bytes: int
    row_count: int
    data_paths: frozenset[str]
    is_mergeable: bool = True

    @property
    def is_vector(self) -> bool:
        """Whether it is a deletion vector, of which a data file has one at most."""
        return isinstance(self.deletes, DeletionVector)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The files of a snapshot. `data_files` has the entry of each data file, by path, and of each
    file of deletes, by the deletes: a Puffin file has several.
    """

    snapshot_id: int
    sequence_number: int
    files: tuple[LiveFile, ...] = field(repr=False)
    deletes: tuple[LiveDeletes, ...] = field(repr=False)
    data_files: Mapping[str | Deletes, DataFile] = field(repr=False)


class InventoryReader:
    """Reads the inventory of a lake table, again and again. Not thread-safe."""

    def __init__(self, filesystem: LakeFilesystem) -> None:
        self._filesystem = filesystem
        self._manifests: dict[_ManifestKey, list[ManifestEntry]] = {}
        self._names: dict[Deletes, Mapping[str, int]] = {}

    def read(self, table: Table) -> Inventory | None:
        """Return the files of the table's current snapshot, None when it has none."""
        snapshot = table.metadata.snapshot_by_name(MAIN_BRANCH)
        if snapshot is None:
            return None
        # A catalog with an old state may name an expired snapshot.
        with lake_errors(f"read the files of lake table '{'.'.join(table.name())}'"):
            return self._read(table, snapshot)

    def _read(self, table: Table, snapshot: Snapshot) -> Inventory:
        entries_by_manifest: dict[_ManifestKey, list[ManifestEntry]] = {}
        data: list[ManifestEntry] = []
        deletes: list[DataFile] = []
        for manifest in manifests_of(table.io, snapshot):
            # An upgrade to format version 3 gives a manifest its row ids later.
            key = manifest.manifest_path, first_row_id_of(manifest)
            entries = self._manifests.get(key) or _live_files(manifest, table.io)
            entries_by_manifest[key] = entries
            if manifest.content is ManifestContent.DATA:
                data += entries
            else:
                deletes += [entry.data_file for entry in entries]
        self._manifests = entries_by_manifest if len(data) <= FILES_REMEMBERED_MAX else {}
        foldable = [file for file in deletes if _is_foldable(file)]
        names = {deletes_of(file): self._names_in(file) for file in foldable}
        self._names = names
        # A vector has the deletes of every file of position deletes, too.
        replaced = {path_bounds(file)[0] for file in foldable if is_vector(file)}
        needed = {
            deletes: counts
            if isinstance(deletes, DeletionVector)
            else {path: count for path, count in counts.items() if path not in replaced}
            for deletes, counts in names.items()
        }
        is_fixed = _fixed_partitions(table, (file for file in deletes if not _is_foldable(file)))
        version = table.metadata.format_version
        files = [_live_file(entry, has_lineage=version >= VERSION_3) for entry in data]
        return Inventory(
            snapshot_id=snapshot.snapshot_id,
            sequence_number=snapshot.sequence_number or 0,
            files=tuple(_with_deletes(files, needed, is_fixed)),
            deletes=tuple(
                _live_deletes(
                    file,
                    needed[deletes_of(file)],
                    is_mergeable=version < VERSION_3,
                )
                for file in foldable
            ),
            data_files={
                **{entry.data_file.file_path: entry.data_file for entry in data},
                **{deletes_of(file): file for file in foldable},
            },
        )

    def _names_in(self, file: DataFile) -> Mapping[str, int]:
        """Return data path -> number of positions in a delete file."""
        lower, upper = path_bounds(file)
        if lower is not None and lower == upper:
            return {lower: file.record_count}
        cached_names = self._names.get(deletes_of(file))
        return (
            data_paths_of(self._filesystem, file.file_path)
            if cached_names is None
            else cached_names
        )


def _values(record: Record) -> PartitionValues:
    """Return the values of a partition in the order of its spec."""
    return tuple(record[position] for position in range(len(record)))


def _live_files(manifest: ManifestFile, io: FileIO) -> list[ManifestEntry]:
    if not (manifest.has_added_files() or manifest.has_existing_files()):
        return []
    return list(live_entries(io, manifest))


def _is_foldable(file: DataFile) -> bool:
    """Whether the file has position deletes that Streamhouse reads."""
    return file.content is DataFileContent.POSITION_DELETES and not unreadable_because(file)


def _fixed_partitions(table: Table, deletes: Iterable[DataFile]) -> set[_Partition] | None:
    """Return the partitions with unrewritable files, None for all partitions."""
    fixed: set[_Partition] = set()
    specs = table.metadata.specs()
    for file in deletes:
        if not specs[file.spec_id].fields:
            # Equality deletes of an unpartitioned spec apply everywhere.
            return None
        fixed.add((file.spec_id, _values(file.partition)))
    return fixed


def _live_file(entry: ManifestEntry, *, has_lineage: bool) -> LiveFile:
    file = entry.data_file
    bounds = SystemBounds.of(file.lower_bounds, file.upper_bounds)
    first, last = bounds.first_offset, bounds.last_offset
    return LiveFile(
        path=file.file_path,
        spec_id=file.spec_id,
        partition=_values(file.partition),
        bucket=None if first is None else bounds.bucket,
        start_offset=first or 0,
        size_bytes=file.file_size_in_bytes,
        row_count=file.record_count,
        end_offset=None if last is None else last + 1,
        first_timestamp_us=bounds.first_timestamp_us,
        last_timestamp_us=bounds.last_timestamp_us,
        is_fixed=file.file_format is not FileFormat.PARQUET,
        lineage=FileLineage(row_id_of(file), entry.sequence_number or 0) if has_lineage else None,
    )


def _live_deletes(file: DataFile, names: Mapping[str, int], *, is_mergeable: bool) -> LiveDeletes:
    return LiveDeletes(
        deletes=deletes_of(file),
        spec_id=file.spec_id,
        partition=_values(file.partition),
        size_bytes=file.file_size_in_bytes,
        row_count=file.record_count,
        data_paths=frozenset(names),
        is_mergeable=is_mergeable,
    )


def _with_deletes(
    files: Iterable[LiveFile],
    names: Mapping[Deletes, Mapping[str, int]],
    fixed: set[_Partition] | None,
) -> Iterable[LiveFile]:
    """Yield the files with their deletes."""
    applying: dict[str, list[tuple[Deletes, int]]] = defaultdict(list)
    for deletes, counts in names.items():
        for data_path, count in counts.items():
            applying[data_path].append((deletes, count))
    for file in files:
        ours = applying.get(file.path, ())
        yield replace(
            file,
            deleted_rows=sum(count for _, count in ours),
            deletes=tuple(deletes for deletes, _ in ours),
            is_fixed=file.is_fixed or fixed is None or (file.spec_id, file.partition) in fixed,
        )
