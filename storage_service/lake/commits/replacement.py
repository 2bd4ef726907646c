"""Commits of maintenance: one snapshot that replaces lake files, or drops them for good.

What it promises of a rewrite, a REPLACE snapshot with the same rows, besides what every commit
promises (`lake/landing.py`):
- it lands only while every file it replaces is still live and no row of them was deleted since the
  rewrite was planned
- rewritten rows keep the sequence number of the snapshot they were read from, as Iceberg's own
  RewriteFiles can: what others delete by value meanwhile still applies to them
- it carries the tiered offsets that the table covers at that moment, so it hides no round
A removal, a DELETE snapshot, promises the same, but that rows deleted meanwhile do not stop it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pyiceberg.manifest import DataFile, ManifestContent
from pyiceberg.table import Table
from pyiceberg.table.refs import MAIN_BRANCH

from streamhouse.storage_service.errors import (
    FencedError,
    UnavailableError,
)
from streamhouse.storage_service.lake.commits.staged_snapshot import (
    Operation,
    SnapshotChanges,
    stage_snapshot,
)
from streamhouse.storage_service.lake.landing import StagedChange, land
from streamhouse.storage_service.lake.snapshots.coverage import (
    covered_offsets,
    round_properties,
    table_properties,
)
from streamhouse.storage_service.lake.snapshots.inventory import path_bounds
from streamhouse.storage_service.lake.snapshots.manifests import live_entries, manifests_of
from streamhouse.storage_service.model.lake import LakeRole

__all__ = ["LakeReplacement", "commit_replacement"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeReplacement:
    """`added` holds exactly the live rows of `removed`, as of the snapshot `base_sequence`.

    With the operation DELETE there is no `added`: the rows of `removed` are gone, because those
    below `expired_offsets`, of the buckets that it names, have reached their time to live.

    `role` is that of the lake table.
    """

    added: Sequence[DataFile]
    removed: Sequence[DataFile]
    base_sequence: int
    table_id: int
    epoch: int
    role: LakeRole = LakeRole.ROWS
    operation: Operation = Operation.REPLACE
    expired_offsets: Mapping[int, int] = field(default_factory=dict)


def commit_replacement(
    table: Table,
    rewrite: LakeReplacement,
    *,
    check_lease: Callable[[], None] = lambda: None,
    checkpoint: Callable[[str], None] = lambda _: None,
) -> int:
    """Commit the rewrite and return the id of its snapshot; `table` is up to date afterwards.

    Raises:
        FencedError: another worker has the table now; nothing was replaced.
        UnavailableError: somebody else changed files of the rewrite; nothing was replaced.
        UnknownOutcomeError: it may have landed, or may still: the new files must stay.
    """

    def before_send() -> None:
        is_removal = rewrite.operation is Operation.DELETE
        checkpoint("removal-staged" if is_removal else "rewrite-staged")
        check_lease()

    snapshot_id = land(table, _Replacement(rewrite), before_send=before_send)
    assert snapshot_id is not None, "it has a snapshot, or is refused"
    return snapshot_id


@dataclass(frozen=True, slots=True)
class _Replacement:
    """A replacement, for the loop that lands it."""

    rewrite: LakeReplacement

    def stage(self, table: Table) -> StagedChange:
        """Stage it on what the table is now; raises as `commit_replacement`."""
        rewrite, name = self.rewrite, ".".join(table.name())
        covered = covered_offsets(table.metadata, table_id=rewrite.table_id, role=rewrite.role)
        if covered is None or covered.epoch > rewrite.epoch:
            raise FencedError(
                f"lake table '{name}' was advanced by tiering epoch"
                f" {covered.epoch if covered else 0}; this worker has epoch {rewrite.epoch}"
            )
        expired = {**covered.expired_offsets, **rewrite.expired_offsets}
        properties = round_properties(
            table_id=rewrite.table_id,
            covered=replace(covered, epoch=rewrite.epoch, expired_offsets=expired),
            role=rewrite.role,
        )
        if rewrite.added:
            _check_no_new_deletes(table, rewrite, name)
        try:
            return stage_snapshot(
                table,
                SnapshotChanges(
                    operation=rewrite.operation,
                    added=rewrite.added,
                    removed=rewrite.removed,
                    data_sequence_number=rewrite.base_sequence,
                ),
                summary=properties,
                table_properties=lambda number: table_properties(
                    properties, sequence_number=number
                ),
            )
        except FencedError as error:
            # The table is still ours; only this rewrite has lost.
            raise UnavailableError(str(error)) from error

    def is_done(self) -> bool:
        """Nothing but its snapshot shows that it landed."""
        return False


def _check_no_new_deletes(table: Table, rewrite: LakeReplacement, name: str) -> None:
    """Raise when a delete file younger than the rewrite's base may name a file it replaces."""
    snapshot = table.metadata.snapshot_by_name(MAIN_BRANCH)
    if snapshot is None or (snapshot.sequence_number or 0) <= rewrite.base_sequence:
        return
    replaced = sorted(file.file_path for file in rewrite.removed)
    for manifest in manifests_of(table.io, snapshot):
        if manifest.content is not ManifestContent.DELETES:
            continue
        if manifest.sequence_number <= rewrite.base_sequence:
            continue
        for entry in live_entries(table.io, manifest):
            if (entry.sequence_number or 0) <= rewrite.base_sequence:
                continue
            lower, upper = path_bounds(entry.data_file)
            if any(
                (lower is None or lower <= path) and (upper is None or path <= upper)
                for path in replaced
            ):
                raise UnavailableError(
                    f"lake table '{name}': rows of files being rewritten were deleted meanwhile"
                    f" by '{entry.data_file.file_path}'; nothing was replaced, the next"
                    " maintenance rewrites them"
                )
