"""The part of a read that comes from the lake: a snapshot of a lake table, and offsets in it.

Every read of the lake opens the lake table and finds the files of the snapshot here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamhouse.client import StorageClient
from streamhouse.core.errors import SnapshotNotFoundError
from streamhouse.core.extras import require
from streamhouse.core.model.lake.facts import LakeCatalog, LakeRole, LakeState
from streamhouse.core.model.offsets import OffsetRange
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.table_state import TableState
from streamhouse.lake.files.lake_filesystem import lake_file_properties
from streamhouse.lake.files.partition_layout import lake_clustering
from streamhouse.reading.plan.row_request import RowRequest

if TYPE_CHECKING:
    from streamhouse.reading.files.planner import LakeFiles, LakeTable

__all__ = ["LakeCut", "cut_lake", "open_lake"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeCut:
    """A snapshot of an opened lake table, and the offsets of the snapshot that a read takes.

    A task opens the files with `file_properties`. `ranges` None takes all rows. With `successor_of`
    an expired snapshot is replaced by the current snapshot of this table; `successor_covers` are
    the offsets covered by a valid replacement.
    """

    lake: LakeTable
    file_properties: Mapping[str, str]
    snapshot_id: int
    role: LakeRole = LakeRole.ROWS
    ranges: Mapping[int, OffsetRange] | None = None
    successor_of: TableInfo | None = None
    successor_covers: Mapping[int, int] | None = None

    def files(self, table: TableInfo, rows: RowRequest) -> LakeFiles:
        """Return the files with possible rows of the request."""
        require("lake", "reading rows that were tiered")
        from streamhouse.reading.files._file_pruning import LakeQuery  # noqa: PLC0415 - pyiceberg is an extra

        query = LakeQuery(
            ranges=self.ranges,
            predicate=rows.predicate,
            from_timestamp_us=rows.from_timestamp_us,
            to_timestamp_us=rows.to_timestamp_us,
            clustering=lake_clustering(table.descriptor, role=self.role),
        )
        return self.lake.plan(
            table.schema,
            query,
            snapshot_id=self.snapshot_id,
            successor_of=self.successor_of,
            own_ids=table.column_ids,
            successor_covers=self.successor_covers,
        )


def open_lake(catalog: LakeCatalog, table: TableInfo, lake: LakeState) -> LakeTable:
    """Open the lake table that `lake` describes: the rows, the batch layout or the full history.

    Raises `SnapshotNotFoundError` before the first round.
    """
    # The lake library takes half a second to import: only reads of the lake pay.
    require("lake", "reading rows that were tiered")
    from streamhouse.reading.files.planner import open_lake_table  # noqa: PLC0415 - pyiceberg is an extra

    if lake.snapshot_id is None:
        raise SnapshotNotFoundError(
            f"table '{table.path}' has no lake snapshot yet: nothing was tiered"
        )
    name = lake.role.lake_name(str(table.path))
    return open_lake_table(catalog, name, table_uuid=lake.table_uuid)


def cut_lake(
    client: StorageClient,
    state: TableState,
    ranges: Mapping[int, OffsetRange] | None,
    *,
    is_changelog: bool = False,
    snapshot_id: int | None = None,
    allow_successor: bool = True,
    is_union: bool = True,
) -> LakeCut:
    """Return the cut of the lake at the snapshot of the state, or at `snapshot_id`.

    `is_changelog` takes the full history, else the lake table of the state's layout is read.

    When another engine's maintenance expired the state's snapshot, its successor is read: `ranges`
    cut the successor to the same rows. For a primary key table only a successor with the same
    offsets has the same rows: a later snapshot lacks rows retracted since. A full history only
    grows.

    Raises `HistoryDivergedError` if the rows are read with the rows of the log (`is_union`), and
    the lake has another history than the log.
    """
    registered = state.lake
    if is_changelog:
        assert state.lake.changelog is not None, "only a table with a full history has changes"
        registered = state.lake.changelog.as_lake_state(LakeRole.CHANGES)
    catalog, table = client.lake_catalog(), state.table
    lake = open_lake(catalog, table, registered)
    pinned_id = registered.snapshot_id if snapshot_id is None else snapshot_id
    if not is_changelog and snapshot_id is None and lake.may_have_other_rows(table, pinned_id or 0):
        # The service registers the commit of the other engine, so all later reads agree.
        current = client.look_at_lake(str(table.path))
        if (current.tiered_offsets, current.truncated_offsets) == (
            state.lake.tiered_offsets,
            state.lake.truncated_offsets,
        ):
            pinned_id = current.snapshot_id
        # Another commit may have come since the lake was opened.
        lake = open_lake(catalog, table, registered)
        if ranges is not None and lake.may_have_other_rows(table, pinned_id or 0):
            # An unreported round lies in between: cut at the ranges, its rows are the same.
            pinned_id = lake.newest_with(ranges) or pinned_id
    if is_union and (covered := lake.unregistered_offsets(table.table_id, registered)):
        # Rounds go on meanwhile: only the service can compare the lake with its log.
        client.check_lake_history(str(table.path), covered, table_id=table.table_id)
    assert pinned_id is not None, "only a table with a snapshot has lake ranges"
    return LakeCut(
        lake=lake,
        file_properties=lake_file_properties(catalog.properties),
        snapshot_id=pinned_id,
        role=registered.role,
        ranges=ranges,
        successor_of=table if allow_successor and ranges is not None else None,
        successor_covers=state.lake.tiered_offsets
        if table.is_primary_key_table and not is_changelog
        else None,
    )
