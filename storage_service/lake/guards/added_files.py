"""Whether files that other engines add to a lake table can be rows that were tiered to it.

Every row of a lake table is one of the log and keeps its `__bucket` and `__offset`; compaction,
deletes and updates only move rows. What is checked from manifests: no more rows come than go, and
every new file says that its rows have buckets of the table and offsets that are tiered. Not
checked, because it would need reading the files: that these are the same rows, each once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyiceberg.conversions import from_bytes
from pyiceberg.io import FileIO
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestEntryStatus,
    ManifestFile,
)
from pyiceberg.schema import Schema as IcebergSchema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

from streamhouse.storage_service.errors import ForbiddenError
from streamhouse.storage_service.lake.guards.live_tables import LiveTable
from streamhouse.storage_service.lake.snapshots.manifests import (
    entries_of,
    live_entries,
    manifests_of,
)
from streamhouse.storage_service.model.schema import (
    BUCKET_COLUMN,
    OFFSET_COLUMN,
    TIMESTAMP_COLUMN,
)

__all__ = ["check_added_files"]


def check_added_files(
    name: str,
    metadata: TableMetadata,
    snapshots: Sequence[Snapshot],
    live: LiveTable,
    *,
    covered: Mapping[int, int],
    io: FileIO,
) -> None:
    """Refuse a commit of `snapshots` whose files cannot be rows of `live` below `covered`.

    Reads the manifests that these snapshots have and those before them have not, and of files
    that they only carry on also those that they left out.
    """
    where = f"lake table '{name}' of table '{live.info.path}'"
    change = _Change()
    changed = (
        found for snapshot in snapshots for found in _changed_files(where, metadata, snapshot, io)
    )
    for status, file in changed:
        is_added = status is ManifestEntryStatus.ADDED
        if file.content is DataFileContent.DATA:
            if is_added:
                _check_rows(where, file, metadata.schema(), covered)
            change.rows += file.record_count if is_added else -file.record_count
        elif file.content is DataFileContent.EQUALITY_DELETES and is_added:
            raise ForbiddenError(
                f"{where}: equality deletes are not read by every engine; use position deletes or"
                " copy-on-write"
            )
        elif is_added:
            change.deletes += file.record_count
    if change.rows > change.deletes:
        raise ForbiddenError(
            f"{where}: the commit adds {change.rows - change.deletes} more rows than it removes;"
            " write rows through the streamhouse service, and only delete, update or compact here"
        )


@dataclass
class _Change:
    rows: int = 0
    deletes: int = 0


def _changed_files(
    where: str, metadata: TableMetadata, snapshot: Snapshot, io: FileIO
) -> Iterator[tuple[ManifestEntryStatus, DataFile]]:
    """Yield the files that a snapshot adds or removes; it may carry on those before it, once."""
    before = _manifests_before(metadata, snapshot, io)
    manifests = {manifest.manifest_path: manifest for manifest in manifests_of(io, snapshot)}
    left_out: Counter[str] | None = None
    for path, manifest in manifests.items():
        if path in before:
            continue
        if manifest.added_snapshot_id != snapshot.snapshot_id:
            raise ForbiddenError(
                f"{where}: manifest '{path}' is new, but says that snapshot"
                f" {manifest.added_snapshot_id} has added it"
            )
        for entry in entries_of(io, manifest):
            if entry.status is ManifestEntryStatus.EXISTING:
                if left_out is None:
                    left_out = _files_left_out(before, manifests, io)
                left_out[entry.data_file.file_path] -= 1
                if left_out[entry.data_file.file_path] < 0:
                    raise ForbiddenError(
                        f"{where}: file '{entry.data_file.file_path}' is carried on from before the"
                        " commit, but was not there, or is carried on twice"
                    )
            elif entry.snapshot_id in (None, snapshot.snapshot_id):
                yield entry.status, entry.data_file


def _manifests_before(
    metadata: TableMetadata, snapshot: Snapshot, io: FileIO
) -> dict[str, ManifestFile]:
    parent_id = snapshot.parent_snapshot_id
    parent = None if parent_id is None else metadata.snapshot_by_id(parent_id)
    return {} if parent is None else {m.manifest_path: m for m in manifests_of(io, parent)}


def _files_left_out(
    before: Mapping[str, ManifestFile], after: Container[str], io: FileIO
) -> Counter[str]:
    """Return the live files of the manifests that a snapshot has no more."""
    return Counter(
        entry.data_file.file_path
        for path, manifest in before.items()
        if path not in after
        for entry in live_entries(io, manifest)
    )


def _check_rows(
    where: str, file: DataFile, schema: IcebergSchema, covered: Mapping[int, int]
) -> None:
    if file.file_format is not FileFormat.PARQUET:
        raise ForbiddenError(f"{where}: data files must be Parquet, not {file.file_format}")
    if file.record_count == 0:
        return
    bounds = {}
    for column in (BUCKET_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN):
        found = _bounds(file, schema, column)
        if found is None:
            raise ForbiddenError(
                f"{where}: data file '{file.file_path}' has no bounds of column '{column}'; rows"
                " must keep it, and the writer must collect metrics of it"
            )
        bounds[column] = found
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
    """Return the least and greatest value of a column that has one in every row."""
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
