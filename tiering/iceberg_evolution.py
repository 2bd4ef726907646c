"""Brings a lake table's schema up to the table's, by field id, before a round writes files for it.

Only metadata changes: files that are there keep their columns, and every engine maps them by id
(Iceberg spec, "Schema Evolution"). Columns that another engine added stay.
"""

from __future__ import annotations

import logging

from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.schema import Schema as IcebergSchema
from pyiceberg.table import Table
from pyiceberg.table.update import (
    AddSchemaUpdate,
    AssertCurrentSchemaId,
    AssertTableUUID,
    SetCurrentSchemaUpdate,
)
from pyiceberg.types import NestedField

from streamhouse.storage_service.model.lake import SYSTEM_FIELD_ID_FIRST
from streamhouse.storage_service.model.table import TableInfo
from streamhouse.tiering.field_ids import NESTED_FIELD_ID_FIRST, assign_nested_ids
from streamhouse.tiering.iceberg_schema import known_nested_ids, lake_schema

__all__ = ["evolve_lake_table"]

_logger = logging.getLogger(__name__)


def evolve_lake_table(
    catalog: Catalog, lake_table: Table, table: TableInfo, *, has_changes: bool = False
) -> Table:
    """Return the lake table with the columns of `table`, committed if they were not yet.

    `has_changes`: it is the lake table of the table's full history.

    A commit that loses against another one is no error: the table is read again and judged anew.
    """
    if table.schema_id == 0:
        return lake_table
    wanted = _wanted(lake_table, table, has_changes=has_changes)
    if wanted is None:
        return lake_table
    metadata = lake_table.metadata
    updates = (
        AddSchemaUpdate.model_validate({"schema": wanted}),
        SetCurrentSchemaUpdate.model_validate({"schema-id": -1}),
    )
    requirements = (
        AssertTableUUID(uuid=metadata.table_uuid),
        AssertCurrentSchemaId.model_validate({"current-schema-id": metadata.current_schema_id}),
    )
    try:
        catalog.commit_table(lake_table, requirements, updates)
    except CommitFailedException:
        _logger.info("lake table %s changed meanwhile; its schema is looked at again", table.path)
    else:
        _logger.info("lake table %s has schema version %d now", table.path, table.schema_id)
    found = catalog.load_table(lake_table.name())
    if _wanted(found, table, has_changes=has_changes) is None:
        return found
    return evolve_lake_table(catalog, found, table, has_changes=has_changes)


def _wanted(lake_table: Table, table: TableInfo, *, has_changes: bool) -> IcebergSchema | None:
    """Return the schema the lake table should have, or None if it has it."""
    found = lake_table.metadata.schema()
    nested_ids = assign_nested_ids(
        table.schema, known=_nested_ids_ever(lake_table), highest_used=_highest_nested(lake_table)
    )
    ours = lake_schema(
        table.schema,
        nested_ids,
        primary_key=table.descriptor.primary_key,
        has_changes=has_changes,
    )
    known = table.column_ids | {field.field_id for field in ours.fields}
    foreign = [field for field in found.fields if field.field_id not in known]
    fields = (*ours.fields, *foreign)
    if _same(fields, found.fields):
        return None
    schema_id = max(schema.schema_id for schema in lake_table.metadata.schemas) + 1
    return IcebergSchema(
        *fields, schema_id=schema_id, identifier_field_ids=ours.identifier_field_ids
    )


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
