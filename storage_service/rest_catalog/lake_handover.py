"""One commit that makes a lake table another owner's: a snapshot without changes, in its name."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from pyiceberg.exceptions import CommitFailedException
from pyiceberg.manifest import write_manifest_list
from pyiceberg.table import Table
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import Operation, Snapshot, Summary, update_snapshot_summaries
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertRefSnapshotId,
    AssertTableUUID,
    SetPropertiesUpdate,
    SetSnapshotRefUpdate,
)

from streamhouse.storage_service.errors import CommitConflictError, UnknownOutcomeError
from streamhouse.storage_service.lake.errors import catalog_errors
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
        UnknownOutcomeError: nobody can be asked whether it is.
    """
    name = ".".join(table.name())
    metadata = table.metadata
    with catalog_errors(f"write metadata of lake table '{name}'"):
        snapshot = _staged(table, owner.properties(covered, role))
    branch = {"snapshot-id": snapshot.snapshot_id, "ref-name": MAIN_BRANCH, "type": "branch"}
    base = {"ref": MAIN_BRANCH, "snapshot-id": snapshot.parent_snapshot_id}
    properties = {
        **owner.properties(covered, role),
        SERVICE_ID_PROPERTY: owner.service_id,
        TIERED_SEQUENCE_PROPERTY: str(snapshot.sequence_number),
        **(also or {}),
    }
    try:
        # A transaction would retry on whatever another service commits meanwhile; this does not.
        table._do_commit(
            (
                AddSnapshotUpdate(snapshot=snapshot),
                SetSnapshotRefUpdate.model_validate(branch),
                SetPropertiesUpdate(updates=properties),
            ),
            (
                AssertTableUUID(uuid=metadata.table_uuid),
                AssertRefSnapshotId.model_validate(base),
            ),
        )
    except CommitFailedException as error:
        with contextlib.suppress(OSError):
            table.io.delete(snapshot.manifest_list)
        raise CommitConflictError(
            f"lake table '{name}' was changed while it was adopted, perhaps by a service that still"
            " runs: see that it is stopped, and try again"
        ) from error
    except Exception as error:  # noqa: BLE001 - whatever a catalog raises, it may have landed
        _check_landed(table, snapshot.snapshot_id, error)
    return snapshot.snapshot_id


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
        writer.add_manifests(parent.manifests(table.io))
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


def _check_landed(table: Table, snapshot_id: int, error: Exception) -> None:
    """Raise `UnknownOutcomeError` unless a commit that was not answered is in the table."""
    name = ".".join(table.name())
    try:
        found = table.catalog.load_table(table.name()).metadata
    except Exception as silence:
        raise UnknownOutcomeError(
            f"lake table '{name}' may have been adopted, and the catalog cannot be asked:"
            f" {silence}; try again"
        ) from silence
    if found.snapshot_by_id(snapshot_id) is None:
        raise UnknownOutcomeError(
            f"lake table '{name}' could not be adopted: {error}; try again"
        ) from error
