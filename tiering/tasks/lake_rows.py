"""Rows of the log as rows of a lake table: its types, its system columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.storage_service.client import LogBatch
from streamhouse.storage_service.errors import CorruptDataError
from streamhouse.storage_service.model.changelog import change_type_names
from streamhouse.storage_service.model.lake import LAKE_SYSTEM_FIELDS
from streamhouse.storage_service.model.schema import (
    CHANGE_TYPE_COLUMN,
    OFFSET_COLUMN,
    RETRACTS_COLUMN,
)
from streamhouse.tiering.tasks.overlong_decimals import without_overlong_decimals

__all__ = ["lake_rows"]

_LOG_ONLY = (CHANGE_TYPE_COLUMN, RETRACTS_COLUMN)


def lake_rows(
    batches: Sequence[LogBatch],
    schema: pa.Schema,
    *,
    keep: npt.NDArray[np.bool_] | None = None,
) -> pa.Table:
    """Return consecutive rows of a bucket as rows of the lake table with `schema`.

    `keep` says which of the rows are wanted; None means all. A column `__change_type` of the lake
    table gets the names of the changes.

    Raises:
        CorruptDataError: the rows are not those of the lake table's columns.
    """
    logged = pa.Table.from_batches([batch.data for batch in batches])
    system = [f.name for f in LAKE_SYSTEM_FIELDS]
    user_columns = [name for name in schema.names if name not in (*system, CHANGE_TYPE_COLUMN)]
    if [name for name in logged.column_names if name not in _LOG_ONLY] != user_columns:
        raise CorruptDataError(
            f"rows with columns {logged.column_names} came for a lake table with {user_columns}"
        )
    positions = _system_columns(batches)
    if keep is not None:
        logged = logged.filter(pa.array(keep))
        positions = {name: values[keep] for name, values in positions.items()}
    columns: list[pa.ChunkedArray | pa.Array] = []
    for f in schema:
        if f.name in positions:
            columns.append(pa.array(positions[f.name]).cast(f.type))
        elif f.name == CHANGE_TYPE_COLUMN:
            columns.append(change_type_names(logged.column(f.name).combine_chunks()))
        else:
            column = logged.column(f.name)
            column = without_overlong_decimals(column, f, offsets=positions[OFFSET_COLUMN])
            columns.append(column if column.type.equals(f.type) else column.cast(f.type))
    try:
        return pa.table(columns, schema=schema)
    except (pa.ArrowException, ValueError) as error:
        raise CorruptDataError(f"rows do not fit the lake table: {error}") from error


def _system_columns(batches: Sequence[LogBatch]) -> dict[str, npt.NDArray[Any]]:
    start, end = batches[0].base_offset, batches[-1].end_offset
    counts = [batch.data.num_rows for batch in batches]
    bucket, offset, timestamp = (f.name for f in LAKE_SYSTEM_FIELDS)
    return {
        bucket: np.full(end - start, batches[0].bucket, dtype=np.int32),
        offset: np.arange(start, end, dtype=np.int64),
        timestamp: np.repeat(np.array([b.timestamp_us for b in batches], dtype=np.int64), counts),
    }
