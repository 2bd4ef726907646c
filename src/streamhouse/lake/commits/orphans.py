"""Files below a lake table's folder without a reference, abandoned by dead or fenced workers.

A file counts as an orphan only with a name of Iceberg's form, only above a safety age, and never
when any snapshot, kept metadata file or statistics file names it, in any engine's spelling of the
URI. A commit lost on its way to the catalog may land late, whatever the age of its files: before
any deletion a snapshot of this claim makes a late landing impossible for all commits of tiering.
Commits of other engines have the safety age to land. Files of live cuts are no orphans: their
folders say when they go.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pyiceberg.table import Table

from streamhouse.core.errors import StreamhouseError
from streamhouse.lake._landing import reload
from streamhouse.lake.commits.expiry import reachable_files
from streamhouse.lake.files.lake_filesystem import (
    LakeFilesystem,
    ListedFile,
    file_identity,
)
from streamhouse.lake.files.live_folders import is_in_live_folder
from streamhouse.lake.iceberg_errors import lake_errors
from streamhouse.lake.snapshots._table_files import check_alone

__all__ = ["OrphansRemoved", "find_orphans", "remove_orphans"]

_logger = logging.getLogger(__name__)

_SUFFIXES: Final = (".parquet", ".avro", ".metadata.json", ".puffin")


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphansRemoved:
    """How many files were deleted, and their bytes; `sealed_by` is a snapshot made for it."""

    files: int = 0
    size_bytes: int = 0
    sealed_by: int | None = None


def find_orphans(
    table: Table, filesystem: LakeFilesystem, *, modified_before_ms: int
) -> list[ListedFile]:
    """Return the orphans last modified before that time.

    Files are listed before references are read: a file committed meanwhile is referenced.
    """
    check_alone(table)
    candidates = [
        file
        for file in filesystem.walk(table.location())
        if 0 < file.modified_ms < modified_before_ms
        and file.uri.endswith(_SUFFIXES)
        and not is_in_live_folder(table.location(), file.uri)
    ]
    if not candidates:
        return []
    with lake_errors(f"read the metadata of lake table '{'.'.join(table.name())}'"):
        reload(table)
        return _unused(table, candidates)


def _unused(table: Table, files: Sequence[ListedFile]) -> list[ListedFile]:
    """Return the members of `files` without a reference in the current table."""
    metadata = table.metadata
    used = reachable_files(metadata.snapshots, table.io)
    used.add(table.metadata_location)
    used.update(entry.metadata_file for entry in metadata.metadata_log)
    used.update(file.statistics_path for file in metadata.statistics)
    used.update(file.statistics_path for file in metadata.partition_statistics)
    identities = {file_identity(uri) for uri in used}
    return [file for file in files if file_identity(file.uri) not in identities]


def remove_orphans(
    table: Table,
    filesystem: LakeFilesystem,
    *,
    modified_before_ms: int,
    seal: Callable[[], int | None],
    check_lease: Callable[[], None] = lambda: None,
) -> OrphansRemoved:
    """Delete the orphans last modified before that time; undeletable files stay.

    `seal` is called once any exist: afterwards no earlier commit of tiering can land. Files of
    commits that landed before are not deleted.
    """
    orphans = find_orphans(table, filesystem, modified_before_ms=modified_before_ms)
    sealed_by = None
    if orphans:
        metadata_location = table.metadata_location
        sealed_by = seal()
        if table.metadata_location != metadata_location:
            with lake_errors(f"read the metadata of lake table '{'.'.join(table.name())}'"):
                orphans = _unused(table, orphans)
    check_lease()
    removed: list[ListedFile] = []
    for orphan in orphans:
        try:
            filesystem.delete(orphan.uri)
            removed.append(orphan)
        except StreamhouseError as error:
            _logger.warning("event=orphan_stays why=%r", str(error))
    size_bytes = sum(file.size_bytes for file in removed)
    return OrphansRemoved(files=len(removed), size_bytes=size_bytes, sealed_by=sealed_by)
