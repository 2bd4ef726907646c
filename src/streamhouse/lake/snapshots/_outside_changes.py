"""Rules for other engines' changes to the rows of a lake table, and the detection of changes.

Every row of a lake table is a row of the log and keeps its `__bucket` and `__offset`. Other engines
may move rows. `rows_stay_because` decides whether other engines may also delete and update rows.
Two functions enforce the rules:
- `check_outside_commit`, for commits through our REST catalog: forbidden commits do not land
- `outside_problem`, for commits past the REST catalog: rounds do not build on forbidden commits,
  and readers do not read them

Manifests show three facts: a commit adds no more rows than it removes, every new file is readable,
and its rows have buckets of the table and tiered offsets. A compaction (operation `replace`) loses
no more rows than were deleted before. Where rows must stay, other engines compact. Unchecked,
because only the files could tell: the rows are the same rows, each once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyiceberg.conversions import from_bytes
from pyiceberg.io import FileIO
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    ManifestContent,
    ManifestEntryStatus,
    ManifestFile,
)
from pyiceberg.schema import Schema as IcebergSchema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Snapshot

from streamhouse.core.errors import ForbiddenError
from streamhouse.core.model.lake.facts import CHANGED_OUTSIDE_PROPERTY, VERSION_3, LakeRole
from streamhouse.core.model.schema import (
    BUCKET_COLUMN,
    OFFSET_COLUMN,
    TIMESTAMP_COLUMN,
)
from streamhouse.core.model.table import TableInfo
from streamhouse.lake.snapshots._coverage import ancestors_of, facts_of
from streamhouse.lake.snapshots._manifests import (
    entries_of,
    live_entries,
    manifests_of,
)
from streamhouse.lake.snapshots.live_files import (
    EntryKey,
    entry_key,
    is_vector,
    path_bounds,
    unreadable_because,
)

__all__ = [
    "check_outside_commit",
    "outside_problem",
    "outside_properties",
    "rows_stay_because",
    "was_changed_outside",
]


def rows_stay_because(table: TableInfo, role: LakeRole) -> str:
    """Return why other engines may only compact this lake table of `table`, empty otherwise.

    Lookups, changes and other lake tables have copies of a row, and must stay true.
    """
    if role is LakeRole.CHANGES:
        return "the full history keeps every change for good; other engines may only compact it"
    if role is LakeRole.BATCH:
        return (
            f"the batch layout has the rows of '{table.path}', and no others; other engines may"
            " only compact it"
        )
    if table.is_primary_key_table:
        return (
            "rows of a table with a primary key are changed and deleted through the streamhouse"
            " service only (StreamhouseClient.upsert and delete, in Spark Table.merge, update and"
            " delete), for lookups and the changelog go by it; other engines may only compact it"
        )
    if table.properties().has_batch_layout:
        return (
            "the table has a batch layout, which would keep the rows: drop the layout"
            " (table.datalake.batch-layout.*), change the rows, and give the table the layout again"
        )
    return ""


def check_outside_commit(
    name: str,
    metadata: TableMetadata,
    snapshots: Sequence[Snapshot],
    table: TableInfo,
    role: LakeRole,
    *,
    covered: Mapping[int, int],
    io: FileIO,
) -> None:
    """Refuse a forbidden commit of `snapshots`, newest first, by another engine.

    Their files must be rows of `table` below `covered`. Reads the manifests added and removed by
    the snapshots.

    Raises `ForbiddenError`.
    """
    where = f"lake table '{name}' of table '{table.path}'"
    stay = rows_stay_because(table, role)
    change, only_moves = _Change(), True
    for snapshot in snapshots:
        for status, file in _changed_files(where, metadata, snapshot, io):
            is_added = status is ManifestEntryStatus.ADDED
            only_moves = only_moves and _is_compaction(snapshot)
            if stay and not _is_compaction(snapshot):
                raise ForbiddenError(f"{where}: {stay}")
            if is_added and (problem := unreadable_because(file)):
                raise ForbiddenError(f"{where}: {problem}")
            if is_added and is_vector(file) and metadata.format_version < VERSION_3:
                raise ForbiddenError(
                    f"{where}: file '{file.file_path}' is a deletion vector, which format version"
                    f" {metadata.format_version} does not have; use position deletes"
                )
            if is_added and file.content is DataFileContent.DATA:
                _check_rows(where, file, metadata.schema(), covered)
            change.count(file, is_added=is_added)
    if snapshots:
        _check_vectors(where, change, snapshots[0], io)
    if change.rows > change.hidden_rows:
        raise ForbiddenError(
            f"{where}: the commit adds {change.rows - change.hidden_rows} more rows than it"
            " removes; write rows through the streamhouse service, and only delete, update or"
            " compact here"
        )
    lost = change.newly_hidden_rows - change.rows
    if only_moves and lost > _hidden_rows(metadata, snapshots, io):
        because = stay or "a compaction (operation replace) keeps all; delete them as a delete"
        raise ForbiddenError(f"{where}: the commit loses {lost} rows; {because}")


def _check_vectors(where: str, change: _Change, newest: Snapshot, io: FileIO) -> None:
    """Refuse a second vector of a data file, and fewer deleted rows of a data file that stays.

    A vector has all deleted rows of its data file, so manifests show both.
    """
    brought_back = change.rows_brought_back
    if not change.new_vectors and not brought_back:
        return
    vectors: Counter[str | None] = Counter()
    for manifest in manifests_of(io, newest):
        is_deletes = manifest.content is ManifestContent.DELETES
        if not (change.new_vectors if is_deletes else brought_back):
            continue
        for entry in live_entries(io, manifest):
            file = entry.data_file
            if not is_deletes and file.file_path in brought_back:
                raise ForbiddenError(
                    f"{where}: the commit brings back {brought_back[file.file_path]} deleted rows"
                    f" of data file '{file.file_path}': a new deletion vector must have the rows of"
                    " the vector before"
                )
            if is_deletes and is_vector(file):
                vectors[path_bounds(file)[0]] += 1
    for data_path in change.new_vectors:
        if vectors[data_path] > 1:
            raise ForbiddenError(
                f"{where}: data file '{data_path}' would have {vectors[data_path]} deletion"
                " vectors; replace its vector by one with the rows of both"
            )


def outside_problem(
    name: str,
    metadata: TableMetadata,
    table: TableInfo,
    role: LakeRole,
    io: FileIO,
    *,
    registered: int | None = None,
) -> str:
    """Describe a forbidden change of rows by another engine; empty if there is none.

    Only changes after the newest round, or after the `registered` snapshot, count.
    """
    stay = rows_stay_because(table, role)
    changed = stay and _oldest_change(metadata, table, role, io, registered=registered)
    if not changed:
        return ""
    operation = _operation(changed)
    return (
        f"lake table '{name}' of table '{table.path}': another engine changed rows past the"
        f" service, in snapshot {changed.snapshot_id} (operation"
        f" {'unknown' if operation is None else operation.value}): {stay}. Set its current"
        f" snapshot back to {changed.parent_snapshot_id} (rollback_to_snapshot); until then no"
        " more rows are tiered"
    )


def was_changed_outside(
    metadata: TableMetadata, table: TableInfo, role: LakeRole, io: FileIO
) -> bool:
    """Whether another engine ever changed or deleted rows of a lake table.

    Each commit of ours says so in a property of the table (`outside_properties`): its snapshots
    expire.
    """
    return CHANGED_OUTSIDE_PROPERTY in metadata.properties or (
        _oldest_change(metadata, table, role, io) is not None
    )


def outside_properties(
    metadata: TableMetadata, table: TableInfo, role: LakeRole, io: FileIO
) -> dict[str, str]:
    """Return the properties of a lake table for recording changes of rows by other engines."""
    is_changed = was_changed_outside(metadata, table, role, io)
    return {CHANGED_OUTSIDE_PROPERTY: "true"} if is_changed else {}


def _oldest_change(
    metadata: TableMetadata,
    table: TableInfo,
    role: LakeRole,
    io: FileIO,
    *,
    registered: int | None = None,
) -> Snapshot | None:
    """Return the first snapshot with row changes of other engines after our newest snapshot."""
    oldest: Snapshot | None = None
    for snapshot in ancestors_of(metadata):
        properties = facts_of(snapshot).properties
        is_own = properties.get(role.owner_property) == str(table.table_id)
        if is_own or snapshot.snapshot_id == registered:
            break
        if not _is_compaction(snapshot) and _changes_files(metadata, snapshot, io):
            oldest = snapshot
    return oldest


@dataclass
class _Change:
    """The effect of a commit on rows in data files, and on rows named by delete files."""

    rows: int = 0
    hidden_rows: int = 0
    shown_rows: int = 0
    new_vectors: set[str | None] = field(default_factory=set)
    _vectors: dict[str | None, int] = field(default_factory=dict)
    _removed_files: set[str] = field(default_factory=set)

    def count(self, file: DataFile, *, is_added: bool) -> None:
        """Count a file that comes or goes."""
        if file.content is DataFileContent.DATA:
            self.rows += file.record_count if is_added else -file.record_count
            if not is_added:
                self._removed_files.add(file.file_path)
        elif is_vector(file):
            self._count_vector(file, is_added=is_added)
        elif is_added:
            self.hidden_rows += file.record_count
        else:
            self.shown_rows += file.record_count

    def _count_vector(self, file: DataFile, *, is_added: bool) -> None:
        # A new vector has the rows of the vector that it replaces, too.
        data_path = path_bounds(file)[0]
        if is_added:
            self.new_vectors.add(data_path)
        before = self._vectors.get(data_path, 0)
        after = before + (file.record_count if is_added else -file.record_count)
        self._vectors[data_path] = after
        self.hidden_rows += max(after, 0) - max(before, 0)
        self.shown_rows += max(-after, 0) - max(-before, 0)

    @property
    def newly_hidden_rows(self) -> int:
        """How many more rows are hidden than by the delete files that go."""
        return max(0, self.hidden_rows - self.shown_rows)

    @property
    def rows_brought_back(self) -> dict[str, int]:
        """How many rows fewer the vectors have of data files that do not go with them.

        Such a file may have gone earlier.
        """
        return {
            path: -rows
            for path, rows in self._vectors.items()
            if rows < 0 and path is not None and path not in self._removed_files
        }


def _is_compaction(snapshot: Snapshot) -> bool:
    return _operation(snapshot) is Operation.REPLACE


def _operation(snapshot: Snapshot) -> Operation | None:
    return None if snapshot.summary is None else snapshot.summary.operation


def _hidden_rows(metadata: TableMetadata, snapshots: Sequence[Snapshot], io: FileIO) -> int:
    """Return how many rows delete files named before the commit, at most."""
    parent_id = snapshots[-1].parent_snapshot_id if snapshots else None
    parent = None if parent_id is None else metadata.snapshot_by_id(parent_id)
    return sum(
        entry.data_file.record_count
        for manifest in ([] if parent is None else manifests_of(io, parent))
        if manifest.content is ManifestContent.DELETES
        for entry in live_entries(io, manifest)
    )


def _changes_files(metadata: TableMetadata, snapshot: Snapshot, io: FileIO) -> bool:
    """Whether files came or went by a snapshot; reads lists of manifests only."""
    manifests = {manifest.manifest_path: manifest for manifest in manifests_of(io, snapshot)}
    # The next commit leaves out a manifest with removed files only.
    return any(
        _has_files(manifest)
        for path, manifest in _manifests_before(metadata, snapshot, io).items()
        if path not in manifests
    ) or any(
        manifest.added_snapshot_id == snapshot.snapshot_id
        and (_has_files(manifest) or _drops(manifest))
        for manifest in manifests.values()
    )


def _has_files(manifest: ManifestFile) -> bool:
    return manifest.has_added_files() or manifest.has_existing_files()


def _drops(manifest: ManifestFile) -> bool:
    return manifest.deleted_files_count is None or manifest.deleted_files_count > 0


def _changed_files(
    where: str, metadata: TableMetadata, snapshot: Snapshot, io: FileIO
) -> Iterator[tuple[ManifestEntryStatus, DataFile]]:
    """Yield the files added or removed by a snapshot; older files may be carried on, once.

    A file is removed with its manifest, even without an entry for the removal. An entry may repeat
    an earlier removal: DuckDB 1.5 copies entries of removed files into the manifests that it
    rewrites, in its own snapshot's name. Such an entry removes nothing.
    """
    older_manifests = _manifests_before(metadata, snapshot, io)
    manifests = {manifest.manifest_path: manifest for manifest in manifests_of(io, snapshot)}
    left_out, removed_before = _files_left_out(older_manifests, manifests, io)
    for path, manifest in manifests.items():
        if path in older_manifests:
            continue
        if manifest.added_snapshot_id != snapshot.snapshot_id:
            raise ForbiddenError(
                f"{where}: manifest '{path}' is new, but says that snapshot"
                f" {manifest.added_snapshot_id} has added it"
            )
        for entry in entries_of(io, manifest):
            file, is_kept = entry.data_file, entry.status is ManifestEntryStatus.EXISTING
            if not is_kept and entry.snapshot_id not in (None, snapshot.snapshot_id):
                continue
            if entry.status is not ManifestEntryStatus.ADDED:
                if not left_out[entry_key(file)]:
                    if not is_kept and entry_key(file) in removed_before:
                        continue
                    raise ForbiddenError(
                        f"{where}: file '{file.file_path}' is"
                        f" {'carried on' if is_kept else 'removed'} from before the commit, but was"
                        " not there, or is named twice, or its old manifest stays"
                    )
                left_out[entry_key(file)].pop()
            if not is_kept:
                yield entry.status, file
    for files in left_out.values():
        for file in files:
            yield ManifestEntryStatus.DELETED, file


def _manifests_before(
    metadata: TableMetadata, snapshot: Snapshot, io: FileIO
) -> dict[str, ManifestFile]:
    parent_id = snapshot.parent_snapshot_id
    parent = None if parent_id is None else metadata.snapshot_by_id(parent_id)
    return {} if parent is None else {m.manifest_path: m for m in manifests_of(io, parent)}


def _files_left_out(
    before: Mapping[str, ManifestFile], after: Container[str], io: FileIO
) -> tuple[defaultdict[EntryKey, list[DataFile]], set[EntryKey]]:
    """Return the live files of the manifests that a snapshot has no more, and the removed files."""
    files, removed = defaultdict(list), set()
    for path, manifest in before.items():
        if path not in after:
            for entry in entries_of(io, manifest):
                if entry.status is ManifestEntryStatus.DELETED:
                    removed.add(entry_key(entry.data_file))
                else:
                    files[entry_key(entry.data_file)].append(entry.data_file)
    return files, removed


def _check_rows(
    where: str, file: DataFile, schema: IcebergSchema, covered: Mapping[int, int]
) -> None:
    if file.record_count == 0:
        return
    bounds = {}
    for column in (BUCKET_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN):
        column_bounds = _bounds(file, schema, column)
        if column_bounds is None:
            raise ForbiddenError(
                f"{where}: data file '{file.file_path}' has no bounds of column '{column}'; rows"
                " must keep it, and the writer must collect metrics of it"
            )
        bounds[column] = column_bounds
    (bucket, bucket_last), (first, last) = bounds[BUCKET_COLUMN], bounds[OFFSET_COLUMN]
    is_bucket = bucket >= 0 and bucket_last < len(covered)
    if (
        not is_bucket
        or first < 0
        or last >= max(covered[b] for b in range(bucket, bucket_last + 1))
    ):
        raise ForbiddenError(
            f"{where}: data file '{file.file_path}' has rows of buckets {bucket} to {bucket_last}"
            f" and offsets {first} to {last} that were never tiered; write rows through the"
            " streamhouse service"
        )


def _bounds(file: DataFile, schema: IcebergSchema, column: str) -> tuple[Any, Any] | None:
    """Return the least and greatest value of a column without nulls."""
    try:
        field = schema.find_field(column)
    except ValueError:
        return None
    lower = (file.lower_bounds or {}).get(field.field_id)
    upper = (file.upper_bounds or {}).get(field.field_id)
    if lower is None or upper is None or (file.null_value_counts or {}).get(field.field_id):
        return None
    # These columns are int, long and timestamptz.
    field_type: Any = field.field_type
    return from_bytes(field_type, lower), from_bytes(field_type, upper)
