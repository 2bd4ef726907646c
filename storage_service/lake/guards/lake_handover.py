"""One commit that makes a lake table another owner's: a snapshot without changes, in its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from pyiceberg.table import Table
from pyiceberg.table.update import AssertCurrentSchemaId

from streamhouse.storage_service.errors import CommitConflictError, UnknownOutcomeError
from streamhouse.storage_service.lake.commits.staged_snapshot import (
    Operation,
    SnapshotChanges,
    stage_snapshot,
)
from streamhouse.storage_service.lake.landing import StagedChange, land
from streamhouse.storage_service.lake.snapshots.coverage import round_properties, table_properties
from streamhouse.storage_service.model.lake import SERVICE_ID_PROPERTY, LakeRole
from streamhouse.storage_service.model.lake_coverage import CoveredOffsets

__all__ = ["NewOwner", "hand_over"]

ATTEMPTS_MAX: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOwner:
    """Whose lake tables become."""

    service_id: str
    table_id: int
    epoch: int


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
    said = round_properties(
        table_id=owner.table_id, covered=replace(covered, epoch=owner.epoch), role=role
    )
    more = {SERVICE_ID_PROPERTY: owner.service_id, **(also or {})}
    change = _HandOver(seen=table.metadata_location, said=said, more=more)
    try:
        snapshot_id = land(table, change, attempts_max=ATTEMPTS_MAX)
    except UnknownOutcomeError as error:
        raise UnknownOutcomeError(
            f"lake table '{'.'.join(table.name())}' may have been adopted; try again: {error}"
        ) from error
    assert snapshot_id is not None, "it has a snapshot"
    return snapshot_id


@dataclass(frozen=True, slots=True, kw_only=True)
class _HandOver:
    """A hand-over, for the loop that lands it: to the table exactly as it was `seen`.

    `said` are the properties of its snapshot, `more` those of the table besides.
    """

    seen: str
    said: Mapping[str, str]
    more: Mapping[str, str]

    def stage(self, table: Table) -> StagedChange:
        """Raise `CommitConflictError` when the table has changed."""
        if table.metadata_location != self.seen:
            raise CommitConflictError(
                f"lake table '{'.'.join(table.name())}' was changed while it was adopted, perhaps"
                " by a service that still runs: see that it is stopped, and try again"
            )
        staged = stage_snapshot(
            table,
            SnapshotChanges(operation=Operation.APPEND),
            summary=self.said,
            table_properties=lambda number: {
                **table_properties(self.said, sequence_number=number),
                **self.more,
            },
        )
        # The description that comes with it is of these columns.
        columns = {"current-schema-id": table.metadata.current_schema_id}
        return replace(
            staged,
            requirements=(*staged.requirements, AssertCurrentSchemaId.model_validate(columns)),
        )

    def is_done(self) -> bool:
        """Nothing but its snapshot shows that it landed."""
        return False
