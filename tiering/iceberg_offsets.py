"""Which offsets a lake table covers: read from its snapshots, the one truth about the lake.

A snapshot of another engine (compaction) carries no offsets; it covers what its newest ancestor
that has them covers. Every round also sets them as table properties in the same commit, with the
sequence number of its snapshot: they answer when an engine has expired all the snapshots that
carried them. A table that was rolled back to before that snapshot has ancestors older than it, and
is not taken for one that covers its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import Snapshot

from streamhouse.storage_service.model.lake import (
    COMMIT_USER,
    COMMIT_USER_PROPERTY,
    OWNER_PROPERTIES,
    TIERED_OFFSETS_PROPERTY,
    TIERED_SEQUENCE_PROPERTY,
    TIERING_EPOCH_PROPERTY,
    LakeRole,
    tiered_offsets_from_property,
    tiered_offsets_to_property,
)

__all__ = [
    "CoveredOffsets",
    "covered_offsets",
    "has_ancestor",
    "round_properties",
    "table_properties",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoveredOffsets:
    """The end offset per bucket that the current snapshot covers, and the epoch that wrote it."""

    tiered_offsets: Mapping[int, int]
    epoch: int


def round_properties(
    *, table_id: int, epoch: int, tiered_offsets: Mapping[int, int], role: LakeRole = LakeRole.ROWS
) -> dict[str, str]:
    """Return the snapshot properties of a round; `tiered_offsets` has every bucket."""
    return {
        COMMIT_USER_PROPERTY: COMMIT_USER,
        role.owner_property: str(table_id),
        TIERING_EPOCH_PROPERTY: str(epoch),
        TIERED_OFFSETS_PROPERTY: tiered_offsets_to_property(tiered_offsets),
    }


def table_properties(snapshot: Mapping[str, str], *, sequence_number: int) -> dict[str, str]:
    """Return the table properties that go with a snapshot of those properties."""
    kept = (
        *OWNER_PROPERTIES,
        TIERING_EPOCH_PROPERTY,
        TIERED_OFFSETS_PROPERTY,
    )
    found = {key: snapshot[key] for key in kept if key in snapshot}
    return found | {TIERED_SEQUENCE_PROPERTY: str(sequence_number)}


def covered_offsets(
    metadata: TableMetadata, *, table_id: int, role: LakeRole = LakeRole.ROWS
) -> CoveredOffsets | None:
    """Return what the current snapshot covers, or None when no round of `table_id` is in it.

    `role` is the lake table's.
    """
    owner = (role.owner_property, str(table_id))
    oldest: Snapshot | None = None
    for snapshot in _ancestors(metadata):
        if snapshot.summary is not None:
            found = _read(snapshot.summary.additional_properties, owner)
            if found is not None:
                return found
        oldest = snapshot
    sequence_number = int(metadata.properties.get(TIERED_SEQUENCE_PROPERTY, "0"))
    if oldest is None or (oldest.sequence_number or 0) < sequence_number:
        return None
    return _read(metadata.properties, owner)


def has_ancestor(metadata: TableMetadata, snapshot_id: int) -> bool:
    """Whether the current snapshot is `snapshot_id` or comes from it."""
    return any(snapshot.snapshot_id == snapshot_id for snapshot in _ancestors(metadata))


def _read(properties: Mapping[str, str], owner: tuple[str, str]) -> CoveredOffsets | None:
    text = properties.get(TIERED_OFFSETS_PROPERTY)
    if text is None or properties.get(owner[0]) != owner[1]:
        return None
    return CoveredOffsets(
        tiered_offsets=tiered_offsets_from_property(text),
        epoch=int(properties.get(TIERING_EPOCH_PROPERTY, "0")),
    )


def _ancestors(metadata: TableMetadata) -> Iterator[Snapshot]:
    """Yield the current snapshot and its ancestors, newest first, as far as they still exist."""
    snapshot = metadata.snapshot_by_name(MAIN_BRANCH)
    while snapshot is not None:
        yield snapshot
        parent_id = snapshot.parent_snapshot_id
        snapshot = None if parent_id is None else metadata.snapshot_by_id(parent_id)
