"""Brings a lake table's schema and partitioning up to the table's, before a round writes files.

Only metadata changes: existing files keep their columns, and every engine maps columns by id
(Iceberg spec, "Schema Evolution"). Columns that another engine added stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
from pyiceberg.schema import Schema as IcebergSchema
from pyiceberg.table import Table
from pyiceberg.table.update import (
    AddPartitionSpecUpdate,
    AddSchemaUpdate,
    AssertCurrentSchemaId,
    AssertDefaultSpecId,
    AssertTableUUID,
    SetCurrentSchemaUpdate,
    SetDefaultSpecUpdate,
    SetPropertiesUpdate,
    TableRequirement,
    TableUpdate,
    UpgradeFormatVersionUpdate,
)
from pyiceberg.transforms import IdentityTransform, VoidTransform
from pyiceberg.types import NestedField

from streamhouse.core.errors import InvalidSchemaError
from streamhouse.core.model.casts.column_defaults import default_value
from streamhouse.core.model.lake.facts import SYSTEM_FIELD_ID_FIRST, VERSION_3, LakeRole
from streamhouse.core.model.lake.partition_fields import (
    lake_partitioning,
)
from streamhouse.core.model.table import TableInfo
from streamhouse.lake._landing import StagedChange, land
from streamhouse.lake.files._field_ids import (
    NESTED_FIELD_ID_FIRST,
    assign_nested_ids,
)
from streamhouse.lake.tables.iceberg_schema import (
    description_properties,
    known_nested_ids,
    lake_partition_spec,
    lake_schema,
)

__all__ = ["evolve", "evolve_lake_table"]


def evolve(lake_table: Table, table: TableInfo, *, role: LakeRole) -> None:
    """Give the lake table the format version, columns and partitioning of `table`."""
    # First the format: only version 3 has a place for the defaults of columns.
    _upgrade_format(lake_table, table)
    evolve_lake_table(lake_table, table, role=role)
    _evolve_partitioning(lake_table, table, role=role)


def evolve_lake_table(
    lake_table: Table, table: TableInfo, *, role: LakeRole = LakeRole.ROWS
) -> Table:
    """Return the lake table with the columns of `table`, after a commit if necessary.

    Losing against another commit is no error: the table is read again and judged anew.
    """

    def stage(found: Table) -> StagedChange | None:
        target_schema = _wanted(found, table, role=role) if table.schema_id else None
        if target_schema is None:
            return None
        current = {"current-schema-id": found.metadata.current_schema_id}
        return _staged(
            found,
            AssertCurrentSchemaId.model_validate(current),
            AddSchemaUpdate.model_validate({"schema": target_schema}),
            SetCurrentSchemaUpdate.model_validate({"schema-id": -1}),
            *_description(found, table, role),
        )

    land(lake_table, _Evolution(lake_table, stage))
    return lake_table


def _upgrade_format(lake_table: Table, table: TableInfo) -> Table:
    """Return the lake table in the format version of the table's property, or a later version.

    Only metadata changes: files of version 2 stay, their position deletes until rounds replace them
    (Iceberg spec, "Format version changes").
    """
    wanted = table.properties().datalake_format_version

    def stage(found: Table) -> StagedChange | None:
        if found.metadata.format_version >= wanted:
            return None
        current = {"current-schema-id": found.metadata.current_schema_id}
        return _staged(
            found,
            AssertCurrentSchemaId.model_validate(current),
            UpgradeFormatVersionUpdate.model_validate({"format-version": wanted}),
        )

    land(lake_table, _Evolution(lake_table, stage))
    return lake_table


def _evolve_partitioning(lake_table: Table, table: TableInfo, *, role: LakeRole) -> Table:
    """Return the lake table with the partition spec of `table` as its default spec.

    Existing files keep their partitions, and every engine reads files by their own spec (Iceberg
    spec, "Partition Evolution").
    """
    partitioning = lake_partitioning(table.descriptor, role=role)

    def stage(found: Table) -> StagedChange | None:
        metadata = found.metadata
        target_spec = lake_partition_spec(partitioning, metadata.schema())
        if _transforms(found.spec()) == _transforms(target_spec):
            return None
        equal_specs = [
            s for s in metadata.partition_specs if _transforms(s) == _transforms(target_spec)
        ]
        added = () if equal_specs else (AddPartitionSpecUpdate(spec=_numbered(target_spec, found)),)
        spec_id = equal_specs[0].spec_id if equal_specs else -1
        current = {"default-spec-id": metadata.default_spec_id}
        return _staged(
            found,
            AssertDefaultSpecId.model_validate(current),
            *added,
            SetDefaultSpecUpdate.model_validate({"spec-id": spec_id}),
            *_description(found, table, role),
        )

    land(lake_table, _Evolution(lake_table, stage))
    return lake_table


@dataclass(frozen=True, slots=True)
class _Evolution:
    """A change of columns or partitioning, for the landing loop."""

    lake_table: Table
    what_is_left: Callable[[Table], StagedChange | None]

    def stage(self, table: Table) -> StagedChange | None:
        """Judge anew what the table lacks."""
        return self.what_is_left(table)

    def is_done(self) -> bool:
        """Whether it lacks nothing: somebody else's change is as good."""
        return self.what_is_left(self.lake_table) is None


def _staged(
    lake_table: Table, requirement: TableRequirement, *updates: TableUpdate
) -> StagedChange:
    identity = AssertTableUUID(uuid=lake_table.metadata.table_uuid)
    return StagedChange(updates=updates, requirements=(identity, requirement))


def _description(lake_table: Table, table: TableInfo, role: LakeRole) -> tuple[TableUpdate, ...]:
    changed = description_properties(table, lake_table.metadata.properties, role=role)
    return (SetPropertiesUpdate(updates=changed),) if changed else ()


def _transforms(spec: PartitionSpec) -> list[tuple[int, str]]:
    return [(field.source_id, str(field.transform)) for field in spec.fields]


def _numbered(wanted: PartitionSpec, lake_table: Table) -> PartitionSpec:
    """Return `wanted` with the earlier field ids of its transforms, or ids never used."""
    metadata = lake_table.metadata
    ids_by_transform = {
        (field.source_id, str(field.transform)): field
        for spec in metadata.partition_specs
        for field in spec.fields
    }
    next_id = (
        max([PARTITION_FIELD_ID_START - 1, *(f.field_id for f in ids_by_transform.values())]) + 1
    )
    names = {field.name for field in ids_by_transform.values()}
    fields = []
    for field in wanted.fields:
        earlier_field = ids_by_transform.get((field.source_id, str(field.transform)))
        if earlier_field is not None:
            fields.append(earlier_field)
            continue
        # Two fields of one name, as bucket[4] and bucket[8] of a column, would be one to engines.
        name = field.name if field.name not in names else f"{field.name}_{next_id}"
        fields.append(
            PartitionField(
                source_id=field.source_id, field_id=next_id, transform=field.transform, name=name
            )
        )
        next_id += 1
    spec_id = max(spec.spec_id for spec in metadata.partition_specs) + 1
    return PartitionSpec(*fields, spec_id=spec_id)


def _wanted(lake_table: Table, table: TableInfo, *, role: LakeRole) -> IcebergSchema | None:
    """Return the schema to set on the lake table, None if already set."""
    lake_fields = lake_table.metadata.schema()
    nested_ids = assign_nested_ids(
        table.schema,
        assigned_ids=_nested_ids_ever(lake_table),
        highest_used=_highest_nested(lake_table),
    )
    ours = lake_schema(
        table.schema,
        nested_ids,
        primary_key=table.descriptor.primary_key,
        role=role,
    )
    own_fields = [_with_default(field, lake_table, table) for field in ours.fields]
    own_ids = table.column_ids | {field.field_id for field in ours.fields}
    foreign = [field for field in lake_fields.fields if field.field_id not in own_ids]
    fields = (*own_fields, *foreign, *_sources_kept(lake_table, table, (*own_fields, *foreign)))
    if _same(fields, lake_fields.fields):
        return None
    _check_names(lake_table, table, fields)
    schema_id = max(schema.schema_id for schema in lake_table.metadata.schemas) + 1
    return IcebergSchema(
        *fields, schema_id=schema_id, identifier_field_ids=ours.identifier_field_ids
    )


def _with_default(field: NestedField, lake_table: Table, table: TableInfo) -> NestedField:
    """Return a field with its column's default, where the format has a place for it.

    A default is given with a new field, and stays (Iceberg spec, "Default values").
    """
    metadata = lake_table.metadata
    if metadata.format_version < VERSION_3:
        return field
    present = {f.field_id: f for f in metadata.schema().fields}.get(field.field_id)
    default = next((default_value(c) for c in table.schema.columns if c.id == field.field_id), None)
    initial, write = (
        (default, default) if present is None else (present.initial_default, present.write_default)
    )
    return field.model_copy(update={"initial_default": initial, "write_default": write})


def _check_names(lake_table: Table, table: TableInfo, fields: tuple[NestedField, ...]) -> None:
    """Raise `InvalidSchemaError` rather than commit columns with which engines open no table.

    The service refuses these names earlier, but does not know the specs of other engines.
    """
    by_name = {field.name.lower(): field for field in fields}
    for spec in lake_table.metadata.partition_specs:
        for partition in spec.fields:
            column = by_name.get(partition.name.lower())
            is_same = isinstance(partition.transform, IdentityTransform | VoidTransform)
            if column is not None and not (is_same and column.field_id == partition.source_id):
                raise InvalidSchemaError(
                    f"table '{table.path}': its lake table cannot get column '{column.name}',"
                    f" because a partition field of its spec {spec.spec_id} has this name, and"
                    " engines open no table with both; rename the column"
                )


def _sources_kept(
    lake_table: Table, table: TableInfo, fields: tuple[NestedField, ...]
) -> list[NestedField]:
    """Return the dropped columns still named by a past partition spec or sort order.

    Files are read by the spec of their writing, and a spec without its column is unreadable. The
    columns no longer belong to the table: new rows have no value in them.
    """
    metadata = lake_table.metadata
    sources = {f.source_id for spec in metadata.partition_specs for f in spec.fields}
    sources |= {f.source_id for order in metadata.sort_orders for f in order.fields}
    present = {field.field_id for field in fields}
    names = {field.name.lower() for field in fields}
    columns = []
    for field in lake_table.metadata.schema().fields:
        if field.field_id in table.column_ids & sources and field.field_id not in present:
            # A new column may have the same name.
            is_taken = field.name.lower() in names
            name = f"{field.name}_{field.field_id}" if is_taken else field.name
            columns.append(field.model_copy(update={"name": name, "required": False}))
    return columns


def _same(wanted: tuple[NestedField, ...], found: tuple[NestedField, ...]) -> bool:
    return [_facts(field) for field in wanted] == [_facts(field) for field in found]


def _facts(field: NestedField) -> tuple[object, ...]:
    return field.field_id, field.name, field.field_type, field.required, field.doc or None


def _nested_ids_ever(lake_table: Table) -> dict[tuple[int | str, ...], int]:
    """Return the nested ids that any schema of the lake table gave: a column may come back."""
    ids: dict[tuple[int | str, ...], int] = {}
    for schema in lake_table.metadata.schemas:
        ids |= {
            path: field_id
            for path, field_id in known_nested_ids(schema).items()
            if NESTED_FIELD_ID_FIRST <= field_id < SYSTEM_FIELD_ID_FIRST
        }
    return ids


def _highest_nested(lake_table: Table) -> int:
    return max(_nested_ids_ever(lake_table).values(), default=0)
