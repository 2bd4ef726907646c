"""Expiry of snapshots: removed from the metadata, then deleted with their files.

Invariants:
- a snapshot's age counts from the end of its time as the current snapshot: a reader with a plan on
  the current snapshot has `age_ms_min` to finish, however long the table was idle before
- the current snapshot, snapshots of branches and tags, pinned snapshots and the newest `count_min`
  stay
- a file is deleted only after the expiring commit of all its snapshots has certainly landed, and
  only if no remaining snapshot refers to the file
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pyiceberg.io import FileIO
from pyiceberg.manifest import ManifestFile
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.update import (
    AssertRefSnapshotId,
    AssertTableUUID,
    RemoveSnapshotsUpdate,
    SetPropertiesUpdate,
    TableUpdate,
)

from streamhouse.core.errors import StreamhouseError
from streamhouse.lake._landing import StagedChange, land
from streamhouse.lake.files._bounded_io import only_own
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.iceberg_errors import lake_errors
from streamhouse.lake.snapshots._manifests import live_entries, manifests_of

__all__ = [
    "Expired",
    "ExpiryRules",
    "expire_snapshots",
    "expiry_times_ms",
    "reachable_files",
]

_logger = logging.getLogger(__name__)

COMMIT_ATTEMPTS_MAX: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiryRules:
    """What may be expired; see the invariants above."""

    age_ms_min: int
    count_min: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired:
    """How many snapshots were expired, and how many files were deleted for it."""

    snapshots: int = 0
    files: int = 0
    failed_files: int = 0


def expiry_times_ms(
    table: Table, rules: ExpiryRules, *, pinned: Collection[int] = ()
) -> dict[int, int]:
    """Return when each snapshot may be expired that does not stay as things are, oldest first.

    Reads nothing but the metadata.
    """
    metadata = table.metadata
    newest = sorted(metadata.snapshots, key=lambda s: s.sequence_number or 0, reverse=True)
    kept_ids = {ref.snapshot_id for ref in metadata.refs.values()}
    kept_ids |= set(pinned)
    if metadata.current_snapshot_id is not None:
        kept_ids.add(metadata.current_snapshot_id)
    kept_ids |= {snapshot.snapshot_id for snapshot in newest[: rules.count_min]}
    superseded_ms = _superseded_ms(metadata)
    return {
        snapshot.snapshot_id: superseded_ms.get(snapshot.snapshot_id, snapshot.timestamp_ms)
        + rules.age_ms_min
        + 1
        for snapshot in reversed(newest)
        if snapshot.snapshot_id not in kept_ids
    }


def _superseded_ms(metadata: TableMetadata) -> Mapping[int, int]:
    """Return when each former current snapshot was replaced."""
    log = metadata.snapshot_log
    return {older.snapshot_id: newer.timestamp_ms for older, newer in itertools.pairwise(log)}


def expire_snapshots(
    table: Table,
    rules: ExpiryRules,
    *,
    now_ms: int,
    pinned: Callable[[], Collection[int]],
    filesystem: LakeFilesystem,
    properties: Mapping[str, str],
    check_lease: Callable[[], None] = lambda: None,
    checkpoint: Callable[[str], None] = lambda _: None,
) -> Expired:
    """Expire the snapshots allowed by `rules` and delete the files of expired snapshots only.

    `pinned` is asked before the commit and once more before files are deleted. `properties` are set
    on the table in the same commit.

    Raises `UnknownOutcomeError` when the commit may have landed, or may still; no file is deleted.
    """
    change = _Expiry(table, rules, now_ms, pinned, properties)
    land(table, change, before_send=check_lease, attempts_max=COMMIT_ATTEMPTS_MAX)
    if not (change.ids or change.properties):
        return Expired()
    checkpoint("snapshots-expired")
    still_pinned = set(pinned())
    live_snapshots = [
        *table.metadata.snapshots,
        *(s for s in change.gone if s.snapshot_id in still_pinned),
    ]
    doomed = [s for s in change.gone if s.snapshot_id not in still_pinned]
    with lake_errors(f"read manifests of lake table '{'.'.join(table.name())}'"):
        files = _only_in(doomed, live_snapshots, table.io)
    checkpoint("files-found")
    files = only_own(table.io, files)
    failed = _delete(filesystem, files)
    return Expired(snapshots=len(change.ids), files=len(files) - failed, failed_files=failed)


@dataclass(slots=True)
class _Expiry:
    """An expiry, for the landing loop: `ids` and `properties` are still to be applied."""

    table: Table
    rules: ExpiryRules
    now_ms: int
    pinned: Callable[[], Collection[int]]
    new_properties: Mapping[str, str]
    ids: Sequence[int] = ()
    gone: Sequence[Snapshot] = ()
    properties: Mapping[str, str] = field(default_factory=dict)

    def stage(self, table: Table) -> StagedChange | None:
        """Choose the snapshots anew."""
        metadata = table.metadata
        times = expiry_times_ms(table, self.rules, pinned=self.pinned())
        self.ids = [snapshot_id for snapshot_id, time_ms in times.items() if time_ms <= self.now_ms]
        self.gone = [s for s in metadata.snapshots if s.snapshot_id in set(self.ids)]
        self.properties = self._missing()
        updates: tuple[TableUpdate, ...] = ()
        if self.ids:
            updates += (RemoveSnapshotsUpdate.model_validate({"snapshot-ids": self.ids}),)
        if self.properties:
            updates += (SetPropertiesUpdate(updates=dict(self.properties)),)
        head = metadata.snapshot_by_name(MAIN_BRANCH)
        base = {"ref": MAIN_BRANCH, "snapshot-id": None if head is None else head.snapshot_id}
        identity = AssertTableUUID(uuid=metadata.table_uuid)
        requirements = (identity, AssertRefSnapshotId.model_validate(base))
        return StagedChange(updates=updates, requirements=requirements) if updates else None

    def is_done(self) -> bool:
        """Whether nothing of it is left to do: somebody else's expiry is as good."""
        snapshot_ids = {snapshot.snapshot_id for snapshot in self.table.metadata.snapshots}
        return not snapshot_ids & set(self.ids) and not self._missing()

    def _missing(self) -> dict[str, str]:
        current = self.table.metadata.properties
        return {
            key: value for key, value in self.new_properties.items() if current.get(key) != value
        }


def reachable_files(snapshots: Iterable[Snapshot], io: FileIO) -> set[str]:
    """Return every file the snapshots refer to: manifest lists, manifests, data and deletes."""
    lists, manifests = _manifests_of(snapshots, io)
    files = {path for manifest in manifests.values() for path in _files_in(manifest, io)}
    return {*lists, *manifests, *files}


def _only_in(doomed: Iterable[Snapshot], kept: Iterable[Snapshot], io: FileIO) -> list[str]:
    """Return the files of the `doomed` snapshots without the files of the `kept` ones."""
    old_lists, old = _manifests_of(doomed, io)
    kept_lists, staying = _manifests_of(kept, io)
    dead = [manifest for path, manifest in old.items() if path not in staying]
    files = {path for manifest in dead for path in _files_in(manifest, io)}
    for manifest in staying.values():
        if not files:
            break
        files -= _files_in(manifest, io)
    # Data first: what is left after a crash in between is found from the rest.
    return [*sorted(files), *(m.manifest_path for m in dead), *sorted(old_lists - kept_lists)]


def _manifests_of(
    snapshots: Iterable[Snapshot], io: FileIO
) -> tuple[set[str], dict[str, ManifestFile]]:
    lists: set[str] = set()
    manifests: dict[str, ManifestFile] = {}
    for snapshot in snapshots:
        lists.add(snapshot.manifest_list)
        manifests.update((m.manifest_path, m) for m in manifests_of(io, snapshot))
    return lists, manifests


def _files_in(manifest: ManifestFile, io: FileIO) -> set[str]:
    if not (manifest.has_added_files() or manifest.has_existing_files()):
        return set()
    return {entry.data_file.file_path for entry in live_entries(io, manifest)}


def _delete(filesystem: LakeFilesystem, paths: Iterable[str]) -> int:
    """Delete the files; return how many could not be: orphan removal finds those later."""
    failed = 0
    for path in paths:
        try:
            filesystem.delete(path)
        except StreamhouseError as error:
            failed += 1
            _logger.warning("event=expired_lake_file_stays why=%r", str(error))
    return failed
