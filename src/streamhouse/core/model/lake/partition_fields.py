"""The partition fields of a table's lake tables: transforms, sources, and the names they have.

A name is taken for ever: a partition spec stays in a lake table as long as files of it do.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamhouse.core.errors import InvalidSchemaError
from streamhouse.core.model.lake.facts import LakeRole
from streamhouse.core.model.partitioning import is_bucketable
from streamhouse.core.model.schema import BUCKET_COLUMN
from streamhouse.core.model.table import TableDescriptor, TableInfo

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
        """The transform as Iceberg's metadata writes it."""
        if self.parameter is None:
            return self.transform
        return f"{self.transform}[{self.parameter}]"


def lake_partitioning(
    descriptor: TableDescriptor, *, role: LakeRole = LakeRole.ROWS
) -> tuple[LakePartitionField, ...]:
    """Return the partition fields: the user's, then the one that keeps buckets apart.

    A full history is read in the order of its buckets: it has no others. A batch layout has its
    own instead of the user's.

    The last is `bucket[N]` of the bucket key where that is one column Iceberg can bucket, because
    engines prune by it; else the bucket's number. A name that a column already has gets a number,
    as Iceberg refuses it.
    """
    by_number = LakePartitionField(name=BUCKET_COLUMN, source=BUCKET_COLUMN, transform="identity")
    if role is LakeRole.CHANGES:
        return (by_number,)
    given = descriptor.partitioned_by
    if role is LakeRole.BATCH:
        layout = descriptor.batch_layout()
        given = () if layout is None else layout.partitioned_by
    taken = {name.lower() for name in descriptor.schema.names}
    fields = [
        LakePartitionField(
            name=_free_name(field.name, taken, is_identity=field.transform == "identity"),
            source=field.column,
            transform=field.transform,
            parameter=field.parameter,
        )
        for field in given
    ]
    key = descriptor.effective_bucket_key
    table = str(descriptor.path)
    if len(key) == 1 and is_bucketable(descriptor.schema.column(key[0], table=table).type):
        bucketing = LakePartitionField(
            name=_free_name(f"{key[0]}_bucket", taken, is_identity=False),
            source=key[0],
            transform="bucket",
            parameter=descriptor.bucket_count,
        )
        there = {(f.source, f.transform, f.parameter) for f in fields}
        if (bucketing.source, bucketing.transform, bucketing.parameter) in there:
            return tuple(fields)
    else:
        bucketing = by_number
    return (*fields, bucketing)


def partition_names(table: TableInfo) -> dict[str, int | None]:
    """Return the names of partition fields that lake tables of `table` have, or may have had.

    As `TableInfo.partition_names`. A partition spec stays in a lake table as long as files of it
    do, and its fields keep their names when columns get others.
    """
    names = dict(table.partition_names)
    ids = {column.name: column.id for column in table.schema.columns}
    for role in (LakeRole.ROWS, LakeRole.BATCH):
        for field in lake_partitioning(table.descriptor, role=role):
            is_identity = field.transform == "identity"
            names.setdefault(field.name.lower(), ids.get(field.source) if is_identity else None)
    names.pop(BUCKET_COLUMN, None)
    return names


def check_column_names(before: TableInfo, changed: TableInfo) -> None:
    """Raise `InvalidSchemaError` if a column gets a name that a partition field has or had.

    Iceberg's own library opens no table with both, but for the identity of that very column
    (`PartitionSpec.Builder.checkAndAddPartitionName`), whichever spec the field is of.
    """
    taken = partition_names(before)
    known = {(column.id, column.name) for column in before.schema.columns}
    for column in changed.schema.columns:
        name = column.name.lower()
        is_new = (column.id, column.name) not in known
        if is_new and name in taken and taken[name] != column.id:
            raise InvalidSchemaError(
                f"table '{changed.path}': no column can be called '{column.name}' any more, because"
                " a partition field of its lake table has or had this name, and engines open no"
                " table with both; choose another name"
            )


def _free_name(wanted: str, taken: set[str], *, is_identity: bool) -> str:
    """Return `wanted`, numbered if need be, and take it; identity keeps its column's name."""
    name, number = wanted, 2
    while not is_identity and name.lower() in taken:
        name, number = f"{wanted}_{number}", number + 1
    taken.add(name.lower())
    return name
