"""One commit that makes a lake table another owner's: a snapshot without changes, in its name."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pyiceberg.manifest import write_manifest_list
from pyiceberg.table import Table
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import Operation, Snapshot, Summary, update_snapshot_summaries
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertCurrentSchemaId,
    AssertRefSnapshotId,
    AssertTableUUID,
    SetPropertiesUpdate,
    SetSnapshotRefUpdate,
)

from streamhouse.storage_service.errors import CommitConflictError, UnknownOutcomeError
from streamhouse.storage_service.lake.landing import StagedChange, land
from streamhouse.storage_service.lake.snapshots.manifests import manifests_of
from streamhouse.storage_service.model.lake import (
    COMMIT_USER,
    COMMIT_USER_PROPERTY,
    SERVICE_ID_PROPERTY,
    TIERED_OFFSETS_PROPERTY,
    TIERED_SEQUENCE_PROPERTY,
    TIERING_EPOCH_PROPERTY,
    LakeRole,
    tiered_offsets_to_property,
)
from streamhouse.storage_service.model.lake_coverage import CoveredOffsets, begin_properties

__all__ = ["NewOwner", "hand_over"]

ATTEMPTS_MAX: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOwner:
    """Whose lake tables become."""

    service_id: str
    table_id: int
    epoch: int

    def properties(self, covered: CoveredOffsets, role: LakeRole) -> dict[str, str]:
        """Return what snapshot and table say alike of a lake table that covers as much."""
        return begin_properties(covered) | {
            role.owner_property: str(self.table_id),
            TIERING_EPOCH_PROPERTY: str(self.epoch),
            TIERED_OFFSETS_PROPERTY: tiered_offsets_to_property(covered.tiered_offsets),
        }


def hand_over(
    table: Table,
    owner: NewOwner,
    role: LakeRole,
    *,
    covered: CoveredOffsets,
    also: Mapping[str, str] | None = None,
) -> int:
    """Commit and return the new snapshot's id; `also` are more properties of the table.

    `covered` is what the current snapshot covers, and so will the new one.

    Raises:
        CommitConflictError: the table is not as it was loaded any more; it stays as it is.
        UnknownOutcomeError: it may be adopted, or may still become so.
    """
    name = ".".join(table.name())
    try:
        snapshot_id = land(
            table, _HandOver(table, owner, role, covered, also or {}), attempts_max=ATTEMPTS_MAX
        )
    except UnknownOutcomeError as error:
        raise UnknownOutcomeError(
            f"lake table '{name}' may have been adopted; try again: {error}"
        ) from error
    assert snapshot_id is not None, "it has a snapshot"
    return snapshot_id


class _HandOver:
    """A hand-over, for the loop that lands it: to the table exactly as it was looked at."""

    def __init__(
        self,
        table: Table,
        owner: NewOwner,
        role: LakeRole,
        covered: CoveredOffsets,
        also: Mapping[str, str],
    ) -> None:
        self._seen = table.metadata_location
        self._owned = owner.properties(covered, role)
        self._properties = {**self._owned, SERVICE_ID_PROPERTY: owner.service_id, **also}

    def stage(self, table: Table) -> StagedChange:
        """Raise `CommitConflictError` when the table has changed."""
        if table.metadata_location != self._seen:
            raise CommitConflictError(
                f"lake table '{'.'.join(table.name())}' was changed while it was adopted, perhaps"
                " by a service that still runs: see that it is stopped, and try again"
            )
        metadata = table.metadata
        snapshot = _staged(table, self._owned)
        branch = {"snapshot-id": snapshot.snapshot_id, "ref-name": MAIN_BRANCH, "type": "branch"}
        base = {"ref": MAIN_BRANCH, "snapshot-id": snapshot.parent_snapshot_id}
        sequence = {TIERED_SEQUENCE_PROPERTY: str(snapshot.sequence_number)}
        assert snapshot.sequence_number is not None, "it was given one"
        return StagedChange(
            updates=(
                AddSnapshotUpdate(snapshot=snapshot),
                SetSnapshotRefUpdate.model_validate(branch),
                SetPropertiesUpdate(updates={**self._properties, **sequence}),
            ),
            requirements=(
                AssertTableUUID(uuid=metadata.table_uuid),
                AssertRefSnapshotId.model_validate(base),
                # The description that comes with it is of these columns.
                AssertCurrentSchemaId.model_validate(
                    {"current-schema-id": metadata.current_schema_id}
                ),
            ),
            snapshot_id=snapshot.snapshot_id,
            parent_id=snapshot.parent_snapshot_id,
            sequence_number=snapshot.sequence_number,
            metadata_paths=(snapshot.manifest_list,),
        )

    def is_done(self) -> bool:
        """Nothing but its snapshot shows that it landed."""
        return False


def _staged(table: Table, properties: Mapping[str, str]) -> Snapshot:
    """Write the manifest list of a snapshot with the files of the current one."""
    metadata = table.metadata
    parent = metadata.snapshot_by_name(MAIN_BRANCH)
    assert parent is not None, "it covers offsets"
    snapshot_id = metadata.new_snapshot_id()
    sequence_number = metadata.next_sequence_number()
    location = table.location_provider().new_metadata_location(
        f"snap-{snapshot_id}-0-{uuid.uuid4()}.avro"
    )
    with write_manifest_list(
        format_version=2,
        output_file=table.io.new_output(location),
        snapshot_id=snapshot_id,
        parent_snapshot_id=parent.snapshot_id,
        sequence_number=sequence_number,
        avro_compression="deflate",
    ) as writer:
        writer.add_manifests(manifests_of(table.io, parent))
    said = {COMMIT_USER_PROPERTY: COMMIT_USER, **properties}
    summary = update_snapshot_summaries(Summary(Operation.APPEND, **said), parent.summary)
    return Snapshot.model_validate(
        {
            "snapshot-id": snapshot_id,
            "parent-snapshot-id": parent.snapshot_id,
            "manifest-list": location,
            "sequence-number": sequence_number,
            "summary": summary,
            "schema-id": metadata.current_schema_id,
        }
    )
