"""The offsets of a lake table, read from its snapshots.

`model/lake/coverage.py` has the rule; this module has the properties of rounds, and their search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import Snapshot

from streamhouse.core.model.lake import coverage as rule
from streamhouse.core.model.lake.coverage import (
    CoveredOffsets,
    SnapshotFacts,
    begin_properties,
)
from streamhouse.core.model.lake.facts import (
    COMMIT_USER,
    COMMIT_USER_PROPERTY,
    EXPIRED_AT_PROPERTY,
    EXPIRED_OFFSETS_PROPERTY,
    LOG_FINGERPRINTS_PROPERTY,
    OWNER_PROPERTIES,
    TIERED_OFFSETS_PROPERTY,
    TIERED_SEQUENCE_PROPERTY,
    TIERING_EPOCH_PROPERTY,
    TRUNCATED_OFFSETS_PROPERTY,
    LakeRole,
    tiered_offsets_to_property,
)

__all__ = [
    "CoveredOffsets",
    "ancestors_of",
    "covered_for",
    "covered_offsets",
    "facts_of",
    "role_of",
    "round_properties",
    "table_properties",
]


def round_properties(
    *,
    table_id: int,
    covered: CoveredOffsets,
    role: LakeRole = LakeRole.ROWS,
) -> dict[str, str]:
    """Return the properties of a Streamhouse snapshot with these offsets of every bucket."""
    return begin_properties(covered) | {
        COMMIT_USER_PROPERTY: COMMIT_USER,
        role.owner_property: str(table_id),
        TIERING_EPOCH_PROPERTY: str(covered.epoch),
        TIERED_OFFSETS_PROPERTY: tiered_offsets_to_property(covered.tiered_offsets),
    }


def table_properties(snapshot: Mapping[str, str], *, sequence_number: int) -> dict[str, str]:
    """Return the table properties for a snapshot with these properties."""
    keys = (
        *OWNER_PROPERTIES,
        TIERING_EPOCH_PROPERTY,
        TIERED_OFFSETS_PROPERTY,
        TRUNCATED_OFFSETS_PROPERTY,
        EXPIRED_OFFSETS_PROPERTY,
        EXPIRED_AT_PROPERTY,
        LOG_FINGERPRINTS_PROPERTY,
    )
    properties = {key: snapshot[key] for key in keys if key in snapshot}
    return properties | {TIERED_SEQUENCE_PROPERTY: str(sequence_number)}


def role_of(properties: Mapping[str, str]) -> LakeRole:
    """Return the role of a lake table with these properties."""
    return next((r for r in LakeRole if r.owner_property in properties), LakeRole.ROWS)


def ancestors_of(metadata: TableMetadata, snapshot: Snapshot | None = None) -> Iterator[Snapshot]:
    """Yield a snapshot, by default the current snapshot, and its existing ancestors.

    The newest comes first.
    """
    if snapshot is None:
        snapshot = metadata.snapshot_by_name(MAIN_BRANCH)
    if snapshot is None:
        return
    yield snapshot
    # pyiceberg looks for an id from the first snapshot on, each time.
    by_id = {ancestor.snapshot_id: ancestor for ancestor in metadata.snapshots}
    while snapshot is not None and snapshot.parent_snapshot_id is not None:
        snapshot = by_id.get(snapshot.parent_snapshot_id)
        if snapshot is not None:
            yield snapshot


def facts_of(snapshot: Snapshot) -> SnapshotFacts:
    """Return the offsets in a snapshot's properties."""
    summary = snapshot.summary
    return SnapshotFacts(
        properties={} if summary is None else summary.additional_properties,
        sequence_number=snapshot.sequence_number or 0,
    )


def covered_offsets(
    metadata: TableMetadata,
    *,
    table_id: int | None,
    role: LakeRole = LakeRole.ROWS,
    snapshot: Snapshot | None = None,
) -> CoveredOffsets | None:
    """Return the offsets of a table of the service in a snapshot, by default the current snapshot.

    `role` is the lake table's. None without a round of `table_id` in the snapshot; a `table_id` of
    None accepts any table, for callers with the lake table's uuid.
    """
    return covered_for(
        metadata,
        snapshot=snapshot,
        is_owner=lambda properties: (
            table_id is None or properties.get(role.owner_property) == str(table_id)
        ),
    )


def covered_for(
    metadata: TableMetadata,
    *,
    is_owner: Callable[[Mapping[str, str]], bool],
    snapshot: Snapshot | None = None,
) -> CoveredOffsets | None:
    """Return what a snapshot covers, as `covered_offsets`, of an owner told by properties."""
    return rule.covered_offsets(
        (facts_of(ancestor) for ancestor in ancestors_of(metadata, snapshot)),
        metadata.properties,
        is_owner=is_owner,
    )
