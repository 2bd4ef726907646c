"""What a worker may report of a lake table: the checks before anything is recorded."""

from __future__ import annotations

from collections.abc import Mapping

from streamhouse.storage_service.errors import InvalidRequestError, TableNotFoundError
from streamhouse.storage_service.model.lake import SideLakeState
from streamhouse.storage_service.model.table import TablePath
from streamhouse.storage_service.tablet.open_table import OpenTable

__all__ = ["check_offsets", "check_table_id", "has_moved"]


def check_table_id(table: OpenTable, table_id: int) -> None:
    """Raise `TableNotFoundError` unless the table is the one that was tiered."""
    if table_id != table.info.table_id:
        raise TableNotFoundError(
            f"table '{table.path}' with id {table_id} does not exist: it was dropped, and another"
            f" table with id {table.info.table_id} was created under its name"
        )


def check_offsets(
    table: OpenTable, tiered_offsets: Mapping[int, int], *, recorded: Mapping[int, int]
) -> None:
    """Raise `InvalidRequestError` unless the offsets name all buckets and go forward, not too far.

    `recorded` are those known before.
    """
    path: TablePath = table.path
    wanted = set(range(table.info.bucket_count))
    if set(tiered_offsets) != wanted:
        odd = sorted(wanted ^ set(tiered_offsets))
        raise InvalidRequestError(
            f"table '{path}': tiered offsets must name exactly the buckets"
            f" 0..{table.info.bucket_count - 1}; bucket {odd[0]} is missing or unknown"
        )
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
                f" {high_watermark}; the lake table belongs to another service's data"
            )


def has_moved(before: SideLakeState | None, after: SideLakeState | None) -> bool:
    """Whether rows came to it; maintenance reports the same ones in another snapshot."""
    if after is None or before is None:
        return after is not None
    return dict(after.tiered_offsets) != dict(before.tiered_offsets)
