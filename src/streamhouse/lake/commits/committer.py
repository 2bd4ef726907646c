"""Commits to one lake table: one snapshot a round.

Beyond the promises of every commit (`lake/_landing.py`), a round's commit lands only on a snapshot
with exactly the offsets of the round's start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.table.refs import MAIN_BRANCH

from streamhouse.core.errors import (
    CorruptDataError,
    FencedError,
    UnavailableError,
)
from streamhouse.core.model.lake.facts import VERSION_3, LakeDebt, LakeRole
from streamhouse.core.model.table import TableInfo
from streamhouse.lake._landing import StagedChange, land_snapshot
from streamhouse.lake.commits._staged_snapshot import (
    Operation,
    SnapshotChanges,
    stage_snapshot,
)
from streamhouse.lake.commits._vectors import write_vectors
from streamhouse.lake.files._field_ids import with_defaults
from streamhouse.lake.files._written_files import data_files, position_delete_files
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.files.name_mapping import NameMapping
from streamhouse.lake.files.parquet_writer import WrittenFile
from streamhouse.lake.files.position_deletes import DeletedRows, WrittenDeletes
from streamhouse.lake.iceberg_errors import lake_errors
from streamhouse.lake.snapshots._coverage import (
    CoveredOffsets,
    covered_offsets,
    round_properties,
    table_properties,
)
from streamhouse.lake.snapshots._outside_changes import (
    outside_problem,
    outside_properties,
)
from streamhouse.lake.snapshots.inventory import Head, head_of
from streamhouse.lake.snapshots.live_files import (
    LiveFiles,
    LiveFilesCache,
    live_data_files,
)
from streamhouse.lake.tables._column_types import name_mapping_of
from streamhouse.lake.tables._creation import LakeLayout, lake_identifier, layout_of
from streamhouse.lake.tables.iceberg_schema import description_properties

__all__ = ["IcebergLakeTable", "LakeCommit"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeCommit:
    """A round's commit: the changes from `base_offsets` to `tiered_offsets` as files of the lake.

    `deletes`, and `deleted_rows` in format version 3, point to data files that are live in the
    snapshot of the round's plan. If the lake
    does not have `truncated_offsets` yet, all its rows were overwritten and go; with `is_anew` all
    rows go as well. `fingerprints` are the log's at `tiered_offsets`.
    """

    files: Sequence[WrittenFile]
    deletes: Sequence[WrittenDeletes] = ()
    deleted_rows: Sequence[DeletedRows] = ()
    base_offsets: Mapping[int, int]
    tiered_offsets: Mapping[int, int]
    truncated_offsets: Mapping[int, int] = field(default_factory=dict)
    epoch: int
    is_anew: bool = False
    fingerprints: Mapping[int, str] = field(default_factory=dict)


class IcebergLakeTable:
    """An open lake table, as last loaded. Not thread-safe.

    `registered` is the service's registered snapshot at the time of opening.
    """

    def __init__(
        self,
        table: Table,
        info: TableInfo,
        *,
        files: LakeFilesystem,
        live_files: LiveFilesCache | None = None,
        role: LakeRole = LakeRole.ROWS,
        registered: int | None = None,
    ) -> None:
        self._table = table
        self.files = files
        """Opens the table's files."""
        self._registered = registered
        self.info = info
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
    def owner(self) -> str | None:
        """The id of the Streamhouse table in the lake table's properties."""
        return self._table.metadata.properties.get(self.role.owner_property)

    def description(self) -> dict[str, str]:
        """Return the description of the table that the lake table lacks so far."""
        return description_properties(self.info, self._table.metadata.properties, role=self.role)

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
    def head(self) -> Head:
        """What its metadata alone tells."""
        return head_of(self._table)

    @property
    def properties(self) -> Mapping[str, str]:
        """Its table properties."""
        return self._table.metadata.properties

    @property
    def whole_schema(self) -> pa.Schema:
        """The Arrow schema of all current columns, also of other engines' columns."""
        from pyiceberg.io.pyarrow import (  # noqa: PLC0415 - imports pandas, for packing alone
            schema_to_pyarrow,
        )

        return with_defaults(schema_to_pyarrow(self._table.schema()), self.info.schema)

    @property
    def name_mapping(self) -> NameMapping | None:
        """Which field a column is that a file of another engine has without a field id."""
        return name_mapping_of(self._table)

    @property
    def covered(self) -> CoveredOffsets | None:
        """The offsets that the current snapshot covers, None before the first round."""
        return covered_offsets(self._table.metadata, table_id=self.info.table_id, role=self.role)

    @property
    def truncated_offsets(self) -> dict[int, int]:
        """Below which offsets rows were overwritten and are in no file any more."""
        covered = self.covered
        return {} if covered is None else dict(covered.truncated_offsets)

    @property
    def fingerprints(self) -> dict[int, str]:
        """The fingerprints of the rows' log in the current snapshot."""
        covered = self.covered
        return {} if covered is None else dict(covered.fingerprints)

    @property
    def expired_offsets(self) -> dict[int, int]:
        """Below which offsets rows have reached their time to live; files may still have them."""
        covered = self.covered
        return {} if covered is None else dict(covered.expired_offsets)

    @property
    def expired_at_us(self) -> int:
        """When the newest row below `expired_offsets` was written; 0 without one."""
        covered = self.covered
        return 0 if covered is None else covered.expired_at_us

    def check_outside(self) -> None:
        """Raise `CorruptDataError` if another engine changed rows against the rules."""
        with lake_errors(f"read the snapshots of lake table '{self.name}'"):
            table = self._table
            problem = outside_problem(
                self.name,
                table.metadata,
                self.info,
                self.role,
                table.io,
                registered=self._registered,
            )
        if problem:
            raise CorruptDataError(problem)

    def outside_properties(self) -> dict[str, str]:
        """Return the table properties for the record of other engines' changes."""
        with lake_errors(f"read the snapshots of lake table '{self.name}'"):
            table = self._table
            return outside_properties(table.metadata, self.info, self.role, table.io)

    def live_files(self) -> LiveFiles:
        """Return the data files of the current snapshot."""
        with lake_errors(f"read the files of lake table '{self.name}'"):
            return self._live_files.of(self._table)

    @property
    def has_vectors(self) -> bool:
        """Whether deleted rows are deletion vectors, not position delete files."""
        return self._table.metadata.format_version >= VERSION_3

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
        """Commit the round's changes in one snapshot and return the snapshot's id.

        Raises:
            FencedError: another worker has advanced the table; nothing was added.
            UnknownOutcomeError: the catalog cannot tell whether the commit landed. The files must
                stay: the next round looks again.
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
            table_id=self.info.table_id,
            covered=CoveredOffsets(
                epoch=commit.epoch,
                tiered_offsets=commit.tiered_offsets,
                truncated_offsets=commit.truncated_offsets,
                expired_offsets=self.expired_offsets,
                expired_at_us=self.expired_at_us,
                fingerprints=commit.fingerprints,
            ),
            role=self.role,
        )
        change = _RoundChange(self, commit, files, properties)
        return land_snapshot(
            self._table, change, before_send=lambda: checkpoint("manifests-written")
        )


@dataclass(slots=True)
class _RoundChange:
    """A round's commit, for the landing loop."""

    lake_table: IcebergLakeTable
    commit: LakeCommit
    files: Sequence[DataFile]
    properties: Mapping[str, str]
    is_repeated: bool = False

    def stage(self, table: Table) -> StagedChange:
        """Stage the commit on the current table.

        Raises `FencedError` when the table covers other offsets than the start of the round,
        `UnavailableError` when another engine rewrote files with rows that the round deletes,
        `CorruptDataError` when another engine changed rows against the rules.
        """
        self._check_base()
        self.lake_table.check_outside()
        if self.is_repeated:
            self._check_referenced()
        self.is_repeated = True
        return stage_snapshot(
            table,
            self._changes(table),
            summary=self.properties,
            table_properties=lambda number: {
                **table_properties(self.properties, sequence_number=number),
                **self.lake_table.description(),
                **self.lake_table.outside_properties(),
            },
        )

    def is_done(self) -> bool:
        """Whether the commit landed, and another engine then compacted and expired its snapshot."""
        covered = self.lake_table.covered
        return (
            covered is not None
            and covered.epoch == self.commit.epoch
            and dict(covered.tiered_offsets) == dict(self.commit.tiered_offsets)
            and dict(covered.truncated_offsets) == dict(self.commit.truncated_offsets)
            # A twin of the service's data directory has the same epochs, and may have as many rows.
            and dict(covered.fingerprints) == dict(self.commit.fingerprints)
        )

    def _changes(self, table: Table) -> SnapshotChanges:
        """Return what the commit does to the files of the current snapshot."""
        commit, removed = self.commit, list[DataFile]()
        if commit.is_anew or dict(commit.truncated_offsets) != self.lake_table.truncated_offsets:
            removed = list(live_data_files(table))
        added, made_for_it = list(self.files), list[str]()
        if commit.deleted_rows and not removed:
            lake_table = self.lake_table
            vectors = write_vectors(
                table,
                commit.deleted_rows,
                files=lake_table.files,
                live=lake_table.live_files(),
            )
            added += vectors.added
            removed += vectors.removed
            made_for_it.append(vectors.path)
        has_deletes = commit.deletes or commit.deleted_rows
        operation = Operation.OVERWRITE if has_deletes or removed else Operation.APPEND
        if removed and not added:
            operation = Operation.DELETE
        return SnapshotChanges(
            operation=operation, added=added, removed=removed, made_for_it=made_for_it
        )

    def _check_referenced(self) -> None:
        """Raise unless every file that the round deletes rows of is still live."""
        paths = [path for deletes in self.commit.deletes for path in deletes.data_paths]
        paths += [rows.data_path for rows in self.commit.deleted_rows]
        if paths:
            gone = self.lake_table.live_files().missing(paths)
            if gone:
                raise UnavailableError(
                    f"lake table '{self.lake_table.name}': another engine rewrote {len(gone)} files"
                    f" while rows of them were retracted, such as '{min(gone)}'; nothing was added,"
                    " the next round finds the rows where they are now"
                )

    def _check_base(self) -> None:
        lake, commit = self.lake_table, self.commit
        if lake.owner != str(lake.info.table_id):
            raise FencedError(
                f"lake table '{lake.name}' was adopted as another table (id {lake.owner}, this one"
                f" has id {lake.info.table_id}), probably by another service; nothing was added"
            )
        covered = lake.covered
        lake_offsets = (
            dict.fromkeys(commit.base_offsets, 0) if covered is None else covered.tiered_offsets
        )
        epoch = 0 if covered is None else covered.epoch
        if dict(lake_offsets) != dict(commit.base_offsets) or epoch > commit.epoch:
            raise FencedError(
                f"lake table '{lake.name}' was advanced by another tiering worker"
                f" (epoch {epoch}, this one has {commit.epoch}); nothing was added"
            )
