"""The partition fields of a table's lake tables: transforms, sources, and names.

A partition field's name is reserved for ever: a lake table keeps a partition spec as long as the
spec has files.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamhouse.core.errors import InvalidSchemaError
from streamhouse.core.model.lake.facts import LakeRole
from streamhouse.core.model.schema import BUCKET_COLUMN
from streamhouse.core.model.table import TableDescriptor, TableInfo
from streamhouse.core.types.registry import type_of

__all__ = [
    "LakePartitionField",
    "check_column_names",
    "lake_partitioning",
    "partition_names",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LakePartitionField:
    """One field of the lake table's partition spec."""

    name: str
    source: str
    transform: str
    parameter: int | None = None

    @property
    def iceberg_transform(self) -> str:
        """The transform in the notation of Iceberg's metadata."""
        if self.parameter is None:
            return self.transform
        return f"{self.transform}[{self.parameter}]"


def lake_partitioning(
    descriptor: TableDescriptor, *, role: LakeRole = LakeRole.ROWS
) -> tuple[LakePartitionField, ...]:
    """Return the partition fields: the user's, then the field which separates buckets.

    A full history has only the bucket's number, because reads go by bucket. A batch layout has the
    fields of the layout in place of the user's fields.

    The last field is `bucket[N]` of the bucket key if the key is one column which Iceberg can
    bucket, because engines prune by this field; else the bucket's number. A name equal to a
    column's name gets a number, because Iceberg refuses equal names.
    """
    by_number = LakePartitionField(name=BUCKET_COLUMN, source=BUCKET_COLUMN, transform="identity")
    if role is LakeRole.CHANGES:
        return (by_number,)
    partitioned_by = descriptor.partitioned_by
    if role is LakeRole.BATCH:
        layout = descriptor.batch_layout()
        partitioned_by = () if layout is None else layout.partitioned_by
    reserved_names = {name.lower() for name in descriptor.schema.names}
    fields = [
        LakePartitionField(
            name=_free_name(field.name, reserved_names, is_identity=field.transform == "identity"),
            source=field.column,
            transform=field.transform,
            parameter=field.parameter,
        )
        for field in partitioned_by
    ]
    key = descriptor.effective_bucket_key
    table = str(descriptor.path)
    key_types = [type_of(descriptor.schema.column(name, table=table).type) for name in key]
    if len(key) == 1 and key_types[0].hashes is not None:
        bucketing = LakePartitionField(
            name=_free_name(f"{key[0]}_bucket", reserved_names, is_identity=False),
            source=key[0],
            transform="bucket",
            parameter=descriptor.bucket_count,
        )
        specs = {(f.source, f.transform, f.parameter) for f in fields}
        if (bucketing.source, bucketing.transform, bucketing.parameter) in specs:
            return tuple(fields)
    else:
        bucketing = by_number
    return (*fields, bucketing)


def partition_names(table: TableInfo) -> dict[str, int | None]:
    """Return the names of all partition fields in present and past lake tables of `table`.

    The form is the form of `TableInfo.partition_names`. A lake table keeps a partition spec as long
    as the spec has files, and renamed columns do not rename partition fields.
    """
    names = dict(table.partition_names)
    ids = {column.name: column.id for column in table.schema.columns}
    for role in (LakeRole.ROWS, LakeRole.BATCH):
        for field in lake_partitioning(table.descriptor, role=role):
            is_identity = field.transform == "identity"
            names.setdefault(field.name.lower(), ids.get(field.source) if is_identity else None)
    names.pop(BUCKET_COLUMN, None)
    return names


def check_column_names(current: TableInfo, changed: TableInfo) -> None:
    """Raise `InvalidSchemaError` if a column gets the name of a present or past partition field.

    Iceberg's library refuses to open a table with both, unless the field is the identity of the
    column (`PartitionSpec.Builder.checkAndAddPartitionName`); all specs of the table count.
    """
    reserved_names = partition_names(current)
    current_columns = {(column.id, column.name) for column in current.schema.columns}
    for column in changed.schema.columns:
        name = column.name.lower()
        is_new = (column.id, column.name) not in current_columns
        if is_new and name in reserved_names and reserved_names[name] != column.id:
            raise InvalidSchemaError(
                f"table '{changed.path}': no column can be called '{column.name}' any more, because"
                " a partition field of its lake table has or had this name, and engines open no"
                " table with both; choose another name"
            )


def _free_name(name: str, reserved_names: set[str], *, is_identity: bool) -> str:
    """Return `name`, numbered if reserved, and reserve the result; identity keeps `name`."""
    free_name, number = name, 2
    while not is_identity and free_name.lower() in reserved_names:
        free_name, number = f"{name}_{number}", number + 1
    reserved_names.add(free_name.lower())
    return free_name
