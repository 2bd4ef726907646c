"""The refusal of commits to the lake table of a live table, judged by the resulting metadata.

A commit is judged by the table's metadata before and after, not by its updates: no spelling of an
update slips through. After every commit that passes:
- the current snapshot covers the same offsets as before, or a round of the current epoch says so
- the columns, partition specs and properties that tiering and union reads go by are in place: the
  table's columns and the system columns keep id, name and type, unless the service's own table was
  altered that way first; other engines may add nullable columns
- snapshots pinned by readers exist
Which rows files hold is looked at in `lake/snapshots/_outside_changes.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import pyarrow as pa
from pyiceberg.schema import Schema as IcebergSchema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.types import DecimalType, DoubleType, IcebergType, LongType, NestedField

from streamhouse.core.errors import FencedError, ForbiddenError, UnsupportedError
from streamhouse.core.model.lake.coverage import CoveredOffsets, offsets_of_properties
from streamhouse.core.model.lake.facts import (
    EXPIRED_AT_PROPERTY,
    EXPIRED_OFFSETS_PROPERTY,
    LAKE_SYSTEM_FIELDS,
    LOG_FINGERPRINTS_PROPERTY,
    OWNER_PROPERTIES,
    SERVICE_ID_PROPERTY,
    TIERED_OFFSETS_PROPERTY,
    TIERED_SEQUENCE_PROPERTY,
    TIERING_EPOCH_PROPERTY,
    TRUNCATED_OFFSETS_PROPERTY,
    LakeRole,
)
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN, RETRACTS_COLUMN
from streamhouse.core.model.table import TableInfo
from streamhouse.lake.guards.served_tables import ServedTable, ServedTables
from streamhouse.lake.snapshots._coverage import ancestors_of, covered_for, facts_of
from streamhouse.lake.tables._description import TABLE_PROPERTY, table_described_by

__all__ = [
    "check_commit",
    "covered_offsets",
    "is_left_layout",
    "new_foreign_snapshots",
    "owner_of",
    "protecting_table",
]

_IDENTITY: Final = (*OWNER_PROPERTIES, SERVICE_ID_PROPERTY)
_OFFSETS: Final = (
    TIERED_OFFSETS_PROPERTY,
    TRUNCATED_OFFSETS_PROPERTY,
    EXPIRED_OFFSETS_PROPERTY,
    EXPIRED_AT_PROPERTY,
    LOG_FINGERPRINTS_PROPERTY,
    TIERED_SEQUENCE_PROPERTY,
    TIERING_EPOCH_PROPERTY,
)
_OURS: Final = "streamhouse."
_METRICS: Final = {f"write.metadata.metrics.column.{field.name}" for field in LAKE_SYSTEM_FIELDS}


def protecting_table(metadata: TableMetadata, tables: ServedTables) -> ServedTable | None:
    """Return the live table that `metadata` is a lake table of, None for everybody else's."""
    table_id = owner_of(metadata.properties)
    live = None if table_id is None else tables.with_id(table_id)
    if live is None:
        return None
    is_ours = metadata.properties.get(SERVICE_ID_PROPERTY) == tables.service_id
    return live if is_ours or str(metadata.table_uuid) == live.lake.table_uuid else None


def owner_of(properties: Mapping[str, str]) -> int | None:
    """Return the id of the table that owns a lake table, in any role."""
    for key in OWNER_PROPERTIES:
        if (text := properties.get(key, "")).isdigit():
            return int(text)
    return None


def check_commit(name: str, base: TableMetadata, new: TableMetadata, live: ServedTable) -> None:
    """Refuse a commit that would break union reads of `live`, whose lake table is `name`.

    Raises:
        ForbiddenError: the message says what must stay.
        FencedError: a tiering round of an epoch other than the current epoch.
    """
    where = f"lake table '{name}' of table '{live.info.path}'"
    if new.table_uuid != base.table_uuid:
        raise ForbiddenError(f"{where}: its uuid must stay {base.table_uuid}")
    if new.format_version != base.format_version:
        raise ForbiddenError(f"{where}: its format version must stay {base.format_version}")
    if new.location != base.location:
        raise ForbiddenError(f"{where}: its location must stay '{base.location}'")
    _check_schema(where, base.schema(), new.schema(), live.info)
    _check_specs(where, base, new)
    is_round = bool(_round_snapshots(base, new, live))
    _check_kept_properties(where, base.properties, new.properties)
    _check_offsets(where, base, new, live, is_round=is_round)
    if not is_round:
        _check_same_properties(where, _OFFSETS, base.properties, new.properties)
        _check_description(where, base.properties, new.properties, live)
    _check_pins(where, base, new, live)


def new_foreign_snapshots(
    base: TableMetadata, new: TableMetadata, live: ServedTable
) -> list[Snapshot]:
    """Return what the commit brings into the main branch besides rounds of the current epoch."""
    rounds = {snapshot.snapshot_id for snapshot in _round_snapshots(base, new, live)}
    return [s for s in _added_to_main(base, new) if s.snapshot_id not in rounds]


def covered_offsets(metadata: TableMetadata, live: ServedTable) -> Mapping[int, int]:
    """Return the end offset of each bucket that the current snapshot covers; has every bucket."""
    covered = _covered(metadata, live)
    nothing = dict.fromkeys(range(live.info.bucket_count), 0)
    return nothing if covered is None else {**nothing, **covered.tiered_offsets}


def _added_to_main(base: TableMetadata, new: TableMetadata) -> list[Snapshot]:
    base_ids = {snapshot.snapshot_id for snapshot in ancestors_of(base)}
    return [snapshot for snapshot in ancestors_of(new) if snapshot.snapshot_id not in base_ids]


def _round_snapshots(base: TableMetadata, new: TableMetadata, live: ServedTable) -> list[Snapshot]:
    return [
        snapshot
        for snapshot in _added_to_main(base, new)
        if (offsets := _read(facts_of(snapshot).properties, live)) is not None
        and offsets.epoch == live.lake.tiering_epoch
    ]


def _check_schema(where: str, base: IcebergSchema, new: IcebergSchema, table: TableInfo) -> None:
    """Refuse a schema that tiering could not write with or union reads could not read by."""
    new_fields = {field.field_id: field for field in new.fields}
    columns = {column.id: column for column in table.schema.columns}
    system = {*(field.name for field in LAKE_SYSTEM_FIELDS), CHANGE_TYPE_COLUMN, RETRACTS_COLUMN}
    for field in base.fields:
        column = columns.get(field.field_id)
        if column is None and field.name not in system:
            continue
        new_field = new_fields.get(field.field_id)
        if new_field is None:
            raise ForbiddenError(
                f"{where}: column '{field.name}' must stay; drop it from the streamhouse table"
            )
        if new_field.name != field.name and (column is None or new_field.name != column.name):
            raise ForbiddenError(
                f"{where}: column '{field.name}' must keep its name, not become '{new_field.name}';"
                " rename it in the streamhouse table"
            )
        column_type = None if column is None else column.type
        if new_field.field_type != field.field_type and not _is_widened_to(
            new_field.field_type, column_type
        ):
            raise ForbiddenError(
                f"{where}: column '{field.name}' must stay {field.field_type}, not become"
                f" {new_field.field_type}; alter the streamhouse table"
            )
    _check_added(where, base, new)


def _check_added(where: str, base: IcebergSchema, new: IcebergSchema) -> None:
    base_fields = {field.field_id: field for field in base.fields}
    for field in new.fields:
        if field.required and not _was_required(base_fields.get(field.field_id)):
            raise ForbiddenError(
                f"{where}: column '{field.name}' must be optional, because tiering writes rows"
                " without it"
            )


def _was_required(field: NestedField | None) -> bool:
    return field is not None and field.required


def _is_widened_to(iceberg_type: IcebergType, wanted: pa.DataType | None) -> bool:
    """Whether a column changed as the service's table has already: types that Iceberg widens."""
    if wanted is None:
        return False
    if isinstance(iceberg_type, DecimalType):
        return bool(wanted == pa.decimal128(iceberg_type.precision, iceberg_type.scale))
    if isinstance(iceberg_type, LongType):
        return bool(wanted == pa.int64())
    if isinstance(iceberg_type, DoubleType):
        return bool(wanted == pa.float64())
    return False


def _check_specs(where: str, base: TableMetadata, new: TableMetadata) -> None:
    spec_ids = {spec.spec_id for spec in new.partition_specs}
    for spec in base.partition_specs:
        if spec.spec_id not in spec_ids:
            raise ForbiddenError(
                f"{where}: partition spec {spec.spec_id} must stay, because tiering may write with"
                " it; another one may be the default"
            )


def _check_offsets(
    where: str, base: TableMetadata, new: TableMetadata, live: ServedTable, *, is_round: bool
) -> None:
    base_covered, new_covered = _covered(base, live), _covered(new, live)
    old = covered_offsets(base, live)
    if new_covered is None:
        if base_covered is not None:
            raise ForbiddenError(
                f"{where}: its current snapshot must come from one that tiering wrote; rolling back"
                " behind it, replacing or truncating the table would lose rows: delete rows"
                " instead, or drop the streamhouse table first"
            )
        return
    truncated = {} if base_covered is None else base_covered.truncated_offsets
    expired: tuple[dict[int, int], int] = ({}, 0)
    if base_covered is not None:
        expired = (dict(base_covered.expired_offsets), base_covered.expired_at_us)
    fingerprints = {} if base_covered is None else base_covered.fingerprints
    new_coverage = (
        dict(new_covered.tiered_offsets),
        new_covered.truncated_offsets,
        (dict(new_covered.expired_offsets), new_covered.expired_at_us),
        new_covered.fingerprints,
    )
    if new_coverage == (dict(old), truncated, expired, fingerprints):
        return
    if not is_round:
        if new_covered.epoch != live.lake.tiering_epoch and _advances(
            old, new_covered.tiered_offsets
        ):
            raise FencedError(
                f"{where}: tiering epoch {new_covered.epoch} is not the current one"
                f" ({live.lake.tiering_epoch}); another worker has the table"
            )
        raise ForbiddenError(
            f"{where}: its current snapshot covers offsets {dict(old)}, and only a tiering round"
            " may change that; a roll back behind the tiered snapshot is refused"
        )
    if base_covered is not None and _is_former_layout(base, base_covered, live):
        # It is filled anew, from the first row on.
        old = {}
    if set(new_covered.tiered_offsets) != set(live.high_watermarks) or not _advances(
        old, new_covered.tiered_offsets
    ):
        raise ForbiddenError(f"{where}: a round must not take back offsets {dict(old)}")
    for bucket, end in new_covered.tiered_offsets.items():
        if end > live.high_watermarks[bucket]:
            raise ForbiddenError(
                f"{where}: offset {end} of bucket {bucket} is beyond what is written,"
                f" {live.high_watermarks[bucket]}"
            )


def is_left_layout(metadata: TableMetadata, live: ServedTable) -> bool:
    """Whether the lake table is a batch layout of a table without a batch layout."""
    is_layout = LakeRole.BATCH.owner_property in metadata.properties
    has_one = live.info.properties().has_batch_layout or live.lake.batch is not None
    return is_layout and not has_one


def _is_former_layout(base: TableMetadata, before: CoveredOffsets, live: ServedTable) -> bool:
    """Whether the rows belong to a batch layout that the table has since changed or dropped."""
    is_layout = LakeRole.BATCH.owner_property in base.properties
    return is_layout and before.epoch <= live.lake.batch_since_epoch


def _advances(old: Mapping[int, int], new: Mapping[int, int]) -> bool:
    return all(new.get(bucket, -1) >= end for bucket, end in old.items())


def _check_kept_properties(where: str, old: Mapping[str, str], new: Mapping[str, str]) -> None:
    ours = {key for key in old if key.startswith(_OURS) and key not in new}
    _check_same_properties(where, sorted({*_IDENTITY, *_METRICS, *ours}), old, new)


def _check_same_properties(
    where: str, keys: Iterable[str], old: Mapping[str, str], new: Mapping[str, str]
) -> None:
    for key in keys:
        if old.get(key) != new.get(key):
            raise ForbiddenError(
                f"{where}: property '{key}' must stay {old.get(key, 'unset')}; tiering and readers"
                " go by it"
            )


def _check_description(
    where: str, old: Mapping[str, str], new: Mapping[str, str], live: ServedTable
) -> None:
    """Tiering changes the description with the schema; others could only spoil it."""
    text = new.get(TABLE_PROPERTY)
    if text is None or text == old.get(TABLE_PROPERTY):
        return
    try:
        table = table_described_by(text, path=live.info.path, table_id=1, created_at_us=0)
    except UnsupportedError as error:
        raise ForbiddenError(f"{where}: {error.message}") from error
    if table.column_ids - live.info.column_ids or table.bucket_count != live.info.bucket_count:
        raise ForbiddenError(f"{where}: property '{TABLE_PROPERTY}' must describe that table")


def _check_pins(where: str, base: TableMetadata, new: TableMetadata, live: ServedTable) -> None:
    gone = {s.snapshot_id for s in base.snapshots} - {s.snapshot_id for s in new.snapshots}
    for snapshot_id in gone.intersection(live.pinned):
        raise ForbiddenError(
            f"{where}: snapshot {snapshot_id} must stay, because a reader has pinned it; expire it"
            " when that pin has ended"
        )


def _covered(metadata: TableMetadata, live: ServedTable) -> CoveredOffsets | None:
    return covered_for(
        metadata, is_owner=lambda properties: owner_of(properties) == live.info.table_id
    )


def _read(properties: Mapping[str, str], live: ServedTable) -> CoveredOffsets | None:
    if owner_of(properties) != live.info.table_id:
        return None
    return offsets_of_properties(properties)
