"""Commits of maintenance: one snapshot that replaces lake files, or drops them for good.

What it promises of a rewrite, a REPLACE snapshot with the same rows:
- it lands at most once, and only while every file it replaces is still live and no row of them
  was deleted since the rewrite was planned
- rewritten rows keep the sequence number of the snapshot they were read from, as Iceberg's own
  RewriteFiles can: what others delete by value meanwhile still applies to them
- it carries the tiered offsets that the table covers at that moment, so it hides no round
A removal, a DELETE snapshot, promises the same, but that rows deleted meanwhile do not stop it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pyiceberg.exceptions import CommitFailedException
from pyiceberg.manifest import DataFile, ManifestContent
from pyiceberg.table import Table
from pyiceberg.table.refs import MAIN_BRANCH

from streamhouse.storage_service.errors import (
    FencedError,
    UnavailableError,
    UnknownOutcomeError,
)
from streamhouse.storage_service.lake.errors import lake_errors
from streamhouse.storage_service.model.lake import LakeRole
from streamhouse.tiering.iceberg_avro import live_entries, manifests_of
from streamhouse.tiering.iceberg_inventory import path_bounds
from streamhouse.tiering.iceberg_offsets import (
    covered_offsets,
    has_ancestor,
    round_properties,
    table_properties,
)
from streamhouse.tiering.iceberg_snapshot import (
    Operation,
    SnapshotChanges,
    StagedSnapshot,
    stage_snapshot,
)

__all__ = ["LakeReplacement", "commit_replacement"]

_logger = logging.getLogger(__name__)

COMMIT_ATTEMPTS_MAX: Final = 4


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
        UnknownOutcomeError: the catalog cannot be asked what became of the commit; the new files
            must stay.
    """
    name = ".".join(table.name())
    error: BaseException | None = None
    for _ in range(COMMIT_ATTEMPTS_MAX):
        staged = _stage(table, rewrite, name)
        try:
            is_removal = rewrite.operation is Operation.DELETE
            checkpoint("removal-staged" if is_removal else "rewrite-staged")
            check_lease()
        except Exception:
            _clean_up(table, staged)
            raise
        error = _send(table, staged)
        if error is None or _has_landed(table, staged, name, error):
            return staged.snapshot_id
        _logger.info("rewrite of lake table %s: commit failed: %s", name, error)
        if isinstance(error, CommitFailedException):
            _clean_up(table, staged)
    raise UnavailableError(
        f"lake table '{name}': {COMMIT_ATTEMPTS_MAX} commits of a rewrite failed, the last with"
        f" {type(error).__name__}: {error}"
    )


def _stage(table: Table, rewrite: LakeReplacement, name: str) -> StagedSnapshot:
    covered = covered_offsets(table.metadata, table_id=rewrite.table_id, role=rewrite.role)
    if covered is None or covered.epoch > rewrite.epoch:
        raise FencedError(
            f"lake table '{name}' was advanced by tiering epoch {covered.epoch if covered else 0};"
            f" this worker has epoch {rewrite.epoch}"
        )
    expired = {**covered.expired_offsets, **rewrite.expired_offsets}
    properties = round_properties(
        table_id=rewrite.table_id,
        covered=replace(covered, epoch=rewrite.epoch, expired_offsets=expired),
        role=rewrite.role,
    )
    with lake_errors(f"write metadata of lake table '{name}'"):
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


def _send(table: Table, staged: StagedSnapshot) -> BaseException | None:
    try:
        # Table.transaction() would retry on a newer base by itself; this does not.
        table._do_commit(staged.updates, staged.requirements)
    except Exception as error:  # noqa: BLE001 - whatever a catalog raises, it may have landed
        return error
    return None


def _has_landed(table: Table, staged: StagedSnapshot, name: str, error: BaseException) -> bool:
    """Reload the table and look for the snapshot."""
    try:
        table.refresh()
    except Exception as reload_error:
        raise UnknownOutcomeError(
            f"lake table '{name}': a rewrite may have landed ({error}), and the catalog cannot be"
            f" asked: {reload_error}"
        ) from reload_error
    return has_ancestor(table.metadata, staged.snapshot_id)


def _clean_up(table: Table, staged: StagedSnapshot) -> None:
    """Delete the metadata of an attempt that can never land."""
    for path in staged.metadata_paths:
        with contextlib.suppress(OSError):
            table.io.delete(path)
