"""A look at a lake table in its catalog: commits of other engines since the last round.

A commit of another engine moves no offsets: no round reports the commit. The caller registers the
commit, and from then on readers read its snapshot.
"""

from __future__ import annotations

from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import NoSuchTableError

from streamhouse.core.model.lake.facts import LakeRole
from streamhouse.lake.guards.served_tables import ServedTable
from streamhouse.lake.iceberg_errors import catalog_errors
from streamhouse.lake.snapshots._coverage import covered_offsets
from streamhouse.lake.snapshots._outside_changes import outside_problem

__all__ = ["readable_head"]


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
        metadata = table.metadata
        covered = covered_offsets(metadata, table_id=live.info.table_id)
        if covered is None or str(metadata.table_uuid) != lake.table_uuid:
            return None
        if (covered.tiered_offsets, covered.truncated_offsets, covered.expired_offsets) != (
            lake.tiered_offsets,
            lake.truncated_offsets,
            lake.expired_offsets,
        ):
            return None
        if outside_problem(
            str(path),
            metadata,
            live.info,
            LakeRole.ROWS,
            table.io,
            registered=lake.snapshot_id,
        ):
            return None
        return metadata.current_snapshot_id
