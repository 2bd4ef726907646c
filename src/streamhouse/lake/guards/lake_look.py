"""A look at a lake table in its catalog: commits of other engines since the last round.

A commit of another engine moves no offsets: no round reports the commit. The caller registers the
commit, and from then on readers read its snapshot.
"""

from __future__ import annotations

from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table

from streamhouse.core.model.lake.facts import LakeRole, LakeState
from streamhouse.core.model.table import TableInfo
from streamhouse.lake.guards.served_tables import ServedTable
from streamhouse.lake.iceberg_errors import catalog_errors
from streamhouse.lake.snapshots._coverage import covered_offsets
from streamhouse.lake.snapshots._outside_changes import outside_problem

__all__ = ["is_head_readable", "readable_head"]


def readable_head(catalog: Catalog, live: ServedTable) -> int | None:
    """Return the current snapshot of a table's rows, if readers may read the snapshot.

    The snapshot covers exactly the registered offsets, and has no forbidden change of another
    engine. Otherwise None: a round reports the snapshot, or refuses the table.
    """
    path, lake = live.info.path, live.lake
    with catalog_errors(f"look at lake table '{path}'"):
        try:
            table = catalog.load_table((path.database, path.table))
        except NoSuchTableError:
            return None
        is_readable = is_head_readable(table, live.info, lake)
        return table.metadata.current_snapshot_id if is_readable else None


def is_head_readable(table: Table, info: TableInfo, lake: LakeState) -> bool:
    """Whether the current snapshot of a lake table may be read in place of the one of `lake`.

    It covers exactly the registered offsets, and has no forbidden change of another engine.
    """
    metadata = table.metadata
    covered = covered_offsets(metadata, table_id=info.table_id, role=lake.role)
    if covered is None or str(metadata.table_uuid) != lake.table_uuid:
        return False
    if (covered.tiered_offsets, covered.truncated_offsets) != (
        lake.tiered_offsets,
        lake.truncated_offsets,
    ):
        return False
    # The service has expired offsets of the rows only.
    if lake.role is LakeRole.ROWS and covered.expired_offsets != lake.expired_offsets:
        return False
    name = lake.role.lake_name(str(info.path))
    return not outside_problem(
        name, metadata, info, lake.role, table.io, registered=lake.snapshot_id
    )
