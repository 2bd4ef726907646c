"""Reading one split on an executor: its pieces in order, filtered, as batches of even size.

Executors load only this module and its imports: pyarrow and the service's client, neither the lake
library nor the SQL parser.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa

from streamhouse.client import StorageClient
from streamhouse.core.errors import TableNotFoundError
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.reading.options.connection import client_for
from streamhouse.reading.scan._change_form import in_spark_form
from streamhouse.reading.scan._lake_scan import read_lake_piece
from streamhouse.reading.scan._log_scan import read_log_piece
from streamhouse.reading.scan.scan import (
    LakePiece,
    LogPiece,
    Piece,
    RowsPiece,
    ScanContext,
    Split,
)
from streamhouse.reading.where._evaluation import filter_batch

__all__ = ["coalesce", "read_split"]

_COALESCED_BYTES: Final = 8 << 20


def read_split(
    split: Split,
    context: ScanContext,
    *,
    client: StorageClient | None = None,
    is_beginning: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Yield exactly the split's rows, every batch with the schema `context.output_schema`.

    `client` replaces the process's own connection to the service. Raises `TableNotFoundError` when
    the table was dropped and created again since the plan. `is_beginning` says that the rows go on
    from none that this process has read before: those may be lost since (`LogCutError`).
    """
    if any(isinstance(piece, LogPiece) for piece in split.pieces):
        client = client or client_for(context.endpoint, context.token)
        _check_same_table(client, context)
        for piece in split.pieces if is_beginning else ():
            if isinstance(piece, LogPiece):
                client.begin_reading(context.table, {piece.bucket: piece.start})
    filesystem = LakeFilesystem(context.lake_properties)
    pieces = (
        batch for piece in split.pieces for batch in _read_piece(piece, context, client, filesystem)
    )
    rows = _filtered(pieces, context)
    if context.change_form is not None:
        rows = in_spark_form(rows, context)
    return coalesce(rows, rows_max=context.batch_rows)


def _check_same_table(client: StorageClient, context: ScanContext) -> None:
    # Asking also teaches the client which node serves which bucket.
    table_id = client.describe_table(context.table).table_id
    if table_id != context.table_id:
        raise TableNotFoundError(
            f"table '{context.table}' was dropped and created again after this read was planned;"
            " load it again"
        )


def _read_piece(
    piece: Piece, context: ScanContext, client: StorageClient | None, filesystem: LakeFilesystem
) -> Iterator[pa.RecordBatch]:
    columns = context.scanned
    if isinstance(piece, LakePiece):
        yield from read_lake_piece(filesystem, piece, context, columns)
    elif isinstance(piece, LogPiece):
        assert client is not None, "a split with log pieces has a client"
        yield from read_log_piece(client, piece, context, columns)
    else:
        yield from _read_rows(piece)


def _read_rows(piece: RowsPiece) -> Iterator[pa.RecordBatch]:
    with pa.ipc.open_stream(piece.stream) as reader:
        yield from reader


def _filtered(batches: Iterable[pa.RecordBatch], context: ScanContext) -> Iterator[pa.RecordBatch]:
    names = [column.name for column in context.output]
    for batch in batches:
        rows = batch if context.predicate is None else filter_batch(context.predicate, batch)
        if rows.num_rows:
            is_exact = context.change_form is not None or not context.filters
            yield rows if is_exact else rows.select(names)


def coalesce(batches: Iterable[pa.RecordBatch], *, rows_max: int) -> Iterator[pa.RecordBatch]:
    """Yield the same rows with small neighbours joined; large batches pass untouched.

    Spark pays a fixed price per batch, and a log of many small appends has many small batches.
    """
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if waiting and (rows + batch.num_rows > rows_max or size > _COALESCED_BYTES):
            yield _joined(waiting)
            waiting, rows, size = [], 0, 0
        if not waiting and batch.num_rows * 2 > rows_max:
            yield batch
            continue
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
