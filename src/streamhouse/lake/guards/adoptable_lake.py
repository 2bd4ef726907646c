"""Lake tables of another service's table, or of an earlier table of this service, in adoption.

The lake table has the description of the table (`model/lake_description.py`) and the covered
offsets. Taking over is one commit a lake table: a snapshot without files, which carries the same
offsets under the new table's id and a later epoch. It lands only on the examined snapshot; from
then on every worker of the old owner is fenced: its base is no longer the current snapshot, and its
table no longer the owner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.update import AssertCurrentSchemaId

from streamhouse.core.errors import (
    CommitConflictError,
    FencedError,
    TableExistsError,
    TableNotFoundError,
    UnknownOutcomeError,
    UnsupportedError,
)
from streamhouse.core.model.lake.coverage import CoveredOffsets, offsets_of_properties
from streamhouse.core.model.lake.facts import (
    LAKE_SYSTEM_FIELDS,
    SERVICE_ID_PROPERTY,
    SYSTEM_FIELD_ID_FIRST,
    TABLE_ID_PROPERTY,
    LakeRole,
    LakeState,
    SideLakeState,
)
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath
from streamhouse.lake._landing import StagedChange, land_snapshot
from streamhouse.lake.commits._staged_snapshot import (
    Operation,
    SnapshotChanges,
    stage_snapshot,
)
from streamhouse.lake.guards.served_tables import ServedTables
from streamhouse.lake.iceberg_errors import catalog_errors
from streamhouse.lake.snapshots._coverage import (
    ancestors_of,
    covered_offsets,
    facts_of,
    round_properties,
    table_properties,
)
from streamhouse.lake.snapshots._table_files import check_taken_over
from streamhouse.lake.snapshots.live_files import newest_row_us
from streamhouse.lake.tables._description import (
    TABLE_PROPERTY,
    description_of,
    table_described_by,
)
from streamhouse.lake.tables.iceberg_schema import check_format_version

__all__ = ["AdoptableLake", "find_adoptable"]

QUIET_MS: Final = 10 * 60 * 1000
"""A lake table that another service tiered to less than this ago may still be in use."""

ATTEMPTS_MAX: Final = 3
_ELSE: Final = "import it as another table (`--as DB.TABLE`), which copies the rows"


@dataclass(frozen=True, kw_only=True)
class AdoptableLake:
    """The lake tables of a table, as examined.

    `sides` are the lake tables beside the rows' own, each with its covered offsets. The full
    history covers the same offsets as the rows; the next round rebuilds a batch layout with other
    offsets.
    """

    described: TableInfo
    rows: Table
    covered: CoveredOffsets
    sides: Mapping[LakeRole, tuple[Table, CoveredOffsets]]
    service_id: str

    @property
    def descriptor(self) -> TableDescriptor:
        """What the table is."""
        return self.described.descriptor

    @property
    def owner_id(self) -> int:
        """The id of the current owner of the lake tables."""
        return self.described.table_id

    def histories_of(self, table_id: int) -> list[CoveredOffsets]:
        """Return the histories in the rows' snapshots, written by rounds of this table."""
        histories = []
        for snapshot in ancestors_of(self.rows.metadata):
            properties = facts_of(snapshot).properties
            offsets = offsets_of_properties(properties)
            if offsets is not None and properties.get(TABLE_ID_PROPERTY) == str(table_id):
                histories.append(offsets)
        return histories

    def last_commit_us(self) -> int:
        """Return a time that is not before the time of any commit in the lake tables.

        Rows that are deleted show no time; the lake tables' last change is later.
        """
        tables = [self.rows, *(side for side, _ in self.sides.values())]
        changed_us = [1_000 * (table.metadata.last_updated_ms + 1) for table in tables]
        return max(*changed_us, *map(newest_row_us, tables))

    def take_over(self, table_id: int, *, now_us: int) -> tuple[TableInfo, LakeState]:
        """Make the lake tables those of the table with this id, which is above `owner_id`.

        The rows come first, and fence the previous owner at once. A partial adoption can be
        repeated from the start.

        Raises:
            CommitConflictError: somebody changed a lake table meanwhile.
            UnknownOutcomeError: the catalog cannot tell whether the lake table was changed.
        """
        ends, truncated = self.covered.tiered_offsets, self.covered.truncated_offsets
        table = replace(
            self.described,
            table_id=table_id,
            created_at_us=now_us,
            adopted_from={**self.described.adopted_from, self.owner_id: dict(ends)},
        )
        owner = _NewOwner(
            service_id=self.service_id,
            table_id=table_id,
            epoch=self._last_epoch() + 1,
        )
        snapshot_id = hand_over(
            self.rows,
            owner,
            LakeRole.ROWS,
            covered=_of_no_log(self.covered),
            also={TABLE_PROPERTY: description_of(table)},
        )
        sides = {
            role: SideLakeState(
                snapshot_id=hand_over(side, owner, role, covered=_of_no_log(covered)),
                table_uuid=str(side.metadata.table_uuid),
                tiered_offsets=covered.tiered_offsets,
                truncated_offsets=covered.truncated_offsets,
            )
            for role, (side, covered) in self.sides.items()
        }
        batch = sides.get(LakeRole.BATCH)
        if batch is not None and (batch.tiered_offsets, batch.truncated_offsets) != (
            ends,
            truncated,
        ):
            batch = None
        return table, LakeState(
            snapshot_id=snapshot_id,
            table_uuid=str(self.rows.metadata.table_uuid),
            tiering_epoch=owner.epoch,
            tiered_offsets=dict(ends),
            truncated_offsets=dict(truncated),
            expired_offsets=dict(self.covered.expired_offsets),
            expired_at_us=self.covered.expired_at_us,
            tiered_at_us=now_us,
            changelog=sides.get(LakeRole.CHANGES),
            batch=batch,
            batch_tiered_at_us=None if batch is None else now_us,
            # The contents of an unknown layout are not continued.
            batch_since_epoch=owner.epoch,
            # At once, for leftovers of the former owner: the table may never get a write.
            maintenance_due_us=0,
        )

    def _last_epoch(self) -> int:
        return max(self.covered.epoch, *(offsets.epoch for _, offsets in self.sides.values()), 0)


def find_adoptable(
    catalog: Catalog,
    path: TablePath,
    tables: ServedTables,
    *,
    is_forced: bool,
    now_ms: int,
    replaces: int | None = None,
) -> AdoptableLake:
    """Return the lake tables of the table at `path`, for this service to take over.

    `replaces` is the id of a table of this service that has the path, and another history; a copy
    of its data directory may be at work.

    Raises:
        TableNotFoundError: the catalog has no such table.
        UnsupportedError: no table can go on from the lake table; the message says why.
        FencedError: another service may be using it; not with `is_forced`.
        TableExistsError: a table of this service has it.
        ForbiddenError: the location is forbidden for lake tables, or files of others are named.
    """
    where = f"lake table '{path}'"
    rows = _load(catalog, (path.database, path.table))
    if rows is None:
        raise TableNotFoundError(f"the lake catalog has no Iceberg table '{path}'")
    described = _described(rows.metadata, path)
    covered, last_ms = _rounds_of(rows.metadata, described, where)
    is_own = rows.metadata.properties.get(SERVICE_ID_PROPERTY) == tables.service_id
    live = tables.with_id(described.table_id) if is_own else None
    if live is not None and live.info.table_id == replaces:
        if not live.lake.diverged:
            raise TableExistsError(f"{where} has the history of the table that it belongs to")
        is_own, live = False, None
    if live is not None:
        raise TableExistsError(
            f"{where} is the lake table of this service's table '{live.info.path}': drop that first"
        )
    age_ms = now_ms - last_ms
    if not (is_own or is_forced or age_ms >= QUIET_MS):
        raise FencedError(
            f"{where} got rows from another streamhouse service {max(0, age_ms) // 1000} s ago:"
            " stop that service for good, which could not tier the table any more, and then force"
            f" the adoption ({'--adopt' if replaces is None else '--force'})"
        )
    sides = _sides(catalog, described, covered)
    for table in (rows, *(side for side, _ in sides.values())):
        check_taken_over(catalog, table)
    return AdoptableLake(
        described=described,
        rows=rows,
        covered=covered,
        sides=sides,
        service_id=tables.service_id,
    )


def _of_no_log(covered: CoveredOffsets) -> CoveredOffsets:
    """Return it without fingerprints: the new owner's log begins with others."""
    return replace(covered, fingerprints={})


def _load(catalog: Catalog, identifier: tuple[str, str]) -> Table | None:
    with catalog_errors(f"open lake table '{'.'.join(identifier)}'"):
        try:
            return catalog.load_table(identifier)
        except (NoSuchTableError, NoSuchNamespaceError):
            return None


def _described(metadata: TableMetadata, path: TablePath) -> TableInfo:
    """Return the description of the table, under its old id; raises `UnsupportedError`."""
    where = f"lake table '{path}'"
    owner = metadata.properties.get(TABLE_ID_PROPERTY, "")
    fields = {field.field_id: field for field in metadata.schema().fields}
    for position, field in enumerate(LAKE_SYSTEM_FIELDS):
        system_field = fields.get(SYSTEM_FIELD_ID_FIRST + position)
        if (
            not owner.isdigit()
            or system_field is None
            or system_field.name != field.name
            or not system_field.required
        ):
            raise UnsupportedError(
                f"Iceberg table '{path}' was not written by Streamhouse: its rows have no addresses"
                f" (a required column {field.name}); {_ELSE}"
            )
    check_format_version(metadata, where)
    text = metadata.properties.get(TABLE_PROPERTY)
    if text is None:
        raise UnsupportedError(
            f"{where} does not say what its table is (property {TABLE_PROPERTY}), because an"
            f" earlier version of Streamhouse tiered it; {_ELSE}"
        )
    table = table_described_by(text, path=path, table_id=int(owner), created_at_us=0)
    for column in table.schema.columns:
        lake_field = fields.get(column.id)
        if lake_field is None or lake_field.name != column.name:
            raise UnsupportedError(
                f"{where} has no column '{column.name}' with field id {column.id} any more:"
                f" another engine changed the schema; {_ELSE}"
            )
    return table


def _rounds_of(metadata: TableMetadata, table: TableInfo, where: str) -> tuple[CoveredOffsets, int]:
    """Return which offsets the rows cover, and when the last round was (0: long ago)."""
    covered = covered_offsets(metadata, table_id=table.table_id)
    if covered is None or set(covered.tiered_offsets) != set(range(table.bucket_count)):
        raise UnsupportedError(
            f"{where} does not say up to which offset it has the rows of each of"
            f" {table.bucket_count} buckets: it was never tiered to, or rolled back; {_ELSE}"
        )
    last = _last_round(metadata)
    return covered, 0 if last is None else last[1].timestamp_ms


def _sides(
    catalog: Catalog, table: TableInfo, covered: CoveredOffsets
) -> dict[LakeRole, tuple[Table, CoveredOffsets]]:
    """Return the side tables with rows of rounds, and their covered offsets."""
    properties = table.properties()
    path = table.path
    sides = {}
    for role, is_kept in (
        (LakeRole.CHANGES, properties.datalake_changelog),
        (LakeRole.BATCH, properties.has_batch_layout),
    ):
        name = role.lake_name(path.table)
        side = _load(catalog, (path.database, name)) if is_kept else None
        last = None if side is None else _last_round(side.metadata)
        if side is not None and last is not None:
            sides[role] = (side, last[0])
        if role is LakeRole.CHANGES and is_kept:
            changes = sides.get(role)
            if changes is None or changes[1].tiered_offsets != covered.tiered_offsets:
                raise UnsupportedError(
                    f"lake table '{path.database}.{name}' does not end where the rows of '{path}'"
                    f" do, {dict(covered.tiered_offsets)}, so the history would have a gap or"
                    " changes that never were: set its current snapshot to one with these offsets"
                )
    return sides


def _last_round(metadata: TableMetadata) -> tuple[CoveredOffsets, Snapshot] | None:
    for snapshot in ancestors_of(metadata):
        offsets = offsets_of_properties(facts_of(snapshot).properties)
        if offsets is not None:
            return offsets, snapshot
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _NewOwner:
    """Whose lake tables become."""

    service_id: str
    table_id: int
    epoch: int


def hand_over(
    table: Table,
    owner: _NewOwner,
    role: LakeRole,
    *,
    covered: CoveredOffsets,
    also: Mapping[str, str] | None = None,
) -> int:
    """Commit and return the new snapshot's id; `also` are more properties of the table.

    `covered` are the offsets of the current and the new snapshot.

    Raises:
        CommitConflictError: the table is no longer as loaded; nothing was changed.
        UnknownOutcomeError: the table may be adopted, or may still become so.
    """
    summary = round_properties(
        table_id=owner.table_id, covered=replace(covered, epoch=owner.epoch), role=role
    )
    properties = {SERVICE_ID_PROPERTY: owner.service_id, **(also or {})}
    change = _HandOver(seen=table.metadata_location, summary=summary, properties=properties)
    try:
        return land_snapshot(table, change, attempts_max=ATTEMPTS_MAX)
    except UnknownOutcomeError as error:
        raise UnknownOutcomeError(
            f"lake table '{'.'.join(table.name())}' may have been adopted; try again: {error}"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _HandOver:
    """A hand-over, for the landing loop: only onto the table exactly as `seen`.

    `summary` holds the properties of the snapshot, `properties` more properties of the table.
    """

    seen: str
    summary: Mapping[str, str]
    properties: Mapping[str, str]

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
            summary=self.summary,
            table_properties=lambda number: {
                **table_properties(self.summary, sequence_number=number),
                **self.properties,
            },
        )
        # The description of the same commit has these columns.
        columns = {"current-schema-id": table.metadata.current_schema_id}
        return replace(
            staged,
            requirements=(*staged.requirements, AssertCurrentSchemaId.model_validate(columns)),
        )

    def is_done(self) -> bool:
        """Nothing but its snapshot shows that it landed."""
        return False
