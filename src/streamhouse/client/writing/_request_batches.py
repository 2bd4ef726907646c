"""Cutting, joining and routing a caller's rows into batches of the size of one request."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa

from streamhouse.client.values.forms import Arrow, batches_of
from streamhouse.core.errors import RequestTooLargeError
from streamhouse.core.model.bucketing import (
    buckets_for_rows,
    buckets_of_few,
    rows_of_buckets,
)
from streamhouse.core.model.casts.conform import conform
from streamhouse.core.model.identity import Same
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableInfo
from streamhouse.core.wire.request_stream import plain_type

__all__ = [
    "BATCH_ROWS_MAX",
    "REQUEST_BYTES_TARGET",
    "ROW_BYTES_MAX",
    "bounded_batches",
    "bounded_parts",
    "check_row_sizes",
    "has_flat_columns",
    "plain",
    "rows_by_bucket",
]

REQUEST_BYTES_TARGET: Final = 8 << 20
BATCH_ROWS_MAX: Final = 65_536
ROW_BYTES_MAX: Final = 32 << 20
"""The longest row of a log table on the wire: the service's largest record batch."""
KEYED_ROW_BYTES_MAX: Final = 8 << 20
"""The longest row of a primary key table, in its stored form."""
_ROW_OVERHEAD_BYTES: Final = 512
"""The most bytes by which a row's column is longer on the wire than in its stored form."""

_FLAT_TYPES: Final = frozenset(
    t.id
    for t in (
        *(pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()),
        *(pa.string(), pa.binary(), pa.date32(), pa.timestamp("us"), pa.decimal128(38, 0)),
    )
)


def bounded_batches(
    data: pa.Table | pa.RecordBatch | Iterable[pa.RecordBatch], *, is_flat: bool | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield `data` in order as non-empty batches, each fit for one request.

    From an iterator of batches at most one request's batches and the next batch are in memory.

    Small chunks are joined: a request and a sync for each would cost more than the copy. A caller
    that knows whether the columns are flat (`has_flat_columns`) may pass `is_flat`.
    """
    chunks: Iterable[pa.RecordBatch]
    if isinstance(data, pa.RecordBatch):
        chunks = [data]
    elif isinstance(data, pa.Table):
        chunks = data.to_batches()
    else:
        chunks = data
    if isinstance(chunks, list) and len(chunks) == 1 and _is_plainly_small(chunks[0], is_flat):
        if chunks[0].num_rows:
            yield chunks[0]
        return
    waiting: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    for chunk in chunks:
        for part in _cut(plain(chunk)):
            if waiting and (
                rows + part.num_rows > BATCH_ROWS_MAX
                or size_bytes + part.nbytes > REQUEST_BYTES_TARGET
            ):
                yield _joined(waiting)
                waiting, rows, size_bytes = [], 0, 0
            waiting.append(part)
            rows += part.num_rows
            size_bytes += part.nbytes
    if waiting:
        yield _joined(waiting)


def check_row_sizes(data: pa.Table | pa.RecordBatch, table: TableInfo) -> None:
    """Raise `RequestTooLargeError` for the first row above the service's limit.

    The check precedes the first request: otherwise the other rows would be stored without this row.
    """
    bytes_max = ROW_BYTES_MAX
    if table.is_primary_key_table:
        if not has_flat_columns(data.schema):
            # Nested values have another stored form, which only the service can measure.
            return
        bytes_max = KEYED_ROW_BYTES_MAX + _ROW_OVERHEAD_BYTES * data.num_columns
    first = 0
    for chunk in [data] if isinstance(data, pa.RecordBatch) else data.to_batches():
        large_row = _row_too_large(chunk, bytes_max)
        if large_row is not None:
            row, size = large_row
            raise RequestTooLargeError(
                f"table '{table.path}': row {first + row} has {size} bytes; at most {bytes_max}:"
                " keep larger values as files, and their addresses in the table"
            )
        first += chunk.num_rows


def _row_too_large(batch: pa.RecordBatch, bytes_max: int) -> tuple[int, int] | None:
    """Return place and size of the first row that is too large, by bisection."""
    waiting = [(0, batch)]
    while waiting:
        first, part = waiting.pop()
        # On the wire a row is padded, and a little larger than its values.
        if part.nbytes <= bytes_max // 2:
            continue
        if part.num_rows == 1:
            size = pa.ipc.get_record_batch_size(plain(part))
            if size > bytes_max:
                return first, size
            continue
        half = part.num_rows // 2
        waiting += [(first + half, part.slice(half)), (first, part.slice(0, half))]
    return None


def bounded_parts(reader: pa.RecordBatchReader, *, call: str) -> Iterator[Arrow]:
    """Yield a stream's rows as parts of the size of a request, at least one part."""
    is_empty = True
    for rows in bounded_batches(batches_of(reader, call=call)):
        is_empty = False
        yield rows
    if is_empty:
        yield reader.schema.empty_table()


def has_flat_columns(schema: pa.Schema) -> bool:
    """Return whether all columns are flat: none then has more bytes than all buffers."""
    return _FLAT_TYPES.issuperset([t.id for t in schema.types])


def _is_plainly_small(batch: pa.RecordBatch, is_flat: bool | None) -> bool:
    """Return whether a batch surely fits one request, by an estimate: a full look takes 15 us."""
    return (
        batch.num_rows <= BATCH_ROWS_MAX
        and batch.get_total_buffer_size() * batch.num_columns <= REQUEST_BYTES_TARGET
        and (has_flat_columns(batch.schema) if is_flat is None else is_flat)
    )


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    # Joining one batch would copy it.
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Halve a batch until each part is small enough, or has one row; row sizes may vary a lot."""
    # `nbytes` counts a slice's own part of shared buffers.
    if batch.num_rows > 1 and (
        batch.num_rows > BATCH_ROWS_MAX or batch.nbytes > REQUEST_BYTES_TARGET
    ):
        half = batch.num_rows // 2
        yield from _cut(batch.slice(0, half))
        yield from _cut(batch.slice(half))
    elif batch.num_rows:
        yield batch


def plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return `batch` without dictionaries, which the wire format lacks, and without views.

    The size of a slice of a view column is unknown, and Arrow cannot sort views by bucket.
    """
    types = [
        plain_type(t.value_type if pa.types.is_dictionary(t) else t, what="the data")
        for t in batch.schema.types
    ]
    if types == batch.schema.types:
        return batch
    columns = [_as(c, t) for c, t in zip(batch.columns, types, strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _as(column: pa.Array, t: pa.DataType) -> pa.Array:
    if column.type == t:
        return column
    if pa.types.is_dictionary(column.type) and column.type.value_type != t:
        # Arrow does not take from views.
        column = pa.DictionaryArray.from_arrays(column.indices, column.dictionary.cast(t))
    return column.cast(t)


def rows_by_bucket(table: TableInfo, rows: pa.RecordBatch) -> dict[int, pa.RecordBatch]:
    """Return rows of a primary key table by bucket, each bucket's in the order of `rows`."""
    if table.bucket_count == 1 or rows.num_rows == 0:
        return {0: rows} if table.bucket_count == 1 else {}
    names = rows.schema.names
    present = [i for i, name in enumerate(names) if name in table.descriptor.primary_key]
    key = table.descriptor.primary_key
    key_schema = _key_schema(Same(table))
    keys = conform(rows.select(present), key_schema, table=str(table.path), key=key)
    bucket_key = table.descriptor.effective_bucket_key
    bucket_of_row = buckets_of_few([keys.column(name) for name in bucket_key], table.bucket_count)
    if bucket_of_row is not None:
        return rows_of_buckets(rows, bucket_of_row)
    return rows_of_buckets(rows, buckets_for_rows(keys, bucket_key, table.bucket_count))


@functools.lru_cache(maxsize=256)
def _key_schema(table: Same) -> Schema:
    info: TableInfo = table.value
    return info.schema.select(info.descriptor.primary_key, table=str(info.path))
