"""Creates the lake table of a table, and checks the layout of an existing lake table for writing.

pyiceberg's `create_table` numbers the fields afresh. The table is created from explicit metadata
updates, in a commit that asserts its absence, and read back.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
from pyiceberg.catalog import Catalog
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema as IcebergSchema
from pyiceberg.table import Table
from pyiceberg.table.sorting import SortOrder
from pyiceberg.table.update import (
    AddPartitionSpecUpdate,
    AddSchemaUpdate,
    AddSortOrderUpdate,
    AssertCreate,
    AssignUUIDUpdate,
    SetCurrentSchemaUpdate,
    SetDefaultSortOrderUpdate,
    SetDefaultSpecUpdate,
    SetLocationUpdate,
    SetPropertiesUpdate,
    UpgradeFormatVersionUpdate,
)

from streamhouse.core.errors import UnsupportedError
from streamhouse.core.model.lake.facts import SYSTEM_FIELD_ID_FIRST, LakeRole
from streamhouse.core.model.lake.partition_fields import (
    LakePartitionField,
    lake_partitioning,
)
from streamhouse.core.model.partitioning import Clustering
from streamhouse.core.model.table import TableInfo
from streamhouse.lake.files._field_ids import (
    FieldPath,
    assign_nested_ids,
    lake_arrow_schema,
)
from streamhouse.lake.files.partition_layout import (
    lake_clustering,
)
from streamhouse.lake.tables.iceberg_schema import (
    check_format_version,
    known_nested_ids,
    lake_partition_spec,
    lake_properties,
    lake_schema,
    lake_sort_order,
)

__all__ = ["LakeLayout", "create_lake_table", "lake_identifier", "layout_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeLayout:
    """How files for a lake table must be written, and under which ids they are committed.

    A `clustering` without columns: rows are in the order of the stream.
    """

    file_schema: pa.Schema
    iceberg_schema: IcebergSchema
    partitioning: tuple[LakePartitionField, ...]
    spec_id: int
    sort_order_id: int
    clustering: Clustering


def create_lake_table(
    catalog: Catalog,
    table: TableInfo,
    *,
    service_id: str = "",
    folder_suffix: str = "",
    role: LakeRole = LakeRole.ROWS,
) -> Table:
    """Create the lake table and return the catalog's result.

    `folder_suffix` is appended to the catalog's proposed location.

    Raises the catalog's errors, also after a creation by another worker.
    """
    identifier = lake_identifier(table, role=role)
    catalog.create_namespace_if_not_exists(table.path.database)
    nested_ids = assign_nested_ids(table.schema)
    schema = lake_schema(
        table.schema,
        nested_ids,
        primary_key=table.descriptor.primary_key,
        role=role,
    )
    partitioning = lake_partitioning(table.descriptor, role=role)
    spec = lake_partition_spec(partitioning, schema)
    sort_order = lake_sort_order(schema, lake_clustering(table.descriptor, role=role))
    properties = lake_properties(table, service_id=service_id, role=role)
    version = table.properties().datalake_format_version
    # The catalog's proposal decides the identity, place and format version only.
    staged = catalog.create_table_transaction(identifier, schema, properties=properties)._table
    updates = (
        AssignUUIDUpdate(uuid=staged.metadata.table_uuid),
        UpgradeFormatVersionUpdate.model_validate({"format-version": version}),
        AddSchemaUpdate.model_validate({"schema": schema}),
        SetCurrentSchemaUpdate.model_validate({"schema-id": -1}),
        AddPartitionSpecUpdate(spec=spec),
        SetDefaultSpecUpdate.model_validate({"spec-id": -1}),
        AddSortOrderUpdate.model_validate({"sort-order": sort_order}),
        SetDefaultSortOrderUpdate.model_validate({"sort-order-id": -1}),
        SetLocationUpdate(location=staged.metadata.location.rstrip("/") + folder_suffix),
        SetPropertiesUpdate(updates={k: v for k, v in properties.items() if k != "format-version"}),
    )
    catalog.commit_table(staged, (AssertCreate(),), updates)
    return catalog.load_table(identifier)


def lake_identifier(table: TableInfo, *, role: LakeRole = LakeRole.ROWS) -> tuple[str, str]:
    """Return the name in the catalog of the table's lake table of that role."""
    return table.path.database, role.lake_name(table.path.table)


def layout_of(lake_table: Table, table: TableInfo, *, role: LakeRole = LakeRole.ROWS) -> LakeLayout:
    """Return how files for `lake_table` must be written.

    Columns, partition specs and sort orders that another engine added are left alone. Raises
    `UnsupportedError` with the part that differs from Streamhouse's layout.
    """
    metadata = lake_table.metadata
    where = f"lake table '{'.'.join(lake_identifier(table, role=role))}'"
    check_format_version(metadata, where)
    lake_fields = metadata.schema()
    nested_ids = assign_nested_ids(table.schema, assigned_ids=_own_nested_ids(lake_fields))
    expected_schema = lake_schema(
        table.schema,
        nested_ids,
        primary_key=table.descriptor.primary_key,
        role=role,
    )
    for field in expected_schema.fields:
        try:
            present = lake_fields.find_field(field.field_id)
        except ValueError:
            present = None
        if present is None or present.name != field.name or present.field_type != field.field_type:
            raise UnsupportedError(
                f"{where}: field {field.field_id} must be '{field.name}' {field.field_type}, but is"
                f" {'missing' if present is None else f'{present.name!r} {present.field_type}'}"
            )
    partitioning = lake_partitioning(table.descriptor, role=role)
    clustering = lake_clustering(table.descriptor, role=role)
    return LakeLayout(
        file_schema=lake_arrow_schema(table.schema, nested_ids, role=role),
        iceberg_schema=expected_schema,
        partitioning=partitioning,
        spec_id=_spec_id(
            lake_table, lake_partition_spec(partitioning, expected_schema), where=where
        ),
        sort_order_id=_sort_order_id(lake_table, lake_sort_order(expected_schema, clustering)),
        clustering=clustering,
    )


def _own_nested_ids(schema: IcebergSchema) -> dict[FieldPath, int]:
    """Return the nested ids that tiering gave; another engine's columns are numbered above."""
    return {
        path: field_id
        for path, field_id in known_nested_ids(schema).items()
        if field_id < SYSTEM_FIELD_ID_FIRST
    }


def _spec_id(lake_table: Table, wanted: PartitionSpec, *, where: str) -> int:
    fields = [(f.source_id, str(f.transform)) for f in wanted.fields]
    for spec in lake_table.metadata.partition_specs:
        if [(f.source_id, str(f.transform)) for f in spec.fields] == fields:
            return spec.spec_id
    raise UnsupportedError(f"{where} has no partition spec {wanted}")


def _sort_order_id(lake_table: Table, wanted: SortOrder) -> int:
    """Return the id of the order `wanted`; 0, unsorted, when another engine removed it."""
    fields = [str(field) for field in wanted.fields]
    for order in lake_table.metadata.sort_orders:
        if [str(field) for field in order.fields] == fields:
            return order.order_id
    return 0
