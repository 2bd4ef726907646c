"""A table as Iceberg sees it: schema, partition spec, sort order and properties of the lake table.

Field ids are those of `field_ids`. pyiceberg numbers the schema of a new table afresh: the
committer creates the table from explicit metadata updates and checks the catalog's result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
from pyiceberg.schema import Schema as IcebergSchema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.sorting import (
    UNSORTED_SORT_ORDER,
    NullOrder,
    SortDirection,
    SortField,
    SortOrder,
)
from pyiceberg.transforms import IdentityTransform, parse_transform

from streamhouse.core.errors import UnsupportedError
from streamhouse.core.model.lake.facts import (
    LAKE_SYSTEM_FIELDS,
    SERVICE_ID_PROPERTY,
    LakeRole,
)
from streamhouse.core.model.lake.partition_fields import (
    LakePartitionField,
)
from streamhouse.core.model.partitioning import Clustering
from streamhouse.core.model.schema import (
    BUCKET_COLUMN,
    CHANGE_TYPE_COLUMN,
    OFFSET_COLUMN,
    TIMESTAMP_COLUMN,
    Schema,
)
from streamhouse.core.model.table import TableInfo
from streamhouse.lake.files._field_ids import FieldPath, lake_arrow_schema
from streamhouse.lake.tables._column_types import iceberg_field, nested_fields
from streamhouse.lake.tables._description import TABLE_PROPERTY, description_of

__all__ = [
    "METADATA_PROPERTIES",
    "check_format_version",
    "description_properties",
    "known_nested_ids",
    "lake_partition_spec",
    "lake_properties",
    "lake_schema",
    "lake_sort_order",
]

METADATA_PROPERTIES: Final = {
    # Every round is a commit: without this, old metadata files would pile up.
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}
"""Properties of every lake table; maintenance gives them to those made without."""

SORT_ORDER_ID: Final = 1


def lake_schema(
    schema: Schema,
    nested_ids: Mapping[FieldPath, int],
    *,
    primary_key: Sequence[str],
    role: LakeRole = LakeRole.ROWS,
) -> IcebergSchema:
    """Return the Iceberg schema of a table's lake table: its columns, then the system columns.

    That of a full history has no identifier: a key has many changes.
    """
    comments = {column.name: column.comment or None for column in schema.columns}
    comments |= {
        CHANGE_TYPE_COLUMN: "+I insert, -U before and +U after an update, -D delete.",
        BUCKET_COLUMN: "Bucket of the row in the Streamhouse log.",
        OFFSET_COLUMN: "Offset of the row in its bucket; with the bucket, the row's address.",
        TIMESTAMP_COLUMN: "When the row was written to the Streamhouse log.",
    }
    fields = [
        iceberg_field(field, doc=comments[field.name])
        for field in lake_arrow_schema(schema, nested_ids, role=role)
    ]
    keys = {column.name: column.id for column in schema.columns}
    identifier = [] if role is LakeRole.CHANGES else [keys[name] for name in primary_key]
    return IcebergSchema(*fields, schema_id=0, identifier_field_ids=identifier)


def lake_partition_spec(
    partitioning: Sequence[LakePartitionField], schema: IcebergSchema
) -> PartitionSpec:
    """Return the partition spec of `partitioning`, bound to the schema's field ids."""
    return PartitionSpec(
        *[
            PartitionField(
                source_id=schema.find_field(field.source).field_id,
                field_id=PARTITION_FIELD_ID_START + position,
                transform=parse_transform(field.iceberg_transform),
                name=field.name,
            )
            for position, field in enumerate(partitioning)
        ],
        spec_id=0,
    )


def lake_sort_order(schema: IcebergSchema, clustering: Clustering) -> SortOrder:
    """Return the order of a lake table: by `clustering`, else by offset; none for a Z-order."""
    if clustering.is_z_order:
        # Iceberg has no word for it; files are clustered all the same.
        return UNSORTED_SORT_ORDER
    fields = [
        SortField(
            source_id=schema.find_field(name).field_id,
            transform=IdentityTransform(),
            direction=SortDirection.ASC,
            null_order=NullOrder.NULLS_LAST if clustering.columns else NullOrder.NULLS_FIRST,
        )
        for name in clustering.columns or (OFFSET_COLUMN,)
    ]
    return SortOrder(*fields, order_id=SORT_ORDER_ID)


def lake_properties(
    table: TableInfo, *, service_id: str, role: LakeRole = LakeRole.ROWS
) -> dict[str, str]:
    """Return the properties a new lake table of `table` gets; other engines go by them too."""
    target_bytes = table.properties().datalake_target_file_bytes
    return {
        "format-version": str(table.properties().datalake_format_version),
        "write.format.default": "parquet",
        "write.parquet.compression-codec": "zstd",
        "write.target-file-size-bytes": str(target_bytes),
        **METADATA_PROPERTIES,
        # Bounds of the system columns find rows by offset, however many columns come before.
        **{f"write.metadata.metrics.column.{field.name}": "full" for field in LAKE_SYSTEM_FIELDS},
        role.owner_property: str(table.table_id),
        **({SERVICE_ID_PROPERTY: service_id} if service_id else {}),
        **description_properties(table, {}, role=role),
    }


def check_format_version(metadata: TableMetadata, where: str) -> None:
    """Raise `UnsupportedError` for a format version of Iceberg without sequence numbers."""
    if metadata.format_version == 1:
        raise UnsupportedError(
            f"{where} has format version 1, without the sequence numbers that rounds need; upgrade"
            " it to version 2"
        )


def description_properties(
    table: TableInfo, known: Mapping[str, str], *, role: LakeRole
) -> dict[str, str]:
    """Return the properties to add to `known` for a description of `table`.

    Only the lake table of the rows has a description; an existing description needs no addition.
    """
    if role is not LakeRole.ROWS:
        return {}
    description = description_of(table)
    return {} if known.get(TABLE_PROPERTY) == description else {TABLE_PROPERTY: description}


def known_nested_ids(schema: IcebergSchema) -> dict[FieldPath, int]:
    """Return the ids of all fields inside nested columns of a lake table's schema."""
    return {
        (field.field_id, *path): inner.field_id
        for field in schema.fields
        for path, inner in nested_fields(field.field_type)
    }
