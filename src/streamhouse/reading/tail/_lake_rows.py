"""Rows of the log as rows of a lake table: surviving versions, lake types, system columns.

Two narrow columns of a bucket's range, `__change_type` and `__retracts` (9 bytes a row), tell a
task which versions to add and which to retract, by the rule of `fold_tail`. A task with only a part
of the range reads these columns ahead to the range's end: no task writes a version that the same
round retracts. In a lake table with row ids a task reads them from the range's start: a later
version of a row keeps the row's id.

Earlier services let decimals with more digits than their type through in one case. Iceberg has no
type for such a value, and the value must not stop the rounds of the table: it becomes null, and a
warning names its column and offset. In a column without nulls the round fails with advice.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.client import LogBatch
from streamhouse.core.errors import CorruptDataError, UnsupportedError
from streamhouse.core.model.changelog import change_type_names, fold_tail, replaced_before
from streamhouse.core.model.lake.facts import LAKE_SYSTEM_FIELDS
from streamhouse.core.model.lake.limits import decimal_limits
from streamhouse.core.model.offsets import OffsetRange
from streamhouse.core.model.schema import (
    CHANGE_TYPE_COLUMN,
    OFFSET_COLUMN,
    RETRACTS_COLUMN,
)
from streamhouse.core.model.values.numpy_arrays import boolean_array, integer_array, integer_values
from streamhouse.reading.tail._log_chunks import LogReads, chunks_of, read_log

__all__ = ["FoldedSplit", "fold_split", "lake_rows"]

_logger = logging.getLogger(__name__)

_LOG_ONLY = (CHANGE_TYPE_COLUMN, RETRACTS_COLUMN)
# Filters and Parquet take longer over many small pieces than it takes to copy the pieces into one.
_PIECES_MAX = 8


@dataclass(frozen=True, slots=True)
class FoldedSplit:
    """`survives`: for each row of the split, whether the lake gets the row.

    `retracted`: the offsets of lake rows retracted by the split, ascending, each once.
    `replaced`: for each row of the split, the offset of the lake row of which it is a later
    version; -1 for a new row. None in a lake table without row ids.
    """

    survives: npt.NDArray[np.bool_]
    retracted: npt.NDArray[np.int64]
    replaced: npt.NDArray[np.int64] | None = None


def fold_split(
    log: LogReads,
    table: str,
    split: OffsetRange,
    *,
    boundary: int,
    bucket_end: int,
    table_id: int,
    schema_id: int,
    has_row_ids: bool = False,
) -> FoldedSplit:
    """Fold the changes of `split`, one of the splits of its bucket's range [boundary, bucket_end).

    `boundary` is the first offset that is not in the lake. With `has_row_ids` the changes before
    the split are read, too: a row of the split may be a later version of theirs.
    """
    first = boundary if has_row_ids else split.start
    count = bucket_end - first
    change_types = np.empty(count, dtype=np.int8)
    retracts = np.empty(count, dtype=np.int64)
    changes = OffsetRange(bucket=split.bucket, start=first, end=bucket_end)
    columns = (CHANGE_TYPE_COLUMN, RETRACTS_COLUMN)
    position = 0
    batches = read_log(log, table, changes, columns=columns, table_id=table_id, schema_id=schema_id)
    for chunk in chunks_of(batches):
        end = position + chunk.row_count
        rows = pa.Table.from_batches([batch.data for batch in chunk.batches]).combine_chunks()
        change_types[position:end] = integer_values(rows.column(CHANGE_TYPE_COLUMN))
        retracts[position:end] = integer_values(rows.column(RETRACTS_COLUMN), null=-1)
        position = end
    offsets = np.arange(first, bucket_end, dtype=np.int64)
    tail = fold_tail(change_types, retracts, offsets, boundary=first)
    replaced = replaced_before(retracts, boundary=boundary) if has_row_ids else None
    if split.start == boundary and split.end == bucket_end:
        return FoldedSplit(survives=tail.survives, retracted=tail.retracted, replaced=replaced)
    rows = slice(split.start - first, split.end - first)
    # No version is retracted twice: the offsets are distinct.
    split_retracts = retracts[rows]
    return FoldedSplit(
        survives=tail.survives[rows],
        retracted=np.sort(split_retracts[(split_retracts >= 0) & (split_retracts < boundary)]),
        replaced=None if replaced is None else replaced[rows],
    )


def lake_rows(
    batches: Sequence[LogBatch],
    schema: pa.Schema,
    *,
    keep: npt.NDArray[np.bool_] | None = None,
) -> pa.Table:
    """Return consecutive rows of a bucket as rows of the lake table with `schema`.

    `keep` selects rows; None means all. A column `__change_type` of the lake table gets the names
    of the changes.

    Raises:
        CorruptDataError: the rows do not have the lake table's columns.
    """
    logged = pa.Table.from_batches([batch.data for batch in batches])
    if len(batches) > _PIECES_MAX:
        logged = logged.combine_chunks()
    system = [f.name for f in LAKE_SYSTEM_FIELDS]
    user_columns = [name for name in schema.names if name not in (*system, CHANGE_TYPE_COLUMN)]
    if [name for name in logged.column_names if name not in _LOG_ONLY] != user_columns:
        raise CorruptDataError(
            f"rows with columns {logged.column_names} came for a lake table with {user_columns}"
        )
    positions = _system_columns(batches)
    if keep is not None:
        logged = logged.filter(boolean_array(keep))
        positions = {name: values[keep] for name, values in positions.items()}
    columns: list[pa.ChunkedArray | pa.Array] = []
    for f in schema:
        if f.name in positions:
            columns.append(integer_array(positions[f.name], f.type))
        elif f.name == CHANGE_TYPE_COLUMN:
            columns.append(change_type_names(logged.column(f.name).combine_chunks()))
        else:
            column = logged.column(f.name)
            column = _without_overlong_decimals(column, f, offsets=positions[OFFSET_COLUMN])
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


def _without_overlong_decimals(
    column: pa.ChunkedArray, field: pa.Field, *, offsets: npt.NDArray[Any]
) -> pa.ChunkedArray:
    """Return the column with null for each decimal of too many digits; rows are at `offsets`.

    Raises `UnsupportedError`, with column and offset, if the column or value cannot be null.
    """
    limits = decimal_limits(field.name, column.type)
    if all(limit.keeps(chunk) for limit in limits for chunk in column.chunks):
        return column
    (limit, *_) = limits
    if pa.types.is_nested(column.type) or not field.nullable:
        rows = pa.concat_arrays(column.chunks)
        row = next(i for i in range(len(rows)) if not all(k.keeps(rows[i : i + 1]) for k in limits))
        raise UnsupportedError(
            f"column '{field.name}' has a value {limit.reason} at offset {int(offsets[row])}, and"
            " no null can take its place: delete or replace the row, or overwrite the table"
        )
    low, high = (pa.scalar(bound, column.type) for bound in (limit.lowest, limit.highest))
    is_wrong = pc.fill_null(pc.or_(pc.less(column, low), pc.greater(column, high)), False)
    for row in np.flatnonzero(np.asarray(is_wrong)).tolist():
        _logger.warning(
            "event=value_is_null_in_lake column=%s why=%r offset=%d",
            field.name,
            limit.reason,
            int(offsets[row]),
        )
    return pc.if_else(is_wrong, pa.scalar(None, column.type), column)
