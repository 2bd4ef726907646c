"""The checks of a worker's report about a lake table, before anything is recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from streamhouse.core.errors import InvalidRequestError, TableNotFoundError
from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.lake.facts import LakeState, SideLakeState
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.engine.open_table import OpenTable

__all__ = [
    "batch_of_report",
    "check_buckets",
    "check_report",
    "check_table_id",
    "due_of_report",
    "has_moved",
]


def check_table_id(table: OpenTable, table_id: int) -> None:
    """Raise `TableNotFoundError` unless the table is the tiered table."""
    if table_id != table.info.table_id:
        raise TableNotFoundError(
            f"table '{table.path}' with id {table_id} does not exist: it was dropped, and another"
            f" table with id {table.info.table_id} was created under its name"
        )


def check_report(table: OpenTable, lake: LakeState) -> None:
    """Raise `InvalidRequestError` unless `lake` is a successor of the table's state.

    The offsets of all the lake tables name all buckets and go forward, within the log.
    """
    present = table.lake
    _check_offsets(table, lake.tiered_offsets, recorded=present.tiered_offsets)
    batch = present.batch
    if batch is not None and lake.batch is not None and batch.table_uuid != lake.batch.table_uuid:
        # Somebody dropped its lake table: it is filled anew, from the first row on.
        batch = None
    for side, was in ((lake.changelog, present.changelog), (lake.batch, batch)):
        if side is not None:
            recorded = {} if was is None else was.tiered_offsets
            _check_offsets(table, side.tiered_offsets, recorded=recorded)
    for bucket, end in lake.expired_offsets.items():
        if end > lake.tiered_offsets.get(bucket, 0):
            raise InvalidRequestError(
                f"table '{table.path}', bucket {bucket}: rows up to {end} cannot have expired, as"
                f" the lake has those up to {lake.tiered_offsets.get(bucket, 0)} only"
            )


def check_buckets(table: OpenTable, lakes: Iterable[CoveredOffsets]) -> None:
    """Raise `InvalidRequestError` unless each lake names exactly the table's buckets."""
    for covered in lakes:
        _check_names(table, covered.tiered_offsets)


def batch_of_report(
    table: OpenTable, batch: SideLakeState | None, *, epoch: int
) -> SideLakeState | None:
    """Return the table's batch layout after the report `batch` of the round `epoch`."""
    present = table.lake
    is_former = 0 < epoch <= present.batch_since_epoch
    return present.batch if batch is None or is_former else batch


def due_of_report(table: OpenTable, due_us: int | None, *, epoch: int) -> int | None:
    """Return the time of the next maintenance after the report `due_us` of the round `epoch`."""
    # It began with properties that were changed meanwhile: a worker is to look again at once.
    return 0 if epoch <= table.lake.altered_in_epoch else due_us


def has_moved(before: SideLakeState | None, after: SideLakeState | None) -> bool:
    """Whether rows came or went; maintenance reports the same rows in another snapshot."""
    if after is None or before is None:
        return after is not None
    return (after.tiered_offsets, after.truncated_offsets) != (
        before.tiered_offsets,
        before.truncated_offsets,
    )


def _check_offsets(
    table: OpenTable, tiered_offsets: Mapping[int, int], *, recorded: Mapping[int, int]
) -> None:
    path: TablePath = table.path
    _check_names(table, tiered_offsets)
    for bucket, end in tiered_offsets.items():
        current = recorded.get(bucket, 0)
        if end < current:
            raise InvalidRequestError(
                f"table '{path}', bucket {bucket}: tiered offset {end} would go back from {current}"
            )
        high_watermark = table.tablets[bucket].high_watermark
        if end > high_watermark:
            raise InvalidRequestError(
                f"table '{path}', bucket {bucket}: tiered offset {end} is beyond the high watermark"
                f" {high_watermark}"
            )


def _check_names(table: OpenTable, tiered_offsets: Mapping[int, int]) -> None:
    buckets = set(range(table.info.bucket_count))
    if set(tiered_offsets) != buckets:
        odd = sorted(buckets ^ set(tiered_offsets))
        raise InvalidRequestError(
            f"table '{table.path}': tiered offsets must name exactly the buckets"
            f" 0..{table.info.bucket_count - 1}; bucket {odd[0]} is missing or unknown"
        )
