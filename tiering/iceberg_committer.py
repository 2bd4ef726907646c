"""Commits to one lake table: one snapshot a round.

What a commit promises:
- it lands at most once, whatever the catalog answers: after every failure the catalog is asked
  what became of it before anything is sent again
- it lands only on a snapshot that covers exactly the offsets the round started from
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
from pyiceberg.exceptions import (
    CommitFailedException,
    ForbiddenError,
    NoSuchTableError,
    UnauthorizedError,
)
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.table.refs import MAIN_BRANCH

from streamhouse.storage_service.errors import (
    FencedError,
    NotFoundError,
    StreamhouseError,
    UnavailableError,
    UnknownOutcomeError,
)
from streamhouse.storage_service.lake.errors import lake_errors, sentence_of
from streamhouse.storage_service.model.lake import LakeDebt, LakeRole
from streamhouse.storage_service.model.table import TableInfo
from streamhouse.tiering.iceberg_creation import LakeLayout, lake_identifier, layout_of
from streamhouse.tiering.iceberg_live_files import LiveFiles, LiveFilesCache, live_data_files
from streamhouse.tiering.iceberg_offsets import (
    CoveredOffsets,
    covered_offsets,
    has_ancestor,
    round_properties,
    table_properties,
)
from streamhouse.tiering.iceberg_schema import description_properties
from streamhouse.tiering.iceberg_snapshot import (
    Operation,
    SnapshotChanges,
    StagedSnapshot,
    stage_snapshot,
)
from streamhouse.tiering.iceberg_writer import data_files, position_delete_files
from streamhouse.tiering.parquet_writer import WrittenFile
from streamhouse.tiering.position_deletes import WrittenDeletes

__all__ = ["IcebergLakeTable", "LakeCommit"]

_logger = logging.getLogger(__name__)

COMMIT_ATTEMPTS_MAX: Final = 5
_RETRY_WAIT_S_FIRST: Final = 0.1
# The catalog refused for a reason that is not the table's state: nothing was committed.
_REFUSALS: Final = (ForbiddenError, UnauthorizedError, NoSuchTableError)


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeCommit:
    """A round's commit: what the changes from `base_offsets` to `tiered_offsets` make of the lake.

    `deletes` point to data files that are live in the snapshot the round was planned on. If the
    lake does not have `truncated_offsets` yet, all it has was overwritten, and goes; so does
    everything with `is_anew`.
    """

    files: Sequence[WrittenFile]
    deletes: Sequence[WrittenDeletes] = ()
    base_offsets: Mapping[int, int]
    tiered_offsets: Mapping[int, int]
    truncated_offsets: Mapping[int, int] = field(default_factory=dict)
    epoch: int
    is_anew: bool = False


class IcebergLakeTable:
    """One open lake table, as of when it was last loaded. Not thread-safe."""

    def __init__(
        self,
        table: Table,
        info: TableInfo,
        *,
        live_files: LiveFilesCache | None = None,
        role: LakeRole = LakeRole.ROWS,
    ) -> None:
        self._table = table
        self._info = info
        self.role = role
        """Which of the table's lake tables it is."""
        self.name = ".".join(lake_identifier(info, role=role))
        """`database.table`, as the catalog has it."""
        self._live_files = live_files or LiveFilesCache()
        self._layout = layout_of(table, info, role=role)

    @property
    def uuid(self) -> str:
        """The Iceberg table's identity."""
        return str(self._table.metadata.table_uuid)

    @property
    def snapshot_id(self) -> int | None:
        """The current snapshot, None before the first commit."""
        snapshot = self._table.metadata.snapshot_by_name(MAIN_BRANCH)
        return None if snapshot is None else snapshot.snapshot_id

    @property
    def debt(self) -> LakeDebt | None:
        """What the current snapshot is made of, None before the first commit."""
        metadata = self._table.metadata
        snapshot = metadata.snapshot_by_name(MAIN_BRANCH)
        if snapshot is None or snapshot.summary is None:
            return None
        rows = int(snapshot.summary.get("total-records") or 0)
        deleted = int(snapshot.summary.get("total-position-deletes") or 0)
        return LakeDebt(
            deleted_share=min(1.0, deleted / rows) if rows else 0.0,
            data_files=int(snapshot.summary.get("total-data-files") or 0),
            delete_files=int(snapshot.summary.get("total-delete-files") or 0),
            snapshots=len(metadata.snapshots),
        )

    @property
    def iceberg(self) -> Table:
        """The Iceberg table itself, for maintenance; commits made through it are seen here."""
        return self._table

    @property
    def covered(self) -> CoveredOffsets | None:
        """The offsets that the current snapshot covers, None before the first round."""
        return covered_offsets(self._table.metadata, table_id=self._info.table_id, role=self.role)

    @property
    def truncated_offsets(self) -> dict[int, int]:
        """Below which offsets rows were overwritten and are in no file any more."""
        covered = self.covered
        return {} if covered is None else dict(covered.truncated_offsets)

    @property
    def expired_offsets(self) -> dict[int, int]:
        """Below which offsets rows have reached their time to live; files may still have them."""
        covered = self.covered
        return {} if covered is None else dict(covered.expired_offsets)

    def live_files(self) -> LiveFiles:
        """Return the data files of the current snapshot."""
        with lake_errors(f"read the files of lake table '{self.name}'"):
            return self._live_files.of(self._table)

    @property
    def layout(self) -> LakeLayout:
        """How files for this table must be written."""
        return self._layout

    @property
    def file_schema(self) -> pa.Schema:
        """The Arrow schema of files for this table, with field ids."""
        return self._layout.file_schema

    @property
    def data_location(self) -> str:
        """The folder below which data files go."""
        return self._table.location_provider().data_path

    def commit(
        self, commit: LakeCommit, *, checkpoint: Callable[[str], None] = lambda _: None
    ) -> int:
        """Make the round's changes in one snapshot and return its id.

        Raises:
            FencedError: another worker has advanced the table; nothing was added.
            UnknownOutcomeError: the catalog cannot be asked what became of the commit. The files
                must stay: the next round looks again.
            StreamhouseError: nothing was added, and nothing will be.
        """
        added = data_files(
            commit.files,
            schema=self._layout.iceberg_schema,
            properties=self._table.metadata.properties,
            spec_id=self._layout.spec_id,
            sort_order_id=self._layout.sort_order_id,
        )
        files = [*added, *position_delete_files(commit.deletes)]
        properties = round_properties(
            table_id=self._info.table_id,
            covered=CoveredOffsets(
                epoch=commit.epoch,
                tiered_offsets=commit.tiered_offsets,
                truncated_offsets=commit.truncated_offsets,
                expired_offsets=self.expired_offsets,
            ),
            role=self.role,
        )
        attempts = _Attempts()
        self._check_base(commit)
        try:
            return self._try_until_landed(commit, files, properties, attempts, checkpoint)
        except FencedError:
            # The base is gone: no attempt, lost on the way or not, can land any more.
            raise
        except StreamhouseError as error:
            if attempts.is_unknown and not isinstance(error, UnknownOutcomeError):
                raise UnknownOutcomeError(
                    f"lake table '{self.name}': a commit may still land; then came: {error}"
                ) from error
            raise

    def _try_until_landed(
        self,
        commit: LakeCommit,
        files: Sequence[DataFile],
        properties: Mapping[str, str],
        attempts: _Attempts,
        checkpoint: Callable[[str], None],
    ) -> int:
        said = ""
        for attempt in range(COMMIT_ATTEMPTS_MAX):
            if attempt:
                time.sleep(_RETRY_WAIT_S_FIRST * 2**attempt * random.uniform(0.5, 1.0))
            with lake_errors(f"write metadata of lake table '{self.name}'"):
                staged = stage_snapshot(
                    self._table,
                    self._changes(commit, files),
                    summary=properties,
                    table_properties=lambda number: {
                        **table_properties(properties, sequence_number=number),
                        **description_properties(
                            self._info, self._table.metadata.properties, role=self.role
                        ),
                    },
                )
            checkpoint("manifests-written")
            attempts.start(staged)
            error = self._send(staged, attempts)
            landed = staged.snapshot_id if error is None else self._look(commit, attempts)
            if landed is not None:
                attempts.clean_up(self._table, landed=landed)
                return landed
            assert error is not None, "it would have landed"
            said = f"{type(error).__name__}: {sentence_of(error)}"
            _logger.warning("commit to lake table %s failed: %s", self.name, said)
            if isinstance(error, _REFUSALS):
                break
        attempts.clean_up(self._table, landed=None)
        raise UnavailableError(
            f"lake table '{self.name}': {len(attempts.snapshot_ids)} commits failed,"
            f" the last with {said}"
        )

    def _changes(self, commit: LakeCommit, added: Sequence[DataFile]) -> SnapshotChanges:
        """Return what the commit does to the files of the current snapshot."""
        removed: Sequence[DataFile] = ()
        if commit.is_anew or dict(commit.truncated_offsets) != self.truncated_offsets:
            removed = live_data_files(self._table)
        operation = Operation.OVERWRITE if commit.deletes or removed else Operation.APPEND
        if removed and not added:
            operation = Operation.DELETE
        return SnapshotChanges(operation=operation, added=added, removed=removed)

    def _send(self, staged: StagedSnapshot, attempts: _Attempts) -> BaseException | None:
        """Send the commit; return None when it landed for certain, else what was raised."""
        try:
            # Table.transaction() would retry on a newer base by itself; this does not.
            self._table._do_commit(staged.updates, staged.requirements)
        except (CommitFailedException, *_REFUSALS) as error:
            return error
        except Exception as error:  # noqa: BLE001 - whatever a catalog raises, it may have landed
            attempts.is_unknown = True
            return error
        return None

    def _look(self, commit: LakeCommit, attempts: _Attempts) -> int | None:
        """Reload the table; return the snapshot of ours that landed, or None to try again.

        Raises `FencedError` when the table now covers other offsets than the round started from,
        `UnavailableError` when another engine rewrote files that the round deletes rows of,
        `NotFoundError` when the table is gone.
        """
        try:
            self._table = self._table.catalog.load_table(self._table.name())
        except NoSuchTableError as error:
            raise NotFoundError(
                f"lake table '{self.name}' was dropped while a round wrote to it; nothing was added"
            ) from error
        except Exception as error:
            # Every other failure to look means not knowing.
            raise UnknownOutcomeError(
                f"lake table '{self.name}': a commit may have landed, and the catalog cannot"
                f" be asked: {sentence_of(error)}"
            ) from error
        for snapshot_id in attempts.snapshot_ids:
            if has_ancestor(self._table.metadata, snapshot_id):
                return snapshot_id
        covered = self.covered
        is_ours = covered is not None and covered.epoch == commit.epoch
        if is_ours and covered is not None and covered.tiered_offsets == commit.tiered_offsets:
            # Landed, then compacted and expired by another engine: the current snapshot has it.
            return self.snapshot_id
        try:
            self._check_base(commit)
            self._check_referenced(commit, attempts)
        except (FencedError, UnavailableError):
            attempts.clean_up(self._table, landed=None)
            raise
        return None

    def _check_referenced(self, commit: LakeCommit, attempts: _Attempts) -> None:
        """Raise unless every file that the round deletes rows of is still live."""
        if commit.deletes:
            gone = self.live_files().missing(p for d in commit.deletes for p in d.data_paths)
            if gone:
                # The snapshot that every attempt asserted is no longer the current one.
                attempts.is_unknown = False
                raise UnavailableError(
                    f"lake table '{self.name}': another engine rewrote {len(gone)} files"
                    f" while rows of them were retracted, such as '{min(gone)}'; nothing was added,"
                    " the next round finds the rows where they are now"
                )

    def _check_base(self, commit: LakeCommit) -> None:
        owner = self._table.metadata.properties.get(self.role.owner_property)
        if owner != str(self._info.table_id):
            raise FencedError(
                f"lake table '{self.name}' was adopted as another table (id {owner}, this one has"
                f" id {self._info.table_id}), probably by another service; nothing was added"
            )
        covered = self.covered
        found = dict.fromkeys(commit.base_offsets, 0) if covered is None else covered.tiered_offsets
        if dict(found) != dict(commit.base_offsets):
            raise FencedError(
                f"lake table '{self.name}' was advanced by another tiering worker"
                f" (epoch {covered.epoch if covered else 0}, this one has {commit.epoch});"
                " nothing was added"
            )


class _Attempts:
    """The snapshots sent so far, any of which may have landed."""

    def __init__(self) -> None:
        self._staged: list[StagedSnapshot] = []
        self.is_unknown = False

    @property
    def snapshot_ids(self) -> list[int]:
        return [staged.snapshot_id for staged in self._staged]

    def start(self, staged: StagedSnapshot) -> None:
        self._staged.append(staged)

    def clean_up(self, table: Table, *, landed: int | None) -> None:
        """Delete metadata of attempts that can never land; leave it where that is not certain."""
        if self.is_unknown and landed is None:
            return
        for staged in self._staged:
            if staged.snapshot_id == landed:
                continue
            for path in staged.metadata_paths:
                with contextlib.suppress(OSError):
                    table.io.delete(path)
