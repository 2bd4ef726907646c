"""Commits of maintenance: a snapshot that replaces lake files, or drops the files for good.

Guarantees for a rewrite, a REPLACE snapshot with the same rows, beyond every commit's
(`lake/_landing.py`):
- it lands only while every replaced file is live and no row in the files was deleted since the plan
- rewritten rows keep the sequence number of the snapshot they were read from, as Iceberg's own
  RewriteFiles can: deletes by value from other engines still apply
- it carries the table's tiered offsets of the moment and hides no round
A removal, a DELETE snapshot, promises the same, except that rows deleted meanwhile do not stop it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pyiceberg.manifest import ManifestContent
from pyiceberg.table import Table
from pyiceberg.table.refs import MAIN_BRANCH

from streamhouse.core.errors import FencedError, UnavailableError
from streamhouse.lake._landing import StagedChange, land_snapshot
from streamhouse.lake.commits._staged_snapshot import (
    Operation,
    SnapshotChanges,
    stage_snapshot,
)
from streamhouse.lake.commits.committer import IcebergLakeTable
from streamhouse.lake.files._written_files import data_files, position_delete_files
from streamhouse.lake.files.deletes.deleted_positions import Deletes
from streamhouse.lake.files.parquet_writer import WrittenFile
from streamhouse.lake.files.position_deletes import WrittenDeletes
from streamhouse.lake.snapshots._coverage import round_properties, table_properties
from streamhouse.lake.snapshots._manifests import live_entries, manifests_of
from streamhouse.lake.snapshots.inventory import Inventory
from streamhouse.lake.snapshots.live_files import may_name

__all__ = ["LakeReplacement", "commit_replacement", "seal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeReplacement:
    """`files` and `deletes` hold exactly the live rows of `removed`, as of the snapshot of `base`.

    `files` are data files, with the id of their partition spec; `removed` are data files, by
    path, and deletes. With `is_removal` nothing takes their place: the rows of `removed` below
    `expired_offsets`, in the buckets listed, have reached their time to live. `epoch` is the
    claim's.
    """

    base: Inventory
    removed: Collection[str | Deletes]
    files: Sequence[tuple[int, Sequence[WrittenFile]]] = ()
    deletes: Sequence[WrittenDeletes] = ()
    epoch: int
    is_removal: bool = False
    expired_offsets: Mapping[int, int] = field(default_factory=dict)
    expired_at_us: int = 0


def commit_replacement(
    lake_table: IcebergLakeTable,
    replacement: LakeReplacement,
    *,
    check_lease: Callable[[], None] = lambda: None,
    checkpoint: Callable[[str], None] = lambda _: None,
) -> int:
    """Commit the replacement and return the id of its snapshot; `lake_table` is up to date then.

    Raises:
        FencedError: another worker has the table now; nothing was replaced.
        UnavailableError: somebody else changed files of the rewrite; nothing was replaced.
        UnknownOutcomeError: it may have landed, or may still: the new files must stay.
    """

    def before_send() -> None:
        checkpoint("removal-staged" if replacement.is_removal else "rewrite-staged")
        check_lease()

    table = lake_table.iceberg
    added = [
        file
        for spec_id, written in replacement.files
        for file in data_files(
            written,
            schema=table.schema(),
            properties=table.metadata.properties,
            spec_id=spec_id,
            sort_order_id=lake_table.layout.sort_order_id,
        )
    ]
    change = _Replacement(
        lake_table,
        SnapshotChanges(
            operation=Operation.DELETE if replacement.is_removal else Operation.REPLACE,
            added=[*added, *position_delete_files(replacement.deletes)],
            removed=[replacement.base.data_files[path] for path in replacement.removed],
            data_sequence_number=replacement.base.sequence_number,
        ),
        epoch=replacement.epoch,
        base_sequence=replacement.base.sequence_number,
        expired_offsets=replacement.expired_offsets,
        expired_at_us=replacement.expired_at_us,
    )
    return land_snapshot(table, change, before_send=before_send)


def seal(
    lake_table: IcebergLakeTable, *, epoch: int, check_lease: Callable[[], None]
) -> int | None:
    """Fence off every commit of a claim before `epoch`, even on its way.

    Each of these commits asserts a snapshot older than any of this claim. Without a snapshot of
    this claim, commit an empty snapshot and return its id.
    """
    covered = lake_table.covered
    if covered is not None and covered.epoch == epoch:
        return None
    change = _Replacement(lake_table, SnapshotChanges(operation=Operation.REPLACE), epoch=epoch)
    return land_snapshot(lake_table.iceberg, change, before_send=check_lease)


@dataclass(frozen=True, slots=True)
class _Replacement:
    """A replacement, for the loop that lands it."""

    lake_table: IcebergLakeTable
    changes: SnapshotChanges
    epoch: int
    base_sequence: int = 0
    expired_offsets: Mapping[int, int] = field(default_factory=dict)
    expired_at_us: int = 0

    def stage(self, table: Table) -> StagedChange:
        """Stage it on what the table is now; raises as `commit_replacement`."""
        lake_table, epoch = self.lake_table, self.epoch
        covered = lake_table.covered
        if covered is None or covered.epoch > epoch:
            raise FencedError(
                f"lake table '{lake_table.name}' was advanced by tiering epoch"
                f" {covered.epoch if covered else 0}; this worker has epoch {epoch}"
            )
        lake_table.check_outside()
        expired = {**covered.expired_offsets, **self.expired_offsets}
        properties = round_properties(
            table_id=lake_table.info.table_id,
            covered=replace(
                covered,
                epoch=epoch,
                expired_offsets=expired,
                expired_at_us=max(covered.expired_at_us, self.expired_at_us),
            ),
            role=lake_table.role,
        )
        if self.changes.added:
            self._check_no_new_deletes(table)
        try:
            return stage_snapshot(
                table,
                self.changes,
                summary=properties,
                table_properties=lambda number: {
                    **table_properties(properties, sequence_number=number),
                    **lake_table.outside_properties(),
                },
            )
        except FencedError as error:
            # The table is still ours; only this rewrite has lost.
            raise UnavailableError(str(error)) from error

    def is_done(self) -> bool:
        """Nothing but its snapshot shows that it landed."""
        return False

    def _check_no_new_deletes(self, table: Table) -> None:
        """Raise when a delete file younger than the rewrite's base may name a file it replaces."""
        snapshot = table.metadata.snapshot_by_name(MAIN_BRANCH)
        if snapshot is None or (snapshot.sequence_number or 0) <= self.base_sequence:
            return
        replaced = sorted(file.file_path for file in self.changes.removed)
        for manifest in manifests_of(table.io, snapshot):
            if manifest.content is not ManifestContent.DELETES:
                continue
            if manifest.sequence_number <= self.base_sequence:
                continue
            for entry in live_entries(table.io, manifest):
                if (entry.sequence_number or 0) <= self.base_sequence:
                    continue
                if any(may_name(entry.data_file, path) for path in replaced):
                    raise UnavailableError(
                        f"lake table '{self.lake_table.name}': rows of files being rewritten were"
                        f" deleted meanwhile by '{entry.data_file.file_path}'; nothing was"
                        " replaced, the next maintenance rewrites them"
                    )
