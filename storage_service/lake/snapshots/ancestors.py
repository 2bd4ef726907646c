"""The snapshots that a lake table's current one comes from, for the rule of what it covers."""

from __future__ import annotations

from collections.abc import Iterator

from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import Snapshot

from streamhouse.storage_service.model.lake_coverage import SnapshotFacts

__all__ = ["ancestors_of", "facts_of"]


def ancestors_of(metadata: TableMetadata, snapshot: Snapshot | None = None) -> Iterator[Snapshot]:
    """Yield a snapshot, by default the current one, and its ancestors, as far as they exist.

    The newest comes first.
    """
    if snapshot is None:
        snapshot = metadata.snapshot_by_name(MAIN_BRANCH)
    if snapshot is None:
        return
    yield snapshot
    # pyiceberg looks for an id from the first snapshot on, each time.
    by_id = {other.snapshot_id: other for other in metadata.snapshots}
    while snapshot is not None and snapshot.parent_snapshot_id is not None:
        snapshot = by_id.get(snapshot.parent_snapshot_id)
        if snapshot is not None:
            yield snapshot


def facts_of(snapshot: Snapshot) -> SnapshotFacts:
    """Return what a snapshot says of the offsets it covers."""
    summary = snapshot.summary
    return SnapshotFacts(
        properties={} if summary is None else summary.additional_properties,
        sequence_number=snapshot.sequence_number or 0,
    )
