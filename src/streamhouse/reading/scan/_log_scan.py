"""Reading a piece of the log on an executor: exactly its offsets, as batches of scan columns.

The log of a primary key table is its changelog: a plan names the requested change types, and each
piece names its retracted row versions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.client import LogBatch, StorageClient
from streamhouse.core.errors import OffsetOutOfRangeError
from streamhouse.core.model.changelog import APPEND
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.core.model.values.numpy_arrays import boolean_array, integer_array
from streamhouse.reading.scan._retraction import change_type_array, retracted_mask
from streamhouse.reading.scan.scan import LogPiece, ScanColumn, ScanContext
from streamhouse.reading.where._evaluation import filtered

__all__ = ["read_log_piece"]

_log = logging.getLogger(__name__)


def read_log_piece(
    client: StorageClient, piece: LogPiece, context: ScanContext, columns: Sequence[ScanColumn]
) -> Iterator[pa.RecordBatch]:
    """Yield the piece's rows with exactly `columns`, after retractions and the time bounds.

    Raises `OffsetOutOfRangeError` naming bucket and range when rows have left the log since the
    plan was made; without `fail_on_data_loss` they are skipped with a warning.
    """
    made_here = {c.name for c in _system_columns(context)} | {CHANGE_TYPE_COLUMN}
    names = [column.name for column in columns if column.name not in made_here]
    if context.has_changelog and (
        context.change_types is not None or any(c.name == CHANGE_TYPE_COLUMN for c in columns)
    ):
        names.append(CHANGE_TYPE_COLUMN)
    # A batch without columns has no rows: something must carry them.
    names = names or [context.carrier_column]
    schema = pa.schema([column.to_arrow() for column in columns])
    position = piece.start
    while position < piece.end:
        try:
            for batch in client.read_range(
                context.table,
                piece.bucket,
                position,
                piece.end,
                columns=names,
                schema_id=context.schema_id,
                table_id=context.table_id,
            ):
                position = batch.end_offset
                rows = _rows(batch, context, columns, schema)
                if rows is None:
                    continue
                keep = _keep(batch, piece, context)
                rows = rows if keep is None else filtered(rows, boolean_array(keep))
                if rows.num_rows:
                    yield rows
            return
        except OffsetOutOfRangeError as error:
            position = _skip_loss(client, piece, position, context, error)


def _skip_loss(
    client: StorageClient,
    piece: LogPiece,
    position: int,
    context: ScanContext,
    error: OffsetOutOfRangeError,
) -> int:
    """Return the offset to go on from, or raise."""
    at = client.positions(context.table).get(piece.bucket)
    first = 0 if at is None else at.log_start_offset
    where = f"table '{context.table}', bucket {piece.bucket}: rows [{position}, {piece.end})"
    if at is None or first <= position or piece.end > at.high_watermark:
        raise OffsetOutOfRangeError(f"{where} are not in the log: {error.message}") from error
    if context.fail_on_data_loss:
        raise OffsetOutOfRangeError(
            f"{where} left the log after this read was planned (it now holds"
            f" [{first}, {at.high_watermark})): read again to find them in the lake, or set"
            " failOnDataLoss=false to skip them"
        ) from error
    _log.warning("%s left the log; skipping to offset %d", where, min(first, piece.end))
    return min(first, piece.end)


def _rows(
    batch: LogBatch,
    context: ScanContext,
    columns: Sequence[ScanColumn],
    schema: pa.Schema,
) -> pa.RecordBatch | None:
    from_us, to_us = context.from_timestamp_us, context.to_timestamp_us
    if from_us is not None and batch.timestamp_us < from_us:
        return None
    if to_us is not None and batch.timestamp_us >= to_us:
        return None
    count = batch.data.num_rows
    arrays = []
    for column in columns:
        if column.name == context.bucket_column.name:
            values = np.full(count, batch.bucket, dtype=np.int32)
            array = integer_array(values, column.type)
        elif column.name == context.offset_column.name:
            offsets = np.arange(batch.base_offset, batch.end_offset, dtype=np.int64)
            array = integer_array(offsets, column.type)
        elif column.name == context.timestamp_column.name:
            times = np.full(count, batch.timestamp_us, dtype=np.int64)
            array = integer_array(times, column.type)
        elif column.name == CHANGE_TYPE_COLUMN:
            array = change_type_array(_change_types(batch, context))
        else:
            array = batch.data.column(column.name)
            array = array if array.type == column.type else array.cast(column.type)
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _keep(batch: LogBatch, piece: LogPiece, context: ScanContext) -> npt.NDArray[np.bool_] | None:
    """Return which rows are of a wanted change type and not retracted; None for all."""
    keep: npt.NDArray[np.bool_] | None = None
    if context.has_changelog and context.change_types is not None:
        is_requested = np.zeros(128, dtype=np.bool_)
        is_requested[list(context.change_types)] = True
        keep = is_requested[_change_types(batch, context)]
    if piece.retracted is not None:
        offsets = np.arange(batch.base_offset, batch.end_offset, dtype=np.int64)
        lives = ~retracted_mask(offsets, piece.retracted.offsets)
        keep = lives if keep is None else keep & lives
    return keep


def _change_types(batch: LogBatch, context: ScanContext) -> npt.NDArray[np.int8]:
    if not context.has_changelog:
        return np.full(batch.data.num_rows, APPEND, dtype=np.int8)
    column = batch.data.column(CHANGE_TYPE_COLUMN)
    values = np.frombuffer(column.buffers()[1], dtype=np.int8)
    return values[column.offset : column.offset + len(column)]


def _system_columns(context: ScanContext) -> tuple[ScanColumn, ...]:
    return (context.bucket_column, context.offset_column, context.timestamp_column)
