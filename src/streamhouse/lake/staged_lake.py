"""Lake tables with changes that are never committed: what a live cut is made on.

A staged table begins as the catalog has it, at the snapshot that the service registered; a table
that was never tiered begins as the first round would create it. Its commits, and the changes of its
columns and partitioning, are those of a round, and stay in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast
from uuid import UUID, uuid5

from pyiceberg.catalog import Catalog
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import SnapshotLogEntry
from pyiceberg.table.update import SetSnapshotRefUpdate, update_table_metadata

from streamhouse.core.errors import UnavailableError
from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.lake.facts import SERVICE_ID_PROPERTY, LakeCatalog, LakeRole, LakeState
from streamhouse.core.model.table import TableInfo
from streamhouse.lake.catalogs._format_version import write_metadata
from streamhouse.lake.catalogs._staging_catalog import StagingCatalog
from streamhouse.lake.commits.committer import IcebergLakeTable
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.files.live_folders import LiveFolders
from streamhouse.lake.guards.lake_look import is_head_readable
from streamhouse.lake.guards.table_commits import LakeMetadata
from streamhouse.lake.iceberg_errors import lake_errors
from streamhouse.lake.lake_tables import IcebergLake
from streamhouse.lake.snapshots._outside_changes import rows_stay_because
from streamhouse.lake.snapshots.live_files import LiveFilesCache
from streamhouse.lake.tables._evolution import evolve

__all__ = ["StagedLake", "StagedState", "StagedTable"]

Compare = Callable[[CoveredOffsets], object]
_FIRST_VERSION: Final = 0
_SHOWN_BEFORE_MS: Final = 86_400_000
_SHOWN: Final = UUID("6f0c1f0e-7a53-4c0b-9a86-3a4f5f6f2d11")
"""The namespace of the identities of live tables."""


class StagedLake:
    """Opens staged tables of a lake; `described` is the lake as workers see it."""

    def __init__(self, catalog: Catalog, described: LakeCatalog) -> None:
        self._catalog = catalog
        self._described = described
        self.files = LakeFilesystem(described.properties)

    def open(
        self, info: TableInfo, registered: LakeState, *, compare: Compare, cache: LiveFilesCache
    ) -> StagedTable:
        """Open the lake table of the role of `registered`, the service's record of the lake table.

        `compare` has the service verify that offsets belong to the log's history.

        Raises:
            StreamhouseError: the sentence of a round or a union read about that lake table.
        """
        catalog = StagingCatalog(self._catalog)
        lake = IcebergLake(self._described, opened=cast(Catalog, catalog))
        role = registered.role
        # The next round makes a lost batch layout anew.
        state = None if role is LakeRole.BATCH else registered
        opened = lake.open_or_create(info, state, role=role)
        if role is LakeRole.BATCH and registered.table_uuid != opened.uuid:
            beginning = dict.fromkeys(range(info.bucket_count), 0)
            registered = LakeState(role=role, tiered_offsets=beginning)
        with lake_errors(f"read lake table '{opened.name}'"):
            _set_head(opened, registered, compare)
        service_id = self._described.properties.get(SERVICE_ID_PROPERTY, "")
        shown_uuid = uuid5(_SHOWN, f"{service_id}/{info.table_id}/{role}")
        return StagedTable(
            opened, catalog, registered=registered, cache=cache, shown_uuid=shown_uuid
        )


@dataclass(frozen=True, slots=True)
class StagedState:
    """A staged table at one moment, to come back to."""

    metadata: TableMetadata
    info: TableInfo


class StagedTable:
    """A staged table that began with the `registered` state of the service.

    `base_snapshot_id` is the committed snapshot of its beginning, None without one.
    """

    def __init__(
        self,
        opened: IcebergLakeTable,
        catalog: StagingCatalog,
        *,
        registered: LakeState,
        cache: LiveFilesCache,
        shown_uuid: UUID,
    ) -> None:
        self._catalog = catalog
        self._shown_uuid = shown_uuid
        self._cache = cache
        self.registered = registered
        self.role = opened.role
        self.base_snapshot_id = opened.snapshot_id
        self._location = opened.iceberg.metadata_location
        self.location = opened.iceberg.location()
        self.lake_table = self._reopened(opened, opened.info)

    def _reopened(self, opened: IcebergLakeTable, info: TableInfo) -> IcebergLakeTable:
        return IcebergLakeTable(
            opened.iceberg,
            info,
            files=opened.files,
            live_files=self._cache,
            role=self.role,
            registered=self.base_snapshot_id,
        )

    def state(self) -> StagedState:
        """Return the table as it is now."""
        return StagedState(self.lake_table.iceberg.metadata, self.lake_table.info)

    def go_back(self, state: StagedState) -> None:
        """Take back all commits since `state`; their files stay for earlier readers."""
        self.lake_table.iceberg.metadata = state.metadata
        self.lake_table = self._reopened(self.lake_table, state.info)

    def evolve(self, info: TableInfo) -> None:
        """Give the table the columns and the partitioning of `info`."""
        table = self.lake_table.iceberg
        with lake_errors(f"change lake table '{self.lake_table.name}'"):
            evolve(table, info, role=self.role)
        self.lake_table = self._reopened(self.lake_table, info)

    def was_committed_to(self) -> bool:
        """Whether the catalog has another state of the table since this was last asked.

        Of tables whose rows only the service may change, nobody else's commit matters.
        """
        table = self.lake_table
        if self.base_snapshot_id is None or rows_stay_because(table.info, self.role):
            return False
        with lake_errors(f"open lake table '{table.name}'"):
            location = self._catalog.current_location(table.iceberg.name())
        before, self._location = self._location, location
        return location != before

    def write_into(self, folders: LiveFolders) -> None:
        """Have the next files go into `folders`."""
        self._catalog.folders = folders

    def write_metadata(self) -> LakeMetadata:
        """Write the metadata file, and return the metadata.

        It has the current snapshot alone, dated to a day before the table's creation. DuckDB reads
        the last snapshot that is not younger than its transaction: a snapshot that was made for a
        load is always younger, and an older one would be read in its place. A transaction may be
        older than the table, too, and the clock of its machine behind. The identity stays for the
        life of the streamhouse table, also when the first round creates the lake table: engines
        refuse a loaded table whose identity changes.
        """
        table = self.lake_table.iceberg
        metadata = self._shown()
        location = table.location_provider().new_table_metadata_file_location(_FIRST_VERSION)
        with lake_errors(f"write metadata of lake table '{self.lake_table.name}'"):
            write_metadata(metadata, table.io.new_output(location))
        return LakeMetadata(metadata_location=location, metadata=metadata)

    def _shown(self) -> TableMetadata:
        metadata = self.lake_table.iceberg.metadata
        shown_ms = self.lake_table.info.created_at_us // 1_000 - _SHOWN_BEFORE_MS
        current = metadata.snapshot_by_name(MAIN_BRANCH)
        alone: dict[str, Any] = {"snapshots": [], "snapshot_log": [], "refs": {}, "statistics": []}
        if current is not None:
            snapshot_id = current.snapshot_id
            dated = {"timestamp_ms": shown_ms, "parent_snapshot_id": None}
            entry = {"snapshot-id": snapshot_id, "timestamp-ms": shown_ms}
            alone = {
                "snapshots": [current.model_copy(update=dated)],
                "snapshot_log": [SnapshotLogEntry.model_validate(entry)],
                "refs": {MAIN_BRANCH: metadata.refs[MAIN_BRANCH]},
                "statistics": [s for s in metadata.statistics if s.snapshot_id == snapshot_id],
            }
        others = {
            "table_uuid": self._shown_uuid,
            "partition_statistics": [],
            "metadata_log": [],
            "last_updated_ms": shown_ms,
        }
        return metadata.model_copy(update=alone | others)


def _set_head(opened: IcebergLakeTable, registered: LakeState, compare: Compare) -> None:
    """Make the `registered` snapshot the current one, unless a later one has the same offsets.

    Raises `UnavailableError` if the registered snapshot is gone.
    """
    table = opened.iceberg
    metadata = table.metadata
    if opened.snapshot_id == registered.snapshot_id:
        return
    covered = opened.covered
    if registered.snapshot_id is None:
        # A round, or an earlier batch layout, has committed rows that the service does not know.
        refs = {name: ref for name, ref in metadata.refs.items() if name != MAIN_BRANCH}
        table.metadata = metadata.model_copy(update={"current_snapshot_id": None, "refs": refs})
        return
    if is_head_readable(table, opened.info, registered):
        return
    if covered is not None:
        compare(covered)
    if metadata.snapshot_by_id(registered.snapshot_id) is None:
        raise UnavailableError(
            f"lake table '{opened.name}' no longer has snapshot {registered.snapshot_id}, and the"
            " service has registered no later one: load the table again, or run a round"
            " (`streamhouse tier --once`)"
        )
    head = {"snapshot-id": registered.snapshot_id, "ref-name": MAIN_BRANCH, "type": "branch"}
    update = SetSnapshotRefUpdate.model_validate(head)
    table.metadata = update_table_metadata(metadata, (update,))
