"""Which offsets a lake table covers: read from its snapshots, the one truth about the lake.

The rule is `model/lake_coverage.py`'s; here is what a round writes, and how it is found.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyiceberg.table.metadata import TableMetadata

from streamhouse.storage_service.lake.snapshots.ancestors import ancestors_of, facts_of
from streamhouse.storage_service.model import lake_coverage
from streamhouse.storage_service.model.lake import (
    COMMIT_USER,
    COMMIT_USER_PROPERTY,
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
from streamhouse.storage_service.model.lake_coverage import CoveredOffsets, begin_properties

__all__ = [
    "CoveredOffsets",
    "covered_offsets",
    "has_ancestor",
    "round_properties",
    "table_properties",
]


def round_properties(
    *,
    table_id: int,
    covered: CoveredOffsets,
    role: LakeRole = LakeRole.ROWS,
) -> dict[str, str]:
    """Return the properties of a snapshot of ours that covers so much; every bucket is in it."""
    return begin_properties(covered) | {
        COMMIT_USER_PROPERTY: COMMIT_USER,
        role.owner_property: str(table_id),
        TIERING_EPOCH_PROPERTY: str(covered.epoch),
        TIERED_OFFSETS_PROPERTY: tiered_offsets_to_property(covered.tiered_offsets),
    }


def table_properties(snapshot: Mapping[str, str], *, sequence_number: int) -> dict[str, str]:
    """Return the table properties that go with a snapshot of those properties."""
    kept = (
        *OWNER_PROPERTIES,
        TIERING_EPOCH_PROPERTY,
        TIERED_OFFSETS_PROPERTY,
        TRUNCATED_OFFSETS_PROPERTY,
        EXPIRED_OFFSETS_PROPERTY,
        LOG_FINGERPRINTS_PROPERTY,
    )
    found = {key: snapshot[key] for key in kept if key in snapshot}
    return found | {TIERED_SEQUENCE_PROPERTY: str(sequence_number)}


def covered_offsets(
    metadata: TableMetadata, *, table_id: int, role: LakeRole = LakeRole.ROWS
) -> CoveredOffsets | None:
    """Return what the current snapshot covers, or None when no round of `table_id` is in it.

    `role` is the lake table's.
    """
    owner = str(table_id)
    return lake_coverage.covered_offsets(
        (facts_of(snapshot) for snapshot in ancestors_of(metadata)),
        metadata.properties,
        is_owner=lambda properties: properties.get(role.owner_property) == owner,
    )


def has_ancestor(metadata: TableMetadata, snapshot_id: int) -> bool:
    """Whether the current snapshot is `snapshot_id` or comes from it."""
    return any(snapshot.snapshot_id == snapshot_id for snapshot in ancestors_of(metadata))
